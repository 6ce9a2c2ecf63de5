"""GPQA-Diamond and LongReason from rows made by hand, with the fields of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS, load_task


def load(folder: Path, task: str, *rows: dict[str, Any]) -> list[EvalProblem]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(task, file)


def gpqa_row(number: int, **more: Any) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f"wrong {i}\n" for i in (1, 2, 3)}
    row = {
        "Question": f"Question {number}?",
        "Correct Answer": " right ",
        **wrong,
        "Record ID": f"rec{number}",
    }
    return {**row, "Explanation": "e", "High-level domain": "Physics", **more}


def test_gpqa_shuffles_its_options_by_the_question(tmp_path: Path) -> None:
    problems = load(tmp_path, "gpqa_diamond", *map(gpqa_row, range(40)))
    assert {p.answer for p in problems} == set("ABCD")
    for problem in problems:
        options = problem.meta["options"]
        assert sorted(options) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert options["ABCD".index(problem.answer)] == "right"
        assert f"{problem.answer}: right" in problem.prompt
    # neither the place in the file nor the run changes the order
    (alone,) = load(tmp_path, "gpqa_diamond", gpqa_row(7))
    assert (alone.id, alone.prompt) == (problems[7].id, problems[7].prompt)
    assert "".join(p.answer for p in problems[:8]) == "DBABAABB"  # in every version of Python


def test_gpqa_is_graded_by_the_letter(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, "gpqa_diamond", gpqa_row(0))
    grade = TASKS["gpqa_diamond"].grade
    assert grade(f"<think>A or B</think>It is clear.\nAnswer: {problem.answer}", problem)
    assert not grade("Answer: " + "BCDA"["ABCD".index(problem.answer)], problem)


@pytest.mark.parametrize("name", ["Question", "Correct Answer", "Incorrect Answer 2"])
def test_broken_gpqa_rows_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        load(tmp_path, "gpqa_diamond", gpqa_row(0, **{name: " "}))
    row = gpqa_row(0)
    del row[name]
    with pytest.raises(ValueError, match=name):
        load(tmp_path, "gpqa_diamond", row)


def test_longreason_takes_the_whole_prompt(tmp_path: Path) -> None:
    prompt = "A long text.\n\nWho is it?\nA. Ann\nB. Bob\nC. Cid\nD. Dan\nE. Eve"
    row = {
        "example_idx": 3,
        "prompt": prompt,
        "question": "Who is it?",
        "background": "A long text.",
        "answer": "E",
    }
    (problem,) = load(tmp_path, "longreason:8k", row)
    assert (problem.id, problem.answer) == ("longreason:8k/3", "E")
    assert problem.prompt.startswith(prompt)
    assert TASKS["longreason:8k"].grade("So it is Eve.\n\nAnswer: E", problem)
    assert not TASKS["longreason:8k"].grade("Answer: B", problem)
    with pytest.raises(ValueError, match=r"line 1.*'EVE'"):
        load(tmp_path, "longreason:8k", {**row, "answer": "Eve"})
    assert TASKS["longreason:64k"].hub.split == "64k"  # type: ignore[union-attr]
