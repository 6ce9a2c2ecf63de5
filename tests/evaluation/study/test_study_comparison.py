"""Seconds of finding heads, from logs and gates files, and never one unit as the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rlkv.evaluation.analyses import cost_metrics, cost_text
from tests.helpers.study_fakes import ranking

ALPHA = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def log(folder: Path, *steps: dict[str, float]) -> str:
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return str(folder / "gates.pt")


def test_cpu_seconds_are_preferred_where_every_step_has_them(tmp_path: Path) -> None:
    files = (
        log(
            tmp_path / "a",
            {"time/step_s": 3.0, "time/step_cpu_s": 2.0},
            {"time/step_s": 3.0, "time/step_cpu_s": 2.5},
        ),
        log(tmp_path / "b", {"time/step_s": 3.0}, {"time/step_s": 5.0, "time/step_cpu_s": 2.5}),
        str(tmp_path / "absent" / "gates.pt"),
    )
    found = replace(ranking("RLKV", ALPHA, ALPHA, ALPHA), files=files)
    steps = [(of["step"], of["unit"], of["mean"], of["n"]) for of in cost_metrics(found)["steps"]]
    assert steps == [("training", "CPU", 4.5, 1), ("training", "wall", 8.0, 1)]
    assert cost_text(cost_metrics(found)) == "4 s CPU + 8 s wall"


def test_re_ranking_is_added(tmp_path: Path) -> None:
    found = ranking("RLKV", ALPHA, ALPHA)
    for gates, facts in zip(
        found.gates, ({"seconds": 60, "cpu_seconds": 50}, {"cpu_seconds": 70}), strict=True
    ):
        gates.training = {"reranked": facts}
    files = tuple(
        log(tmp_path / name, {"time/step_cpu_s": seconds})
        for name, seconds in (("a", 10.0), ("b", 20.0))
    )
    metrics = cost_metrics(replace(found, files=files))
    assert (
        cost_text(metrics)
        == "15 s CPU (10 to 20, 2 seeds) + 60 s CPU re-ranking (50 to 70, 2 seeds)"
    )
    assert cost_text(cost_metrics(ranking("x", ALPHA))) == ""
