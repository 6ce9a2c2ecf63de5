"""Two processes that measure one study: who takes which condition, and what waits for whom."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.evaluation import measurements as module
from rlkv.evaluation.measurements import Condition, Measurements, Sizes, StudyTask
from rlkv.evaluation.runner import KEY, Problem, RunSettings
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.rollout.base import SamplingParams
from rlkv.utils.progress import ProgressBar
from rlkv.utils.store import open_store
from tests.helpers.study_fakes import SHAPE, outcome


def condition(number: int) -> Condition:
    full = torch.zeros(SHAPE, dtype=torch.bool)
    full.view(-1)[:number] = True
    return Condition("task", HeadAllocation(full))


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Measuring takes the file of a condition, as the runner does, and gives a right answer per
    full head.
    """

    def run_method(*arguments: Any) -> list[dict[str, Any]]:
        allocation, file, on_rows = arguments[3], arguments[5], arguments[7]
        with open_store(file, {}, KEY):
            on_rows(2, 2, 0.5)
        return [{"key": "a", "full": int(allocation.full.sum())}]

    monkeypatch.setattr(module, "run_method", run_method)
    monkeypatch.setattr(
        module, "outcome_of", lambda key, rows: outcome("1" * rows[0]["full"] + "0", key=key)
    )
    problems = [Problem("a", "prompt", bool)]
    task = StudyTask("task", problems, [3], RunSettings(CacheSettings(), SamplingParams(4)))
    return Measurements(None, None, [task], tmp_path / "rows", {})  # type: ignore[arg-type]


def test_a_condition_in_use_is_left_for_later(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = [condition(number) for number in (1, 2, 3)]
    order: list[str] = []
    waits: list[float] = []

    def update(
        self: ProgressBar, done: int, total: int | None = None, title: str = "", note: str = ""
    ) -> None:
        order.append(title)

    monkeypatch.setattr(ProgressBar, "update", update)
    with ExitStack() as other:
        other.enter_context(
            open_store(measurements.folder / f"rows-{conditions[0].key}.jsonl", {}, KEY)
        )

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                other.close()  # the other process is done

        monkeypatch.setattr(module.time, "sleep", wait)
        measurements.measure(
            "t", [(f"number {number}", of) for number, of in enumerate(conditions)]
        )
    assert order == ["task: number 1", "task: number 2", "task: number 0"]
    assert len(waits) == 2, "nothing waits while another condition is free"
    assert [int(measurements.outcome(of).correct.sum()) for of in conditions] == [1, 2, 3]


def test_keys_name_files_and_stay_what_they_were() -> None:
    allocation = HeadAllocation(torch.tensor([[True, False], [False, True]]))
    assert Condition("task", allocation).key == "task-33655d02eaa4"
    assert Condition("task", allocation, RKV(budget=64)).key == "task-5ad9aeae55b1"
    assert Condition("task", allocation, RKV(budget=64), (3, 4)).key == "task-08197eaccdde"
    sized = [
        Condition("task", allocation, sizes=Sizes(4, 16, protect_prompt=on)).key
        for on in (False, True)
    ]
    parts = [Condition("task", allocation, part=(i, 2)).key for i in (0, 1)]
    assert len({Condition("task", allocation).key, *sized, *parts}) == 5
    full = HeadAllocation(torch.ones(2, 2, dtype=torch.bool))
    assert Condition("task", full, sizes=Sizes(4, 16)) == Condition("task", full)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (Sizes(16, 64), "16 + 64"),
        (Sizes(0, 64, protect_prompt=True), "prompt + 64"),
        (Sizes(16, 64, protect_prompt=True), "prompt (at least 16) + 64"),
    ],
)
def test_sizes_in_words(sizes: Sizes, name: str) -> None:
    assert str(sizes) == name
