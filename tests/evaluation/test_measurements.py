"""Rankings of heads, outcomes over seeds, and two processes that measure one study."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.evaluation import measurements as module
from rlkv.evaluation.measurements import (
    Condition,
    Measurements,
    Sizes,
    StudyTask,
    accuracy_of,
    agreement,
    compare,
    elimination_order,
    gates_rankings,
    group_by_name,
    join,
    mean_scores,
    read_truth,
    reference_rankings,
)
from rlkv.evaluation.metrics import wilson_interval
from rlkv.evaluation.report import ORACLE, RANDOM
from rlkv.evaluation.runner import KEY, Problem, RunSettings
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from rlkv.utils.progress import ProgressBar
from rlkv.utils.store import open_store
from tests.helpers.study_fakes import SHAPE, outcome, ranking

ALPHA = [0.9, 0.1, 0.5, 0.0, 0.7, 0.3]
MODEL = ModelShape("m", "llama", *SHAPE, 6, 8)
ORDER = [(0, 1), (1, 2), (0, 0), (1, 0), (1, 1), (0, 2)]
LOST: list[list[object]] = [[0.1, 0.0, 0.2], [0.3, -0.1, 0]]

# --- outcomes


def test_parts_become_one_outcome_in_the_order_of_the_problems() -> None:
    parts = [
        outcome("110", [1, 4, 7], "a"),
        outcome("01", [2, 5], "b", "overlength"),
        outcome("00", [3, 6], "c"),
    ]
    found = join(parts)
    assert found.correct.tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert found.lengths.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.modes == (None, "overlength", "incorrect", None, None, "incorrect", "incorrect")
    assert (found.draws, found.seconds, found.kv_share) == (3, 4.5, 0.6)


def test_mean_over_seeds_and_its_interval() -> None:
    runs = [outcome("1100"), outcome("1010"), outcome("1100", key="1100")]
    assert mean_scores(runs) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    found = accuracy_of(runs)
    assert (found["n"], found["distinct"], found["seeds"]) == (4, 2, [0.5] * 3)
    assert found["low"] < 0.5 < found["high"]
    assert found["mean"] == pytest.approx(0.5)
    assert (found["kv_share"], found["versus_full"]) == (0.6, None)
    same = accuracy_of([outcome("1101"), outcome("1101")])
    assert (same["low"], same["high"]) == wilson_interval(3, 4)


def test_difference_to_full_and_between_methods() -> None:
    full, runs = outcome("1" * 8), [outcome("10000000"), outcome("11000000")]
    test = accuracy_of(runs, full)["versus_full"]
    assert test["difference"] == pytest.approx(1.5 / 8 - 1)
    assert (test["changed"], test["p_value"]) == (7, pytest.approx(2 / 2**7))
    found = compare(runs, [full])
    assert found["difference"]["difference"] == pytest.approx(1.5 / 8 - 1)
    assert found["per_seed"]["first"] == pytest.approx([1 / 8 - 1, 2 / 8 - 1])
    assert found["same_heads"] is False
    assert compare([full, full], [full])["same_heads"] is True
    assert compare([runs[0], runs[0], runs[1]], runs)["same_heads"] is False


# --- rankings


def compressible(allocation: HeadAllocation) -> list[int]:
    return (~allocation.full).flatten().nonzero().flatten().tolist()


def test_low_gates_go_first_and_the_top_is_the_other_end() -> None:
    found = ranking("RLKV", ALPHA)
    assert compressible(found.allocations(0.5)[0]) == [1, 3, 5]
    assert [compressible(found.without_top(k)[0]) for k in range(1, 4)] == [[0], [0, 4], [0, 2, 4]]
    assert found.without_top(6) == found.allocations(1.0)


def test_references() -> None:
    order = [(1, 2), (0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
    truth = {"elimination": [{"layer": layer, "head": head} for layer, head in order]}
    oracle, random = reference_rankings(MODEL, truth, 3)
    assert (oracle.name, random.name, random.drawn) == (ORACLE, RANDOM, True)
    assert compressible(oracle.allocations(0.34)[0]) == [0, 5]
    for seed, allocation in enumerate(random.allocations(0.5)):
        assert allocation == HeadAllocation.random(*SHAPE, 0.5, seed)
    assert reference_rankings(MODEL, None, 0) == []


def test_files_of_one_name_are_seeds(tmp_path: Path) -> None:
    found = group_by_name(["a=1.pt", "b=2.pt", "a=3.pt"], "--gates")
    assert found == {"a": ["1.pt", "3.pt"], "b": ["2.pt"]}
    for text in ("a.pt", "=a.pt", "a="):
        with pytest.raises(ValueError, match=f"--gates {text!r}"):
            group_by_name([text], "--gates")
    with pytest.raises(ValueError, match=r"--ablation.*'a'"):
        group_by_name(["a=1.pt"], "--ablation", ["a"])
    HeadGates(torch.tensor([[0.1, 0.0]])).save(tmp_path / "1.pt")
    HeadGates(torch.tensor([[0.0, 0.1]])).save(tmp_path / "3.pt")
    (made,) = gates_rankings({"a": [str(tmp_path / "1.pt"), str(tmp_path / "3.pt")]})
    assert made.orders == (((0, 1), (0, 0)), ((0, 0), (0, 1)))


def truth_file(folder: Path, order: list[tuple[int, int]], lost: object) -> Path:
    steps = [{"layer": layer, "head": head} for layer, head in order]
    content = {"elimination": steps, "accuracy_lost_by_single_head": lost}
    (folder / "t.json").write_text(json.dumps(content))
    return folder / "t.json"


@pytest.mark.parametrize(
    ("order", "lost", "message"),
    [
        (ORDER[:5], LOST, "each head of a model with 2 layers x 3 KV heads once"),
        ([*ORDER[:5], (2, 0)], LOST, "each head of a model"),
        (ORDER, None, "what accuracy"),
        (ORDER, [[0.1, 0.2], [0.3, 0.4]], "what accuracy"),
        (ORDER, [1, [2]], "not a ground-truth file"),
    ],
)
def test_a_ground_truth_is_whole_or_refused(tmp_path: Path, order, lost, message: str) -> None:
    found = read_truth(truth_file(tmp_path, ORDER, LOST), MODEL)
    assert (elimination_order(found), found["accuracy_lost_by_single_head"]) == (ORDER, LOST)
    with pytest.raises(ValueError, match=message):
        read_truth(truth_file(tmp_path, order, lost), MODEL)


def test_agreement_with_a_ground_truth() -> None:
    truth = {
        "elimination": [{"layer": i // 2, "head": i % 2} for i in (3, 1, 0, 2)],
        "accuracy_lost_by_single_head": [[0.3, 0.1], [0.4, 0.0]],
    }
    same = agreement(HeadGates(alpha=torch.tensor([[0.6, 0.2], [0.9, 0.0]])), truth)
    assert list(same.values()) == pytest.approx([1.0, 1.0, 1.0])
    reverse = agreement(HeadGates(alpha=torch.tensor([[0.2, 0.6], [0.0, 0.9]])), truth)
    assert list(reverse.values()) == pytest.approx([-1.0, -1.0, 0.0])
    assert agreement(HeadGates(alpha=torch.ones(2, 2)), truth)["spearman_single_head"] is None


# --- conditions


def condition(number: int) -> Condition:
    full = torch.zeros(SHAPE, dtype=torch.bool)
    full.view(-1)[:number] = True
    return Condition("task", HeadAllocation(full))


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Take the file of a condition, as the runner does, and give a right answer per full head."""

    def run_method(*arguments: Any) -> list[dict[str, Any]]:
        allocation, file, on_rows = arguments[3], arguments[5], arguments[6]
        with open_store(file, {}, KEY):
            on_rows(2, 2, 0.5)
        return [{"key": "a", "full": int(allocation.full.sum())}]

    monkeypatch.setattr(module, "run_method", run_method)
    monkeypatch.setattr(
        module, "outcome_of", lambda key, rows: outcome("1" * rows[0]["full"] + "0", key=key)
    )
    problems = [Problem("a", "prompt", [1, 2, 3], bool)]
    task = StudyTask("task", problems, RunSettings(CacheSettings(), SamplingParams(4)))
    return Measurements(None, None, [task], tmp_path / "rows")  # type: ignore[arg-type]


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


def test_every_field_is_in_the_key() -> None:
    allocation = HeadAllocation(torch.tensor([[True, False], [False, True]]))
    conditions = [
        Condition("task", allocation),
        Condition("task", allocation, RKV(budget=64)),
        Condition("task", allocation, RKV(budget=65)),
        Condition("task", allocation, RKV(budget=64), planned=(3, 4)),
        Condition("task", allocation, sizes=Sizes(4, 16)),
        Condition("task", allocation, sizes=Sizes(4, 16, protect_prompt=True)),
        Condition("task", allocation, part=(0, 2)),
        Condition("task", allocation, part=(1, 2)),
    ]
    assert len({condition.key for condition in conditions}) == len(conditions)
    full = HeadAllocation(torch.ones(2, 2, dtype=torch.bool))
    # nothing to evict from
    assert Condition("task", full, RKV(budget=64), sizes=Sizes(4, 16)) == Condition("task", full)


def test_sizes_are_written_as_they_are_read() -> None:
    assert Sizes.parse("16+64") == Sizes(16, 64)
    assert Sizes.parse("prompt+64") == Sizes(0, 64, protect_prompt=True)
    assert [str(Sizes.parse(text)) for text in ("0+8", "prompt+8")] == ["0+8", "prompt+8"]
