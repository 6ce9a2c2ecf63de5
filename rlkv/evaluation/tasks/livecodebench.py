"""LiveCodeBench: programs that read standard input, or a method of ``Solution``, run in the sandbox test by test.

Fields, limits of time and memory, and what counts as equal output are those of the benchmark's own evaluation
(github.com/LiveCodeBench/LiveCodeBench); prompt and code were written here.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from rlkv.data.deepscaler import text_field
from rlkv.evaluation.sandbox import Limits, run_tests
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, Row
from rlkv.evaluation.tasks.code import extract_code

TEMPLATE = (
    "You are an expert Python programmer. Solve the following problem.\n\n{problem}\n\n{form}\n\nPut the whole program "
    "into one ```python code block at the end of your answer."
)
STDIN = "The program reads its input from standard input and writes its answer to standard output."
STARTER = "Complete this code, keeping its names:\n\n```python\n{starter}\n```"
DIFFICULTIES = ("easy", "medium", "hard")
LIMITS = Limits(cpu_seconds=6, wall_seconds=60, memory_bytes=4 << 30, file_bytes=64 << 20)  # of each test
# what solutions use without an import, in this order: later names replace earlier ones
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PRELUDE = "\n".join(
    [*(f"from {name} import *" for name in MODULES), f"import {', '.join(MODULES)}", "sys.setrecursionlimit(50000)", ""]
)
SETUP = "from inside.judge import same_output, same_value"


MOST_BYTES = 1 << 30  # of the unpacked tests of a problem
_DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, RecursionError),
    *(binascii.Error, zlib.error, pickle.UnpicklingError),
)


class _PlainData(pickle.Unpickler):
    """Refuses everything but built-in data: a data set must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_tests(text: str) -> list[tuple[str, str]]:
    """(input, output) of every test in JSON, which private tests pack as base64 of zlib of a pickled text.

    Raises:
        ValueError: if it is none of both, unpacks to more than a GiB, or a test lacks a text.
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


def parse_livecodebench(row: dict[str, Any], where: str, number: int) -> ParsedRow:
    """A row with question_content, starter_code, public and private_test_cases, metadata, perhaps question_id.

    ``meta`` holds the tests as they are packed: unpacked, they fill the memory.
    """
    packed = {name: text_field(row, f"{name}_test_cases", where) for name in ("public", "private")}
    try:
        tests = [test for text in packed.values() for test in read_tests(text)]
        function = json.loads(text_field(row, "metadata", where) or "{}").get("func_name")
        if function is not None:
            for given, expected in tests:
                _ = [*map(json.loads, given.split("\n")), json.loads(expected)]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{where}: its tests or metadata are not those of LiveCodeBench: {error}") from None
    if not tests or not (function is None or str(function).isidentifier()):
        raise ValueError(f"{where}: no tests, or func_name {function!r} is not a name")
    question, starter = text_field(row, "question_content", where), text_field(row, "starter_code", where)
    return ParsedRow(
        key=text_field(row, "question_id", where) if "question_id" in row else str(number),
        texts={"problem": question, "form": STARTER.replace("{starter}", starter) if starter.strip() else STDIN},
        answer="",
        meta={"problem": question, "function": function, **packed},
    )


def grade_livecodebench(text: str, problem: EvalProblem) -> bool:
    """Whether the program in ``text`` passes all tests of the problem, each in a sandbox of its own."""
    program, meta = extract_code(text), problem.meta
    if program is None:
        return False
    tests = [*read_tests(meta["public"]), *read_tests(meta["private"])]
    return all(_passes(PRELUDE + program, meta["function"], given, expected) for given, expected in tests)


def _passes(program: str, function: str | None, given: str, expected: str) -> bool:
    if function is None:
        test = f"assert same_output(output, {expected!r})"
        return run_tests(program, [test], LIMITS, setup=SETUP, stdin=given).passed
    called = f"Solution().{function}" if "class Solution" in program else function
    test = f"assert same_value({called}(*map(json.loads, {given.split(chr(10))!r})), json.loads({expected!r}))"
    return run_tests(program, [test], LIMITS, setup=SETUP).passed


def select_difficulty(rows: Iterable[Row], difficulty: str) -> list[Row]:
    """The rows of a difficulty, in the file's order."""
    return [row for row in rows if row[1].get("difficulty") == difficulty]


def _task(name: str, **options: Any) -> EvalTask:
    return EvalTask(
        name=name,
        kind="code",
        template=TEMPLATE,
        max_new_tokens=32768,
        file="livecodebench",
        fields="question_content, starter_code, public_test_cases, private_test_cases, metadata and difficulty",
        hub=HubData("lighteval/code_generation_lite", "v6"),
        parse=parse_livecodebench,
        grade=grade_livecodebench,
        **options,
    )


LIVECODEBENCH = (
    _task("livecodebench"),
    *(_task(f"livecodebench:{d}", select=partial(select_difficulty, difficulty=d)) for d in DIFFICULTIES),
)
