"""The verifier check: what it counts, and the program around it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlkv.data.problems import Problem
from rlkv.evaluation.checks import check_verifier
from rlkv.verifier import Verifier
from tests.helpers.paths import ROOT

PROGRAM = ROOT / "data_prep" / "check_verifier.py"
PROBLEMS = [
    Problem("p", "7", r"so \boxed{7}"),
    Problem("p", "8", "no answer at all"),
    Problem("p", "7", ""),  # no solution
    Problem("p", "8", r"\boxed{8}"),  # the same answer as before: not swapped with it
    Problem("p", "1/2", r"\boxed{9}"),
    Problem("p", "0.5", r"\boxed{\frac12}"),
    Problem("p", "9", r"\boxed{0.5}"),
]


def miss(index: int, extracted: str | None, answer: str) -> dict[str, object]:
    return {"index": index, "extracted": extracted, "answer": answer}


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    with closing(Verifier(num_workers=1)) as made:
        yield made


def test_every_wrong_verdict_is_counted_and_named(verifier: Verifier) -> None:
    assert check_verifier(PROBLEMS, verifier, "p") == {
        **{"own": 6, "refused": [miss(1, None, "8"), miss(4, "9", "1/2"), miss(6, "0.5", "9")]},
        **{"next": 5, "accepted": [], "left_out": 1},
    }
    swapped = [
        Problem("p", "3", r"\boxed{4}"),
        Problem("p", "4.0", r"\boxed{4}"),
        Problem("p", "5", r"\boxed{3}"),
    ]
    assert check_verifier(swapped, verifier, "p")["accepted"] == [
        miss(0, "4", "4.0"),
        miss(2, "3", "3"),
    ]


def test_the_program_writes_counts_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, empty = tmp_path / "p.jsonl", tmp_path / "empty.jsonl"
    path.write_text("".join(json.dumps(vars(p)) + "\n" for p in PROBLEMS))
    empty.write_text('{"problem": "p", "answer": "7"}\n')
    monkeypatch.setattr(
        sys,
        "argv",
        ["check_verifier.py", "--input", str(path), "--output-dir", str(tmp_path / "out")],
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0
    assert "| p.jsonl | 3 of 6 (50.00%) | 0 of 5 | 1 |" in capsys.readouterr().out
    (check,) = json.loads((tmp_path / "out" / "verifier.json").read_text())["checks"]
    assert check["refused"][1] == {"index": 4, "extracted": "9", "answer": "1/2"}
    assert "| p.jsonl | 3 of 6" in (tmp_path / "out" / "verifier.md").read_text()
    monkeypatch.setattr(
        sys, "argv", ["check_verifier.py", "--input", str(empty), "--output-dir", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {empty}: no problem has both a solution")


def test_pairs_are_counted_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("a", "7", True), ("a", "8", False), ("b", "7", False), ("b", "8", True)]
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"text": r"\boxed{7}", "gold": gold, "right": right, "kind": kind}
        for kind, gold, right in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["check_verifier.py", "--pairs", str(path), "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "| a | 1 of 1 (100.00%) | 1 of 1 (100.00%) |" in out
    assert "| b | 0 of 1 (0.00%) | 0 of 1 (0.00%) |" in out
    assert "| total | 1 of 2 (50.00%) | 1 of 2 (50.00%) |" in out
    path.write_text('{"text": "7", "gold": "7"}\n')
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 2
    assert "right, which is true or false" in capsys.readouterr().err
