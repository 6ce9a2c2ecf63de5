"""Outcomes over seeds, rankings of heads, conditions; budgets at the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes
from rlkv.evaluation.measurements import (
    Condition,
    GroundTruth,
    Sizes,
    Texts,
    accuracy_of,
    agreement,
    compare,
    gates_rankings,
    group_by_name,
    join,
    mean_scores,
    read_truth,
    reference_rankings,
    split_heads,
)
from rlkv.evaluation.metrics import wilson_interval
from rlkv.evaluation.report import ORACLE, RANDOM
from rlkv.eviction import H2O, RKV, RPC, TOVA, RandomEviction, SinkWindow
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.study_fakes import SHAPE, outcome, ranking

ALPHA = [0.9, 0.1, 0.5, 0.0, 0.7, 0.3]
MODEL = ModelShape("m", "llama", *SHAPE, 6, 8)
ORDER = ((0, 1), (1, 2), (0, 0), (1, 0), (1, 1), (0, 2))
LOST: list[list[object]] = [[0.1, 0.0, 0.2], [0.3, -0.1, 0]]
NONE_FULL = torch.zeros(2, 4, dtype=torch.bool)
HALF_FULL = torch.tensor([[True, True, False, False]] * 2)
TEXTS = Texts(
    lengths=[(20, 200), (35, 410), (50, 333)],
    size=KVSizes(head_dim=16, group_size=2, itemsize=4),
    cache=CacheSettings(sink=4, window=16),
)

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
    assert found.modes == [None, "overlength", "incorrect", None, None, "incorrect", "incorrect"]
    assert (found.key, found.draws, found.seconds) == ("a+b+c", 3, 4.5)


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
    oracle, random = reference_rankings(MODEL, GroundTruth(ORDER, torch.zeros(SHAPE)), 3)
    assert (oracle.name, random.name, random.drawn) == (ORACLE, RANDOM, True)
    assert compressible(oracle.allocations(0.34)[0]) == [1, 5]
    for seed, allocation in enumerate(random.allocations(0.5)):
        assert allocation == HeadAllocation.random(*SHAPE, 0.5, seed)
    assert reference_rankings(MODEL, None, 0) == []


def test_files_of_one_name_are_seeds(tmp_path: Path) -> None:
    found = group_by_name(["a=1.pt", "b=2.pt", "a=3.pt"], "--gates")
    assert found == {"a": ["1.pt", "3.pt"], "b": ["2.pt"]}
    for text in ("a.pt", "=a.pt", "a="):
        with pytest.raises(ValueError, match=f"--gates {text!r}"):
            group_by_name([text], "--gates")
    HeadGates(torch.tensor([[0.1, 0.0]])).save(tmp_path / "1.pt")
    HeadGates(torch.tensor([[0.0, 0.1]])).save(tmp_path / "3.pt")
    (made,) = gates_rankings({"a": [str(tmp_path / "1.pt"), str(tmp_path / "3.pt")]})
    assert made.orders == (((0, 1), (0, 0)), ((0, 0), (0, 1)))


@pytest.mark.parametrize(
    ("order", "lost", "message"),
    [
        (ORDER[:5], LOST, "each head of a model with 2 layers x 3 KV heads once"),
        ([*ORDER[:5], (2, 0)], LOST, "each head of a model"),
        (ORDER, None, "what accuracy"),
        (ORDER, [[0.1, 0.2], [0.3, 0.4]], "what accuracy"),
        (ORDER, [1, [2]], "not a ground-truth file"),
        (ORDER, LOST, None),
    ],
)
def test_a_ground_truth_is_whole_or_refused(tmp_path: Path, order, lost, message) -> None:
    steps = [{"layer": layer, "head": head} for layer, head in order]
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"elimination": steps, "accuracy_lost_by_single_head": lost}))
    if message is None:
        found = read_truth(file, MODEL)
        assert found.elimination == ORDER
        assert torch.equal(found.lost, torch.tensor(LOST))
        return
    with pytest.raises(ValueError, match=message):
        read_truth(file, MODEL)


def test_agreement_with_a_ground_truth() -> None:
    lost = torch.tensor([[0.3, 0.1], [0.4, 0.0]])
    truth = GroundTruth(((1, 1), (0, 1), (0, 0), (1, 0)), lost)
    same = agreement(HeadGates(alpha=torch.tensor([[0.6, 0.2], [0.9, 0.0]])), truth)
    assert list(same.values()) == pytest.approx([1.0, 1.0, 1.0])
    reverse = agreement(HeadGates(alpha=torch.tensor([[0.2, 0.6], [0.0, 0.9]])), truth)
    assert list(reverse.values()) == pytest.approx([-1.0, -1.0, 0.0])
    assert agreement(HeadGates(alpha=torch.ones(2, 2)), truth)["spearman_single_head"] is None


def test_a_hybrid_is_measured_by_its_gates(tmp_path: Path) -> None:
    """Three layers of two heads, the first without gates."""
    model = replace(MODEL, num_layers=3, num_kv_heads=2)
    order = ((2, 1), (1, 1), (1, 0), (2, 0))
    lost = [[0, 0], [0.3, 0.1], [0.4, 0.0]]
    steps = [{"layer": layer, "head": head} for layer, head in order]
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"elimination": steps, "accuracy_lost_by_single_head": lost}))
    truth = read_truth(file, model, heads=(0, 2, 2))
    with pytest.raises(ValueError, match="each head"):
        read_truth(file, model)
    alpha = torch.tensor([[1.0, 1.0], [0.6, 0.2], [0.9, 0.0]])
    found = agreement(HeadGates(alpha, heads=(0, 2, 2)), truth)
    assert list(found.values()) == pytest.approx([1.0, 1.0, 1.0])
    for made in reference_rankings(model, truth, 2, heads=(0, 2, 2)):
        assert made.num_heads == 4
        for allocation in (*made.allocations(0.5), *made.without_top(2)):
            assert (allocation.num_compressible, allocation.sparsity) == (2, 0.5)
            assert allocation.full[0].all()
    oracle, _ = reference_rankings(model, truth, 2, heads=(0, 2, 2))
    assert split_heads(oracle.orders[0], 0.75, 0.5, oracle.shape).tolist() == [
        [True, True],
        [True, False],
        [True, False],
    ]


# --- conditions


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


# --- the same bytes, never above the target and never far below


@pytest.mark.parametrize(
    ("policy", "full", "fixed", "share"),
    [
        (SinkWindow(ratio=0.0, extra=20, buffer=16), NONE_FULL, False, 0.6),
        (RKV(ratio=0.0, extra=20, buffer=16, observation=4), HALF_FULL, False, 0.8),
        (RKV(ratio=0.0, extra=20, buffer=16, observation=4), NONE_FULL, True, 0.7),
        (RPC(ratio=0.0, extra=20, buffer=16, R=4), NONE_FULL, False, 0.8),
        (H2O(ratio=0.0, extra=20), HALF_FULL, True, 0.7),
        (TOVA(ratio=0.0, extra=20), NONE_FULL, False, 0.6),
        (RandomEviction(ratio=0.0, extra=20, buffer=16), HALF_FULL, False, 0.6),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_largest_ratio_that_fits(policy, full, fixed: bool, share: float) -> None:
    found = TEXTS.match_ratio(share, policy, full, fixed)
    assert found is not None
    assert replace(found, ratio=0.0) == policy
    # a buffer of the shortest text is 8% of it
    assert share - 0.06 < TEXTS.held(found, full, fixed) <= share
    assert TEXTS.held(replace(found, ratio=found.ratio + 2**-14), full, fixed) > share


@pytest.mark.parametrize(
    ("share", "policy", "full", "ratio"),
    [
        (0.3, RKV(ratio=0.0, extra=150, observation=4), NONE_FULL, None),
        (0.3, TOVA(ratio=0.0, extra=20), HALF_FULL, None),  # full heads alone hold half
        (1.01, TOVA(ratio=0.0, extra=20), NONE_FULL, 1.0),  # with the observed query
    ],
)
def test_nothing_and_everything_may_fit(share: float, policy, full, ratio: float | None) -> None:
    found = TEXTS.match_ratio(share, policy, full)
    assert (None if found is None else found.ratio) == ratio


def test_heads_are_compressed_in_their_order_until_it_fits() -> None:
    order = ((1, 3), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3))
    for share in (0.9, 0.6, 0.3):
        full = TEXTS.match_heads(share, order, (2, 4))
        assert full is not None
        count = int((~full).sum())
        assert {tuple(head) for head in (~full).nonzero().tolist()} == set(order[:count])
        fewer = full.clone()
        fewer[order[count - 1]] = True
        assert TEXTS.held(None, full) <= share < TEXTS.held(None, fewer)
    assert TEXTS.match_heads(0.01, order, (2, 4)) is None
