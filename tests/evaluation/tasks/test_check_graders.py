"""inference/check_graders.py: what it counts, and that a new task is checked too."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlkv import tiny
from rlkv.cli.jobs import run_eval
from rlkv.data.problems import Problem
from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks import registry
from rlkv.evaluation.tasks.base import EvalProblem, HubData
from rlkv.evaluation.tasks.maths import math_task
from rlkv.evaluation.tasks.registry import load_task
from rlkv.utils.files import write_jsonl
from rlkv.verifier import Verifier
from tests.helpers.paths import SHARED
from tests.helpers.programs import load_program

DATA = SHARED / "data"
GRADERS = load_program("inference/check_graders.py")
PROBLEMS = [
    Problem("p", "7", r"so \boxed{7}"),
    Problem("p", "8", "no answer at all"),
    Problem("p", "7", ""),  # no solution
    Problem("p", "8", r"\boxed{8}"),  # the same answer as before: not swapped with it
    Problem("p", "1/2", r"\boxed{9}"),
    Problem("p", "0.5", r"\boxed{\frac12}"),
    Problem("p", "9", r"\boxed{0.5}"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    write_jsonl(path, rows)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    """The results of the program."""
    output = ["--output-dir", str(folder), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["check_graders.py", *options, *output])
    GRADERS.main()
    return json.loads((folder / "graders.json").read_text())


def miss(index: int, extracted: str | None, answer: str) -> dict[str, object]:
    return {"index": index, "extracted": extracted, "answer": answer}


def test_every_wrong_verdict_is_counted_and_named() -> None:
    swapped = [
        Problem("p", "3", r"\boxed{4}"),
        Problem("p", "4.0", r"\boxed{4}"),
        Problem("p", "5", r"\boxed{3}"),
    ]
    with closing(Verifier(num_workers=1)) as verifier:
        found = GRADERS.check_solutions(PROBLEMS, verifier, "p")
        accepted = GRADERS.check_solutions(swapped, verifier, "p")["accepted"]
    assert (found["own"], found["next"], found["left_out"]) == (6, 5, 1)
    assert found["refused"] == [miss(1, None, "8"), miss(4, "9", "1/2"), miss(6, "0.5", "9")]
    assert found["accepted"] == []
    assert accepted == [miss(0, "4", "4.0"), miss(2, "3", "3")]


def test_files_of_solutions_and_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    solutions = write(tmp_path / "p.jsonl", [vars(p) for p in PROBLEMS])
    cases = [("a", "7", True), ("a", "8", False), ("b", "7", False), ("b", "8", True)]
    pairs = []
    for kind, gold, right in cases:
        pairs.append({"text": r"\boxed{7}", "gold": gold, "right": right, "kind": kind})
    file = write(tmp_path / "pairs.jsonl", pairs)
    found = run(monkeypatch, tmp_path / "out", "--input", solutions, "--pairs", file)
    assert found["math"][0]["refused"][1] == miss(4, "9", "1/2")
    table = (tmp_path / "out" / "graders.md").read_text()
    assert table in capsys.readouterr().out
    assert "p.jsonl | reference solution | 3 of 6 (50.00%) | 5 of 5 (100.00%) | 1 |" in table
    assert "| a | 1 of 1 (100.00%) | 1 of 1 (100.00%) |" in table
    assert "| b | 0 of 1 (0.00%) | 0 of 1 (0.00%) |" in table
    assert "| total | 1 of 2 (50.00%) | 1 of 2 (50.00%) |" in table


def test_nothing_to_check_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    unsolved = write(tmp_path / "unsolved.jsonl", [{"problem": "p", "answer": "7"}])
    other = write(tmp_path / "other.jsonl", [{"text": "7", "gold": "7"}])
    pair = {"text": "7", "gold": "7", "kind": "a", "right": True}
    number = write(tmp_path / "number.jsonl", [pair, pair | {"text": 7}])
    total = write(tmp_path / "total.jsonl", [pair | {"kind": "total"}])
    for options, message in (
        (["--input", unsolved], "unsolved.jsonl: no problem has both a solution"),
        (["--pairs", other], "expected text and kind, which are texts, gold, and right"),
        (["--pairs", number], "line 2: expected text and kind, which are texts"),
        (["--pairs", total], "the kind 'total' is that of all rows"),
        (["--pairs", empty], "nothing was checked"),
        (["--data", str(tmp_path), "--no-code"], "nothing was checked"),
        ([], "there is nothing to check"),
    ):
        with pytest.raises(ValueError, match=message):
            run(monkeypatch, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_tasks_and_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = math_task("chains", HubData("nobody/chains"), text=("statement",), max_new_tokens=440)
    monkeypatch.setattr(registry, "TASKS", {**registry.TASKS, "chains": chains})
    monkeypatch.setattr(GRADERS, "TASKS", registry.TASKS)
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k_test": [{"question": f"q{i}", "answer": f"#### {i}"} for i in (3, 4)],
        "math500": [
            {"problem": "p", "answer": "5", "solution": r"\boxed{6}"},
            {"problem": "p", "answer": "x=5"},
        ],
        "aime24": [{"problem": "p", "answer": "7"}],
        "chains": [{"statement": p["problem"], "answer": p["answer"]} for p in tiny.problems(2, 1)],
    }
    for name, content in rows.items():
        write(tmp_path / f"{name}.jsonl", content)
    found = run(monkeypatch, tmp_path / "out", "--data", str(tmp_path))
    assert found["code"] is None, "there is no file of MBPP"
    assert [(row["task"], row["own"], len(row["refused"])) for row in found["math"]] == [
        ("gsm8k", 2, 0),
        ("math500", 2, 0),  # x=5 is 5
        ("math500", 1, 1),
        ("aime24", 1, 0),
        ("chains", 2, 0),
    ]
    options = ["--tasks", "chains", "--data", str(tmp_path), "--output-dir", str(tmp_path / "eval")]
    run_eval(options)
    (result,) = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]
    assert (result["task"], result["n"]) == ("chains", 2)
    mine = {**registry.TASKS, "mine": math_task("mine")}  # without a data set on the hub
    monkeypatch.setattr(registry, "TASKS", mine)
    with pytest.raises(ValueError, match=r"'mine'.*--data"):
        load_task("mine")


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
@pytest.mark.parametrize("name", ["aime25", pytest.param("gsm8k", marks=pytest.mark.slow)])
def test_references_are_accepted_and_others_refused(name: str) -> None:
    problems = load_task(name, DATA)
    stated = [Problem(p.prompt, p.answer, GRADERS.in_form(p)) for p in problems]
    assert stated[0].solution.endswith(f"$\\boxed{{{problems[0].answer}}}$. I hope it is correct")
    with closing(Verifier(num_workers=1)) as verifier:
        found = GRADERS.check_solutions(stated, verifier, name)
    assert found["own"] == len(problems)
    assert found["next"] > 0
    assert (found["refused"], found["accepted"]) == ([], [])


def test_the_code_check_counts_every_case() -> None:
    meta = {"tests": ["assert add(1, 2) == 3"], "setup": "", "problem": "p"}
    right = EvalProblem("mbpp/1", "p", "def add(a, b):\n    return a + b", meta)
    broken = EvalProblem("mbpp/2", "p", "def add(a, b):\n    return 0", meta)
    assert "def add(*args" in GRADERS.wrong_program(right.answer)
    found = GRADERS.check_code([right, broken])
    assert (found["reference"], found["refused"], found["sandbox"]) == (2, ["mbpp/2"], isolation())
    assert (found["empty_passed"], found["wrong_passed"]) == ([], [])
    assert found["next_passed"] == ["mbpp/2"]  # the program of mbpp/1 passes its tests
