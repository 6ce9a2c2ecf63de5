"""LiveCodeBench from rows made by hand: packing of private tests, prompts, verdicts on programs."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.code import STDIN, read_tests
from rlkv.evaluation.tasks.registry import TASKS, load_task


def pack(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


def stdin_row(**more: Any) -> dict[str, Any]:
    return {
        **{
            "question_title": "Sum",
            "question_content": "Add {two} numbers.",
            "platform": "atcoder",
        },
        **{
            "question_id": "abc1_a",
            "contest_date": "2025-02-01T00:00:00",
            "starter_code": "",
            "difficulty": "medium",
        },
        "public_test_cases": json.dumps([case("1 2\n", "3\n")]),
        "private_test_cases": pack([case("5 6\n", "11\n")]),
        **{"metadata": "{}", **more},
    }


def method_row(**more: Any) -> dict[str, Any]:
    starter = "class Solution:\n    def pair(self, nums: List[int], k: int) -> List[int]:\n        "
    tests = json.dumps([case("[1, 2, 3]\n1", "[2, 3]", "functional")])
    private = json.dumps([case("[]\n5", "[]", "functional")])  # a file may leave them unpacked
    names = {
        "question_id": "3301",
        "platform": "leetcode",
        "difficulty": "easy",
        "starter_code": starter,
    }
    packed = {
        "public_test_cases": tests,
        "private_test_cases": private,
        "metadata": '{"func_name": "pair"}',
    }
    return stdin_row(**names, **packed, **more)


def load(folder: Path, *rows: dict[str, Any], task: str = "livecodebench") -> list[EvalProblem]:
    (folder / "livecodebench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(task, folder)


def passes(problem: EvalProblem, program: str) -> bool:
    return TASKS["livecodebench"].grade(
        f"<think>maybe ```python\nx\n```</think>\n```python\n{program}\n```", problem
    )


def test_programs_that_read_standard_input(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, stdin_row())
    assert problem.id == "livecodebench/abc1_a"
    assert STDIN in problem.prompt
    assert "Add {two} numbers." in problem.prompt
    assert passes(problem, "print(sum(map(int, input().split())))")
    assert not passes(problem, "print(3)"), "the private test counts"
    assert not passes(problem, "a, b = input()\nprint(a + b)")
    assert not TASKS["livecodebench"].grade("I do not know.", problem)


def test_methods_of_solution(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, method_row())
    assert "def pair(self, nums: List[int], k: int)" in problem.prompt
    head = "class Solution:\n    def pair(self, nums: List[int], k: int) -> List[int]:\n        "
    assert passes(problem, head + "return nums[k:]"), (
        "typing and other modules are there without an import"
    )
    assert passes(problem, head + "return tuple(nums[k:])")
    assert passes(problem, "def pair(nums, k):\n    return list(islice(nums, k, None))")
    assert not passes(problem, head + "return nums")
    assert not passes(problem, head + "return [math.inf]")
    assert not passes(problem, "class Solution:\n    pass")


def test_tasks_by_difficulty(tmp_path: Path) -> None:
    rows = (stdin_row(), method_row())
    assert [p.id for p in load(tmp_path, *rows)] == ["livecodebench/abc1_a", "livecodebench/3301"]
    for difficulty, ids in {"medium": ["abc1_a"], "easy": ["3301"]}.items():
        found = load(tmp_path, *rows, task=f"livecodebench:{difficulty}")
        assert [p.id for p in found] == [f"livecodebench:{difficulty}/{id_}" for id_ in ids]
    with pytest.raises(ValueError, match="hard"):
        load(tmp_path, *rows, task="livecodebench:hard")


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


@pytest.mark.parametrize(
    "more",
    [
        {"private_test_cases": "no base64"},
        {"private_test_cases": base64.b64encode(b"not compressed").decode()},
        {"public_test_cases": '[{"input": "1"}]'},
        {"metadata": "[]"},
        {"metadata": '{"func_name": "a b"}'},
        {"metadata": '{"func_name": "f"}', "public_test_cases": json.dumps([case("no json", "1")])},
        {"public_test_cases": "[]", "private_test_cases": "[]"},
    ],
)
def test_broken_rows_are_named(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="line 1"):
        load(tmp_path, stdin_row(**more))


@pytest.mark.parametrize(
    "text", ['[{"input": 5, "output": 6}]', '[{"input": "a"}]', "[" * 100_000, "[1]"]
)
def test_tests_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_tests(text)


def test_tests_that_would_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.evaluation.tasks.code.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="100 bytes"):
        read_tests(pack([case("a" * 1000, "b")]))
