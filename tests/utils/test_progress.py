"""The progress bar: rate and remaining time count this run only."""

import pytest

from rlkv.utils import progress
from rlkv.utils.progress import duration, progress_bar


def test_resumed_items_are_not_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    with progress_bar("filter", "problems", 100) as bar:
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        bar.resume({"correct": 40})
        assert bar.pace() == ""
        now[0] += 10
        bar.advance({"correct": 5, "wrong": 15})
        assert bar.counts == {"correct": 45, "wrong": 15}
        assert bar.pace() == "2 problems/s, 0:00:20 left"
        bar.update(70, total=80)
        assert bar.pace() == "3 problems/s, 0:00:03 left"
        now[0] += 5
        bar.resume(4)  # of another file of the same job
        assert bar.pace() == "2 problems/s, 0:00:03 left"
        monkeypatch.undo()
    assert "filter" in capsys.readouterr().err
    with progress_bar("filter", "problems", disable=True) as bar:
        bar.advance()
    assert capsys.readouterr() == ("", "")
    assert [duration(s) for s in (0, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]
