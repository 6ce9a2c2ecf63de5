"""kill -9 at 20 random moments of a real filter job: its files equal an uninterrupted run's."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlkv.data.curriculum import CURRICULUM
from rlkv.utils.files import read_log
from tests.helpers import warm
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow
KILLS = 20


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], bytes]:
    """The rows of the shard, what the report says of them, and the curriculum."""
    rows = read_log(folder / "shards" / "shard-0-of-1.jsonl")
    report = json.loads((folder / "report.json").read_text())
    for volatile in ("seconds", "finished", "command", "config"):
        del report[volatile]
    return rows, report, (folder / "curriculum.jsonl").read_bytes()


def test_killed_runs_end_in_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    done = warm.run(["-m", "tests.helpers.kill_driver", "filter", tmp_path, KILLS], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == KILLS
    assert summary["grew"] >= KILLS // 2, "the kills must be spread over the job"
    assert summary["lost"] == []
    rows, report, curriculum = read(tmp_path / "whole")
    assert {"correct", "wrong", "unparsable"} <= {row["status"] for row in rows}
    assert report["selected"] > 0
    for name in summary["folders"]:
        found = read(tmp_path / name)
        assert sorted(found[0], key=lambda row: row["index"]) == sorted(
            rows, key=lambda row: row["index"]
        )
        assert found[1:] == (report, curriculum)
        names = {path.name for path in (tmp_path / name).iterdir() if path.suffix != ".partial"}
        assert names == {*CURRICULUM, "report.json", "report.md", "shards"}
