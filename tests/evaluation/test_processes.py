"""Evaluations that are killed at random moments, and two real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkv.cli.jobs import run_eval as evaluate
from rlkv.utils.store import settings_path
from tests.helpers import warm
from tests.helpers.paths import ROOT
from tests.helpers.results import stable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
PROGRAM = ROOT / "inference" / "evaluate.py"
METHODS = ("full", "random-heads@0.5+rkv@40:buffer=8")
OPTIONS = ["--methods", *METHODS, "--limit", "10", "--max-new-tokens", "50", "--batch-size", "3"]
OPTIONS += ["--device", "cpu"]
KILLS = 10


def rows(folder: Path, method: str, name: str = "rows-*.jsonl") -> list[dict[str, Any]]:
    """Rows of the files ``name`` in an order of their own."""
    found = []
    for file in (folder / "tiny" / method).glob(name):
        found += [stable(json.loads(line)) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda row: (row["key"], row["sample"]))


def results(folder: Path) -> dict[str, Any]:
    return stable(json.loads((folder / "results.json").read_text()))


def test_two_processes_write_the_rows_of_one(tmp_path: Path) -> None:
    two = tmp_path / "two"
    ranks = warm.run_ranks([PROGRAM, "--output-dir", two, *OPTIONS], tmp_path / "streams")
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    assert results(two)["config"]["processes"] == 2
    evaluate(["--output-dir", str(tmp_path / "one"), *OPTIONS])
    for method in METHODS:
        shares = [rows(two, method, f"rows-{rank}-of-2.jsonl") for rank in (0, 1)]
        assert [len(share) for share in shares] == [5, 5], "units in turn"
        assert rows(two, method) == rows(tmp_path / "one", method)
    assert results(two)["results"] == results(tmp_path / "one")["results"]

    share = two / "tiny" / METHODS[1] / "rows-1-of-2.jsonl"
    lines = share.read_text().splitlines(keepends=True)
    share.write_text("".join(lines[:2]) + lines[2][:50])  # as a kill would leave it
    evaluate(["--output-dir", str(two), *OPTIONS])
    assert [len(rows(two, method, "rows-0-of-1.jsonl")) for method in METHODS] == [0, 3]
    assert results(two)["results"] == results(tmp_path / "one")["results"]


def test_killed_evaluations_end_in_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    done = warm.run(["-m", "tests.helpers.kill_driver", "evaluation", tmp_path, KILLS], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == KILLS
    assert summary["hit_decoding"] > 0
    assert summary["grew"] > 0
    assert summary["lost"] == [], "what was on the disk before a kill is there after it"
    whole = tmp_path / "whole"
    assert sum(len(rows(whole, method)) for method in METHODS) == summary["rows"]
    for name in summary["folders"]:
        for method in METHODS:
            assert rows(tmp_path / name, method) == rows(whole, method)
            file = Path("tiny", method, "rows-0-of-1.jsonl")
            settings = settings_path(tmp_path / name / file).read_text()
            assert json.loads(settings) == json.loads(settings_path(whole / file).read_text())
        assert results(tmp_path / name) == results(whole)
        # a kill within an atomic write leaves its hidden temporary file
        visible = {path.name for path in (tmp_path / name).iterdir() if path.name[0] != "."}
        assert visible == {"tiny", "accuracy-tiny.png", "results.json", "report.html", "report.md"}
