"""Programs as answers: MBPP, and the program in a completion."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from rlkv.data.deepscaler import text_field
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask, HubData, ParsedRow, first_field
from rlkv.verifier.extraction import after_thinking

# the task and its tests as in Austin et al. (arXiv 2108.07732, section 3.1); the last sentence names the form in which
# the published evaluation looks for the program
TEMPLATE = (
    "You are an expert Python programmer, and here is your task: {problem} Your code should pass these tests:\n\n"
    "{tests}\n\nPut the whole program into one ```python code block at the end of your answer."
)
MAX_TRIMMED_LINES = 60

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"python", "python3", "py"}
_CODE_LINE = re.compile(r"^(?:def |class |import |from \w|@|async def )", re.MULTILINE)


def extract_code(text: str) -> str | None:
    """The program in a completion: the last Python block, else the last block without a language, else plain code.

    A block that the text never closes ends with the text.  Plain code begins at the first line with a definition or
    an import and ends at the last line up to which it is valid Python.  None if there is none of them.
    """
    text = after_thinking(text)
    blocks = _blocks(text)
    for languages in (_PYTHON, {""}):
        for language, content in reversed(blocks):
            if language in languages and content.strip():
                return content
    return None if blocks else _plain_code(text)


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block, in order."""
    found: list[tuple[str, str]] = []
    opened: tuple[str, int] | None = None
    for fence in _FENCE.finditer(text):
        language = fence.group(1).lower()
        begins = opened is None or language  # a language: a block within a block that was not closed
        if opened is not None:
            found.append((opened[0], text[opened[1] : fence.start()]))
        opened = (language, fence.end() + 1) if begins else None
    if opened is not None:
        found.append((opened[0], text[opened[1] :]))
    return found


def _plain_code(text: str) -> str | None:
    start = _CODE_LINE.search(text)
    if start is None:
        return None
    lines = text[start.start() :].splitlines()
    ends = range(len(lines), max(0, len(lines) - MAX_TRIMMED_LINES), -1)
    return next((code for end in ends if _is_python(code := "\n".join(lines[:end]))), None)


def _is_python(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in generated code
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def grade_code(text: str, problem: EvalProblem) -> bool:
    """Whether the program in ``text`` passes all tests of the problem, in the sandbox."""
    from rlkv.evaluation.sandbox import run_tests

    program = extract_code(text)
    if program is None:
        return False
    return run_tests(program, problem.meta["tests"], setup=problem.meta["setup"]).passed


def parse_mbpp(row: dict[str, Any], where: str, number: int) -> ParsedRow:
    """A row of MBPP: prompt or text, test or test_list, code, perhaps task_id, test_setup_code, test_imports."""
    problem = text_field(row, first_field(row, ("prompt", "text"), where), where)
    tests = row[first_field(row, ("test", "test_list"), where)]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"{where}: the tests must be a list of texts, at least one")
    setup = [line for line in row.get("test_imports") or [] if line.strip()]
    if (row.get("test_setup_code") or "").strip():
        setup.append(row["test_setup_code"])
    return ParsedRow(
        key=text_field(row, "task_id", where) if "task_id" in row else str(number),
        texts={"problem": problem.strip(), "tests": "\n".join(tests)},
        answer=text_field(row, "code", where).replace("\r\n", "\n").replace("\r", "\n"),
        meta={"problem": problem, "tests": tests, "setup": "\n".join(setup)},
    )


MBPP = EvalTask(
    name="mbpp",
    kind="code",
    template=TEMPLATE,
    max_new_tokens=8192,
    file="mbpp_test",
    fields="prompt (or text), test (or test_list) and code",
    hub=HubData("google-research-datasets/mbpp", "full"),
    parse=parse_mbpp,
    grade=grade_code,
)
