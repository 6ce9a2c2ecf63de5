"""kill -9 at 20 random moments of a real job (a random tiny model): the files equal an
uninterrupted run's.
"""

import json
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow
VOLATILE = ("seconds", "finished", "command", "config")
KILLS = 20


def shard_records(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "shards" / "shard-0-of-1.jsonl").read_text().splitlines()
    ]


def report(folder: Path) -> dict:
    return {
        k: v
        for k, v in json.loads((folder / "report.json").read_text()).items()
        if k not in VOLATILE
    }


def test_killed_runs_end_in_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    done = warm.run(["-m", "tests.helpers.kill_driver", "filter", tmp_path, KILLS], ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == KILLS, "every counted kill hit a running job"
    assert summary["grew"] >= KILLS // 2, (
        "the kills must be spread over the job, not all come before its first batch"
    )
    assert summary["lost"] == [], "what was on the disk before a run is there after its kill"

    whole = tmp_path / "whole"
    expected = {r["index"]: r for r in shard_records(whole)}
    statuses = {r["status"] for r in expected.values()}
    assert {"correct", "wrong", "unparsable"} <= statuses, "the job must have something to lose"
    assert report(whole)["selected"] > 0
    for name in summary["folders"]:
        records = shard_records(tmp_path / name)
        assert len(records) == len(expected), "nothing lost, nothing doubled"
        assert {r["index"]: r for r in records} == expected
        assert (tmp_path / name / "curriculum.jsonl").read_bytes() == (
            whole / "curriculum.jsonl"
        ).read_bytes()
        assert report(tmp_path / name) == report(whole)
        assert sorted(
            p.name for p in (tmp_path / name).iterdir() if not p.name.endswith(".partial")
        ) == [
            "curriculum.jsonl",
            "curriculum.parquet",
            "report.json",
            "report.md",
            "shards",
        ]
