"""kill -9 at random moments of an evaluation with samples: rows and results are those of an
uninterrupted one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlkv.utils.store import settings_path
from tests.helpers import warm
from tests.helpers.paths import ROOT
from tests.helpers.results import stable

KILLS, PROBLEMS = 10, 3


def rows(folder: Path) -> dict[str, list[Any]]:
    found = {}
    for file in sorted(folder.glob("tiny/*/rows-*.jsonl")):
        measured = [stable(json.loads(line)) for line in file.read_text().splitlines()]
        settings = json.loads(settings_path(file).read_text())
        found[file.parent.name] = [
            settings,
            *sorted(measured, key=lambda row: (row["key"], row["sample"])),
        ]
    return found


def check_killed_folders(root: Path, summary: dict[str, Any]) -> None:
    assert summary["lost"] == [], "what was on the disk before a kill is there after it"
    want = rows(root / "whole")
    assert sum(len(found) - 1 for found in want.values()) == summary["rows"]
    assert {row["finish_reason"] for found in want.values() for row in found[1:]} == {
        "stop",
        "length",
    }
    results = stable(json.loads((root / "whole" / "results.json").read_text()))
    for name in summary["folders"]:
        assert rows(root / name) == want, "nothing lost, nothing doubled, nothing else"
        assert stable(json.loads((root / name / "results.json").read_text())) == results
        # a kill within an atomic write leaves its hidden temporary file
        visible = {path.name for path in (root / name).iterdir() if not path.name.startswith(".")}
        assert visible == {"tiny", "results.json", "report.html", "report.md"}


def test_killed_evaluations_end_in_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    done = warm.run(["-m", "tests.helpers.evaluate_kill_driver", tmp_path, KILLS, PROBLEMS], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == KILLS
    assert summary["hit_decoding"] > 0
    assert summary["grew"] > 0
    check_killed_folders(tmp_path, summary)
