"""A new maths task is a few lines in one place: every command then knows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlkv import tiny
from rlkv.cli.jobs import run_eval as evaluate
from rlkv.evaluation.runner import render_problems
from rlkv.evaluation.tasks import registry
from rlkv.evaluation.tasks.base import HubData
from rlkv.evaluation.tasks.maths import math_task
from rlkv.evaluation.tasks.registry import find_tasks, load_task
from tests.helpers.programs import load_program

CHAINS = math_task(
    "chains", HubData("nobody/chains"), text=("statement", "problem"), max_new_tokens=440
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two problems of the new task, and one of every other maths task."""
    rows = [
        {"statement": p["problem"], "answer": p["answer"], "id": i}
        for i, p in enumerate(tiny.problems(2, 1))
    ]
    (tmp_path / "chains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in registry.TASKS.values():
        if task.kind == "math":
            row = {"problem": "p", "question": "p", "answer": "5"}
            (tmp_path / f"{task.file}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_a_new_maths_task_works_in_every_command(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "TASKS", {**registry.TASKS, "chains": CHAINS})
    evaluate(["--tasks", "chains", "--data", str(data), "--output-dir", str(data / "eval")])
    (result,) = json.loads((data / "eval" / "results.json").read_text())["results"]
    assert (result["task"], result["n"]) == ("chains", 2)

    assert find_tasks(["chains"], data) == [CHAINS]
    _, tokenizer = tiny.load()
    problems = render_problems(
        CHAINS, load_task("chains", data), tokenizer
    )  # as rlkv-study reads them
    assert [problem.key for problem in problems] == ["chains/0", "chains/1"]

    program = load_program("inference/check_graders.py")
    options = [
        "--data",
        str(data),
        "--output-dir",
        str(data / "graders"),
        "--no-code",
        "--workers",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["check_graders.py", *options])
    program.main()
    rows = json.loads((data / "graders" / "graders.json").read_text())["math"]
    assert [(row["own"], row["refused"]) for row in rows if row["task"] == "chains"] == [(2, [])]


def test_a_task_of_local_files_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TASKS", {**registry.TASKS, "mine": math_task("mine")})
    with pytest.raises(ValueError, match=r"'mine'.*--data"):
        load_task("mine")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="'mine'"):
        load_task("mine")
