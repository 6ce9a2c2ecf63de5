"""Programs as answers: MBPP and LiveCodeBench, and the program in a completion."""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import re
import textwrap
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from rlkv.data.problems import text_field
from rlkv.evaluation.sandbox import Limits, check_tests, run_tests
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row, first_text
from rlkv.verifier.extraction import after_thinking

# the task and its tests as in Austin et al. (arXiv 2108.07732, section 3.1); the last sentence
# names the form in which the published evaluation looks for the program
TEMPLATE = (
    "You are an expert Python programmer, and here is your task: {problem} Your code should pass "
    "these tests:\n\n{tests}\n\nPut the whole program into one ```python code block at the end of "
    "your answer."
)
MAX_TRIMMED_LINES = 60
# language and content; a fence with a language opens a block even within one that was not closed
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*(?:\n|\Z)"
    r"(.*?)(?:^[ \t]*```[ \t]*+(?![\w+-])[^\n]*$|(?=^[ \t]*```)|\Z)",
    re.MULTILINE | re.DOTALL,
)
# content of a block of Python that begins behind other words of its line (of a list or a heading)
_BEHIND_WORDS = re.compile(
    r"(?<!`)```(?:[Pp]ython3?|py)[ \t\r]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
_PYTHON = {"python", "python3", "py"}
_DEFINITION = re.compile(
    r"^[ \t]*(?:def |class |async def |\w+[ \t]*=[ \t]*(?:\w+\([^()\n]*\)\()?lambda\b)",
    re.MULTILINE,
)
_CODE_LINE = re.compile(r"^(?:def |class |import |from \w|@|async def )", re.MULTILINE)


def extract_code(text: str, is_called: bool = False) -> str | None:
    """Return the program in a completion, or None.

    The last Python block, else the last one behind other words of a line that is valid Python with
    a definition or an import, else the last block without a language, else plain code.  A block
    that the text never closes ends with the text; one in a list is not indented.  Plain code begins
    at the first line with a definition or an import and ends at the last line up to which it is
    valid Python.

    Args:
        is_called: whether tests call what the program defines: then a block that only shows how to
            call it does not count.
    """
    text = after_thinking(text)
    blocks = _BLOCK.findall(text)
    python = [content for language, content in blocks if language.lower() in _PYTHON]
    defining = [content for content in python if is_called and _DEFINITION.search(content)]
    found = _last(defining or python)
    if found is None:
        behind = map(_program, _BEHIND_WORDS.findall(text))
        found = _last(code for code in behind if _CODE_LINE.search(code) and _parse(code))
    if found is None:
        found = _last(content for language, content in blocks if not language)
    if found is not None:
        return _until_done(_program(found))
    return None if blocks else _plain_code(text)


def _last(contents: Iterable[str]) -> str | None:
    """Return the last one that is not blank."""
    return next((content for content in reversed([*contents]) if content.strip()), None)


def _program(content: str) -> str:
    """Return the content of a block without the indentation of a list or a fence in its last line.

    Content that is valid Python, or is not in any of these ways, stays as it is.
    """
    closed = re.split(r"```[ \t\r]*$", content, maxsplit=1, flags=re.MULTILINE)[0]
    for program in (content, textwrap.dedent(content), textwrap.dedent(closed)):
        if _parse(program) is not None:
            return program
    return content


def _plain_code(text: str) -> str | None:
    start = _CODE_LINE.search(text)
    if start is None:
        return None
    lines = _until_done(text[start.start() :]).splitlines()
    ends = range(len(lines), max(0, len(lines) - MAX_TRIMMED_LINES), -1)
    for end in ends:
        code = "\n".join(lines[:end])
        if _parse(code) is not None:
            return code
    return None


def _until_done(program: str) -> str:
    """Return what is before the first line ``[DONE]`` behind a program, as MBPP's examples end."""
    for line in re.finditer(r"^\[DONE\]", program, re.MULTILINE):
        if _parse(program[: line.start()]) is not None:
            return program[: line.start()]
    return program


def _parse(source: str) -> ast.Module | None:
    """Return None for what is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in generated code
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def grade_code(text: str, problem: EvalProblem) -> bool:
    """Return whether the program in ``text`` passes all tests of the problem, in the sandbox."""
    program = extract_code(text, is_called=True)
    if program is None:
        return False
    return run_tests(program, problem.meta["tests"], setup=problem.meta["setup"]).passed


def parse_mbpp(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of MBPP.

    Its fields: prompt or text, test or test_list, code, perhaps test_setup_code and test_imports.
    """
    problem = first_text(row, ("prompt", "text"), where)
    tests = row.get("test", row.get("test_list"))
    if not _are_texts(tests) or not tests:
        raise ValueError(
            f"{where}: the tests (test or test_list) must be a list of texts, at least one"
        )
    imports = row.get("test_imports") or []
    if not _are_texts(imports):
        raise ValueError(f"{where}: test_imports must be a list of texts")
    lines = [*imports, first_text(row, ("test_setup_code",), where, default="")]
    setup = "\n".join(line for line in lines if line.strip())
    try:
        check_tests(tests, setup)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    program = text_field(row, "code", where).replace("\r\n", "\n").replace("\r", "\n")
    texts = {"problem": problem.strip(), "tests": "\n".join(tests)}
    meta = {"problem": problem, "tests": tests, "setup": setup}
    return ParsedRow(texts, program, meta)


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


MBPP = EvalTask(
    name="mbpp",
    kind="code",
    template=TEMPLATE,
    max_new_tokens=8192,
    file="mbpp_test",
    fields="prompt (or text), test (or test_list) and code",
    ids=("task_id",),
    hub=HubData("google-research-datasets/mbpp", "full"),
    parse=parse_mbpp,
    grade=grade_code,
)

LIVECODEBENCH_TEMPLATE = (
    "You are an expert Python programmer. Solve the following problem.\n\n{problem}\n\n{form}\n\n"
    "Put the whole program into one ```python code block at the end of your answer."
)
STDIN = "The program reads its input from standard input and writes its answer to standard output."
STARTER = "Complete this code, keeping its names:\n\n```python\n{starter}\n```"
DIFFICULTIES = ("easy", "medium", "hard")
# of each test
LIMITS = Limits(cpu_seconds=6, wall_seconds=60, memory_bytes=4 << 30, file_bytes=64 << 20)
# what solutions use without an import, in this order: later names replace earlier ones
_NAMES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
MODULES = _NAMES.split()
PRELUDE = "".join(f"from {name} import *\n" for name in MODULES)
PRELUDE += f"import {', '.join(MODULES)}\nsys.setrecursionlimit(50000)\n"
SETUP = "from inside.judge import same_output, same_value"
MOST_BYTES = 1 << 30  # of the unpacked tests of a problem
_DAMAGE = (
    ValueError,  # and with it binascii.Error
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    RecursionError,
    zlib.error,
    pickle.UnpicklingError,
)


class _PlainData(pickle.Unpickler):
    """Refuses everything but built-in data: a data set must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_tests(text: str) -> list[tuple[str, str]]:
    """Return (input, output) of every test.

    ``text`` is JSON, which private tests pack as base64 of zlib of a pickled text.

    Raises:
        ValueError: if it is neither, unpacks to more than a GiB, or a test lacks a text.
    """
    try:
        if not text.lstrip().startswith("["):
            unpacking = zlib.decompressobj()
            packed = unpacking.decompress(base64.b64decode(text), MOST_BYTES)
            if unpacking.unconsumed_tail:
                raise ValueError(f"the tests have more than {MOST_BYTES} bytes")
            text = _PlainData(io.BytesIO(packed)).load()
        tests = [(test["input"], test["output"]) for test in json.loads(text)]
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not all(isinstance(part, str) for test in tests for part in test):
        raise ValueError("an input or output is not a text")
    return tests


def parse_livecodebench(row: dict[str, Any], where: str) -> ParsedRow:
    """Parse a row of LiveCodeBench.

    ``meta`` holds the tests as they are packed: unpacked, they fill the memory.
    """
    packed = {name: text_field(row, f"{name}_test_cases", where) for name in ("public", "private")}
    try:
        tests = [test for text in packed.values() for test in read_tests(text)]
        function = json.loads(text_field(row, "metadata", where) or "{}").get("func_name")
        if function is not None:
            for given, expected in tests:
                _ = [*map(json.loads, given.split("\n")), json.loads(expected)]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where}: its tests or metadata are not those of LiveCodeBench: {error}"
        ) from None
    if not tests or not (function is None or str(function).isidentifier()):
        raise ValueError(f"{where}: no tests, or func_name {function!r} is not a name")
    question = text_field(row, "question_content", where)
    starter = text_field(row, "starter_code", where)
    form = STARTER.replace("{starter}", starter) if starter.strip() else STDIN
    meta = {"problem": question, "function": function, **packed}
    return ParsedRow({"problem": question, "form": form}, "", meta)


def grade_livecodebench(text: str, problem: EvalProblem) -> bool:
    """Return whether the program in ``text`` passes all tests, each in a sandbox of its own."""
    function = problem.meta["function"]
    program = extract_code(text, is_called=function is not None)
    if program is None:
        return False
    program = _with_prelude(program)
    for tests in (problem.meta["public"], problem.meta["private"]):
        for given, expected in read_tests(tests):
            if not _passes(program, function, given, expected):
                return False
    return True


def _with_prelude(program: str) -> str:
    """Return the program behind ``PRELUDE``, which comes after its imports from ``__future__``."""
    lines = program.split("\n")
    parsed = _parse(program)
    after = 0
    for node in parsed.body if parsed else ():
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            after = node.end_lineno or 0
    return "\n".join([*lines[:after], PRELUDE, *lines[after:]])


def _passes(program: str, function: str | None, given: str, expected: str) -> bool:
    if function is None:
        test = f"assert same_output(output, {expected!r})"
        return run_tests(program, [test], LIMITS, setup=SETUP, stdin=given).passed
    called = f"Solution().{function}" if "class Solution" in program else function
    test = (
        f"assert same_value({called}(*map(json.loads, {given.split(chr(10))!r})), "
        f"json.loads({expected!r}))"
    )
    return run_tests(program, [test], LIMITS, setup=SETUP).passed


def select_difficulty(rows: Iterable[Row], difficulty: str) -> list[Row]:
    """Select the rows of a difficulty, in the file's order."""
    return [row for row in rows if row[1].get("difficulty") == difficulty]


CODE = [
    MBPP,
    EvalTask(
        name="livecodebench",
        kind="code",
        template=LIVECODEBENCH_TEMPLATE,
        max_new_tokens=32768,
        file="livecodebench",
        fields="question_content, starter_code, public_test_cases, private_test_cases, metadata "
        "and difficulty",
        ids=("question_id",),
        hub=HubData("lighteval/code_generation_lite", "v6"),
        parse=parse_livecodebench,
        grade=grade_livecodebench,
    ),
]
for _difficulty in DIFFICULTIES:
    _select = partial(select_difficulty, difficulty=_difficulty)
    CODE.append(replace(CODE[1], name=f"livecodebench:{_difficulty}", select=_select))
