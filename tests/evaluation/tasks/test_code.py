"""Programs as answers: where they are in a text, rows of MBPP and LiveCodeBench, verdicts."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.code import STDIN, extract_code, read_tests
from rlkv.evaluation.tasks.registry import TASKS

Load = Callable[..., list[EvalProblem]]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```py\nx = 1\n```\n\n```\noutput\n```", "x = 1\n"),
        ("```bash\nls\n```\n```\nx = 1\n```", "x = 1\n"),
        ("```Python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("- Like this:\n\n  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. ```python\n   def f(): 1\n   ```\nDone.", "def f(): 1\n"),
        ("**The code:** ```python\nimport re\n```\nDone.", "import re\n"),
        ("1. ```bash\nls\n```\n2. Solve: ```python\r\nimport re\r\n```\r\n", "import re\r\n"),
        ("```\ndef f(): 1\n```\n- Usage: ```python\nprint(f())\n```", "def f(): 1\n"),
        ("```python\nx = 1\n```\n**Use:** ```python\nprint(x)\n```", "x = 1\n"),
        ("```\nx = 1\n```\nIt goes in ```python\nand that is all.", "x = 1\n"),
        ("def f():\n    pass\nPut it into ```python", "def f():\n    pass"),
        ("A ```python``` block:\n```\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1```\nThis works.", "x = 1"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("Here:\nimport re\ndef f():\n    pass\nThat is all.", "import re\ndef f():\n    pass"),
        ("[BEGIN]\ndef f():\n    pass\n[DONE]" + 70 * "\nThat is", "def f():\n    pass"),
        ("[BEGIN]\n```python\ndef f():\n    pass\n[DONE]\n```", "def f():\n    pass\n"),
        ("```python\ndef f(): 1\n[DONE]\nThat is all\n```", "def f(): 1\n"),
        ("def f():\n    '''\n[DONE]\n'''", "def f():\n    '''\n[DONE]\n'''"),
        ("```bash\nls\n```", None),
        ("I cannot do it.", None),
        ("```python\n```", None),
        ("def is the keyword", None),
    ],
)  # fmt: skip
def test_the_program_in_a_completion(text: str, program: str | None) -> None:
    assert extract_code(text) == program


def test_a_block_that_shows_how_to_call_a_function_is_not_the_program() -> None:
    defined = "```python\ndef f(): 1\n```\n"
    usage = "Usage:\n```python\nprint(f())\n```"
    assert extract_code(defined + usage, is_called=True) == "def f(): 1\n"
    assert extract_code(defined + usage) == "print(f())\n"  # of a program that is run
    assert extract_code(usage, is_called=True) == "print(f())\n"
    for usage in ("from typing import List\nf([1])", "a = sorted(a, key=lambda v: v)\nf(a)"):
        block = f"```python\n{usage}\n```"
        assert extract_code(defined + block, is_called=True) == "def f(): 1\n"
    for shorter in ("f = lambda: 1", "f = lru_cache(None)(lambda: 1)"):
        assert extract_code(f"{defined}```python\n{shorter}\n```", is_called=True) == f"{shorter}\n"
    assert extract_code(2 * defined.replace("1", "2") + defined, is_called=True) == "def f(): 1\n"


def test_mbpp(load: Load) -> None:
    row = {
        "task_id": 11,
        "text": "Add.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_list": ["assert add(1, 2) == THREE"],
        "test_setup_code": "THREE = 3",
        "test_imports": ["import re"],
    }
    (problem,) = load("mbpp", row)
    assert (problem.id, problem.answer) == ("mbpp/11", "def add(a, b):\n    return a + b")
    assert problem.meta["setup"] == "import re\nTHREE = 3"
    grade = TASKS["mbpp"].grade
    assert grade(f"Here:\n```python\n{problem.answer}\n```", problem)
    assert not grade("```python\ndef add(a, b):\n    return a - b\n```", problem)
    assert not grade("I cannot.", problem)


# --- LiveCodeBench


def pack(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def case(given: str, expected: str) -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": "stdin"}


def stdin_row(**more: Any) -> dict[str, Any]:
    row = {
        "question_content": "Add {two} numbers.",
        "question_id": "abc1_a",
        "starter_code": "",
        "difficulty": "medium",
        "public_test_cases": json.dumps([case("1 2\n", "3\n")]),
        "private_test_cases": pack([case("5 6\n", "11\n")]),
        "metadata": "{}",
    }
    return {**row, **more}


HEAD = "class Solution:\n    def pair(self, nums: List[int], k: int) -> List[int]:\n        "
METHOD = stdin_row(
    question_id="3301",
    difficulty="easy",
    starter_code=HEAD,
    public_test_cases=json.dumps([case("[1, 2, 3]\n1", "[2, 3]")]),
    private_test_cases=json.dumps([case("[]\n5", "[]")]),  # a file may leave them unpacked
    metadata='{"func_name": "pair"}',
)


def passes(problem: EvalProblem, program: str) -> bool:
    text = f"<think>maybe ```python\nx\n```</think>\n```python\n{program}\n```"
    return TASKS["livecodebench"].grade(text, problem)


def test_programs_that_read_standard_input(load: Load) -> None:
    (problem,) = load("livecodebench", stdin_row())
    assert problem.id == "livecodebench/abc1_a"
    assert STDIN in problem.prompt
    assert "Add {two} numbers." in problem.prompt
    assert passes(problem, "print(sum(map(int, input().split())))")
    assert not passes(problem, "print(3)"), "the private test counts"
    assert not TASKS["livecodebench"].grade("I do not know.", problem)


def test_methods_of_solution(load: Load) -> None:
    (problem,) = load("livecodebench", METHOD)
    assert "def pair(self, nums: List[int], k: int)" in problem.prompt
    # typing and other modules are there without an import
    assert passes(problem, HEAD + "return tuple(nums[k:])")
    assert passes(problem, "def pair(nums, k):\n    return list(islice(nums, k, None))")
    future = "'Doc.'\nfrom __future__ import annotations\n"
    assert passes(problem, f"{future}{HEAD}return nums[k:]")
    assert not passes(problem, HEAD + "return nums")
    assert not passes(problem, "class Solution:\n    pass")


def test_tasks_by_difficulty(load: Load) -> None:
    rows = (stdin_row(), METHOD)
    found = [problem.id for problem in load("livecodebench", *rows)]
    assert found == ["livecodebench/abc1_a", "livecodebench/3301"]
    (easy,) = load("livecodebench:easy", *rows)
    assert easy.id == "livecodebench:easy/3301"
    with pytest.raises(ValueError, match="hard"):
        load("livecodebench:hard", *rows)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


def test_packed_tests_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_tests(pack([case("a", "b")])) == [("a", "b")]
    harmful = base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode()
    with pytest.raises(ValueError, match="mkdir"):
        read_tests(harmful)
    assert not Path("harmed").exists()
    for text, message in (
        ('[{"input": 5, "output": 6}]', "an input or output is not a text"),
        ('[{"input": "a"}]', "^KeyError: 'output'"),
        ("[" * 100_000, "^RecursionError"),
        ("[1]", "^TypeError"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tests(text)
    monkeypatch.setattr("rlkv.evaluation.tasks.code.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="100 bytes"):  # they would fill the memory
        read_tests(pack([case("a" * 1000, "b")]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_test_cases": "no base64"}, "not those of LiveCodeBench"),
        ({"private_test_cases": base64.b64encode(b"not compressed").decode()}, "incorrect header"),
        ({"public_test_cases": '[{"input": "1"}]'}, "KeyError: 'output'"),
        ({"metadata": "[]"}, "'list' object"),
        ({"metadata": "[" * 100_000}, "recursion"),
        ({"metadata": '{"func_name": "a b"}'}, "func_name 'a b' is not a name"),
        ({"public_test_cases": json.dumps([case("no json", "1")])}, "Expecting value"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
    ],
)
def test_broken_rows_are_named(load: Load, changes: dict[str, Any], message: str) -> None:
    # errors of JSON name a line themselves, "line 1 column 1"
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 1: .*{message}"):
        load("livecodebench", METHOD | changes)
