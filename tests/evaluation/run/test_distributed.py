"""Two real processes (gloo): their rows are those of one, another number goes on, a death is no
endless wait.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlkv.cli.jobs import run_eval as evaluate
from tests.helpers import warm
from tests.helpers.paths import ROOT
from tests.helpers.results import stable

PROGRAM = ROOT / "inference" / "evaluate.py"
METHODS = ("full", "random-heads@0.5+rkv@40:buffer=8")
OPTIONS = ["--methods", *METHODS, "--limit", "10", "--max-new-tokens", "50", "--batch-size", "3"]
OPTIONS += ["--device", "cpu"]
DIES = """
import os
from rlkv.evaluation.evaluate import join_processes
processes = join_processes("cpu")
if processes.rank == 1:
    os._exit(7)
try:
    processes.wait_for_all()
except ValueError as error:
    print(error)
"""


def run_alone(folder: Path) -> None:
    evaluate(["--output-dir", str(folder), *OPTIONS])


def rows(folder: Path, method: str, name: str = "rows-*.jsonl") -> list[dict[str, Any]]:
    files = (folder / "tiny" / method).glob(name)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(map(stable, lines), key=lambda row: row["key"])


def figures(folder: Path) -> list[dict[str, Any]]:
    return stable(json.loads((folder / "results.json").read_text())["results"])


@pytest.mark.timeout(280)
def test_two_processes_write_the_rows_of_one(tmp_path: Path) -> None:
    ranks = warm.run_ranks(
        [PROGRAM, "--output-dir", tmp_path / "two", *OPTIONS], tmp_path / "streams"
    )
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    assert json.loads((tmp_path / "two" / "results.json").read_text())["config"]["processes"] == 2
    run_alone(tmp_path / "one")
    for method in METHODS:
        shares = [rows(tmp_path / "two", method, f"rows-{rank}-of-2.jsonl") for rank in (0, 1)]
        assert [len(share) for share in shares] == [5, 5], "units in turn"
        assert rows(tmp_path / "two", method) == rows(tmp_path / "one", method)
    assert figures(tmp_path / "two") == figures(tmp_path / "one")

    share = tmp_path / "two" / "tiny" / METHODS[1] / "rows-1-of-2.jsonl"
    lines = share.read_text().splitlines(keepends=True)
    share.write_text("".join(lines[:2]) + lines[2][:50])  # as a kill would leave it
    run_alone(tmp_path / "two")
    assert [len(rows(tmp_path / "two", method, "rows-0-of-1.jsonl")) for method in METHODS] == [
        0,
        3,
    ]
    assert figures(tmp_path / "two") == figures(tmp_path / "one")


@pytest.mark.timeout(280)
def test_a_dead_process_is_noticed_by_the_others(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    (survivor, text), (dead, _) = warm.run_ranks([tmp_path / "dies.py"], tmp_path / "streams")
    assert (survivor, dead) == (0, 7)
    assert "another process of this run ended before its share was done" in text
