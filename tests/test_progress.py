"""The progress line: rate and remaining time count this run only."""

import pytest

from rlkv import progress
from rlkv.progress import CountingProgress, duration


def test_resumed_items_are_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = CountingProgress("filter", "problems", 100)
    bar.resume({"correct": 40})
    assert bar.note() == "correct 40"
    now[0] += 10
    bar.advance({"correct": 5, "wrong": 15})
    assert bar.note() == "2.00 problems/s, 0:00:20 left, correct 45, wrong 15"


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]
