"""Alerts: each sign of a collapse is named, and a training that goes well raises none."""

from __future__ import annotations

from typing import Any

import pytest

from rlkv.training.run_folder import SPAN, alerts
from tests.helpers.run_logs import record


def titles(records: list[dict[str, Any]]) -> list[str]:
    return [alert.title for alert in alerts(records)]


def test_a_healthy_training_raises_none() -> None:
    assert alerts([]) == []
    # all groups right without spread: only the penalty acts, as it should
    assert (
        titles(
            [record(step, reward__mean=1.0, reward__zero_spread_share=1.0) for step in range(1, 13)]
        )
        == []
    )


def test_a_reward_that_falls_is_told_with_its_steps() -> None:
    fine = [record(step, reward__mean=0.8) for step in range(1, 11)]
    fallen = [record(step, reward__mean=0.3) for step in range(11, 11 + SPAN)]
    assert titles(fine + fallen[:-2]) == []  # the mean of the last five is still above half
    (alert,) = alerts(fine + fallen)
    assert alert.title == "The reward has collapsed"
    assert "from 0.80 (steps 6 to 10) to 0.30 (the last 5 steps)" in alert.text
    # one that was never there does not fall
    assert titles([record(s, reward__mean=0.1 if s < 7 else 0.0) for s in range(1, 13)]) == []


@pytest.mark.parametrize(
    ("title", "changes"),
    [
        ("No group has a spread", {"reward__mean": 0.0, "reward__zero_spread_share": 1.0}),
        ("Completions no longer end", {"response__truncated_share": 0.6}),
        ("All gates are below 0.1", {"gates__below_0.1": 1.0}),
        ("Steps were left out", {"train__skipped_steps": 2}),
    ],
)
def test_other_signs(title: str, changes: dict[str, float]) -> None:
    before = [record(step, reward__mean=0.1) for step in range(1, 7)]
    assert titles(before) == []
    assert titles(
        before + [record(step, **{"reward__mean": 0.1, **changes}) for step in range(7, 13)]
    ) == [title]


def test_logs_of_other_finders_have_none_of_the_figures() -> None:
    assert alerts([{"step": 1, "traces/kept": 0.9}, {"step": 2, "traces/kept": 0.1}]) == []
