"""Two processes that measure one study: who takes which cell, and what waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rlkv.evaluation.run.rows import open_rows

from rlkv.cache import CacheSettings
from rlkv.evaluation.run.runner import Problem, RunSettings
from rlkv.evaluation.study import bench as module
from rlkv.evaluation.study.bench import Bench, Cell, StudyTask
from rlkv.gates.allocation import HeadAllocation
from rlkv.rollout.base import SamplingParams
from tests.helpers.study_fakes import SHAPE, outcome


def cell(number: int) -> Cell:
    full = torch.zeros(SHAPE, dtype=torch.bool)
    full.view(-1)[:number] = True
    return Cell("task", HeadAllocation(full))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Measuring a cell takes its file, as the runner does, and gives as many right answers as it has full heads."""

    def run_method(*arguments: Any) -> list[dict[str, Any]]:
        allocation, file, on_rows = arguments[3], arguments[5], arguments[7]
        with open_rows(file, {}):
            on_rows(2, 2, 0.5)
        return [{"key": "a", "full": int(allocation.full.sum())}]

    monkeypatch.setattr(module, "run_method", run_method)
    monkeypatch.setattr(module, "outcome_of", lambda key, rows: outcome("1" * rows[0]["full"] + "0", key=key))
    problems = [Problem("a", "prompt", bool)]
    task = StudyTask("task", problems, [3], RunSettings(CacheSettings(), SamplingParams(4)))
    return Bench(None, None, [task], tmp_path / "rows", {})  # type: ignore[arg-type]


def test_a_cell_in_use_is_left_for_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(number) for number in (1, 2, 3)]
    order: list[str] = []
    waits: list[float] = []

    def on_progress(label: str, *_: object) -> None:
        order.append(label)

    with open_rows(bench.folder / f"rows-{cells[0].key}.jsonl", {}) as log:

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                log._out.close()  # the other process is done

        monkeypatch.setattr(module.time, "sleep", wait)
        bench.measure([(f"cell {number}", of) for number, of in enumerate(cells)], on_progress)
    assert order == ["task: cell 1", "task: cell 2", "task: cell 0"]
    assert len(waits) == 2, "nothing waits while another cell is free"
    assert [int(bench.outcome(of).correct.sum()) for of in cells] == [1, 2, 3]
