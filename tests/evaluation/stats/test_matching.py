"""Budgets at matched bytes: never above the target, and the next larger one is above it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.stats.matching import kv_share, match_budget, match_compressible, match_ratio
from rlkv.eviction import H2O, RKV, RPC, TOVA, RandomEviction, SinkWindow

SIZE = EntrySize(head_dim=16, group_size=2, itemsize=4)
LENGTHS = [(20, 200), (35, 410), (50, 333)]
NONE_FULL = torch.zeros(2, 4, dtype=torch.bool)
HALF_FULL = torch.tensor([[True, True, False, False]] * 2)
POLICIES = [
    SinkWindow(ratio=0.0, extra=20, buffer=16),
    RKV(ratio=0.0, extra=20, buffer=16, observation=4),
    RPC(ratio=0.0, extra=20, buffer=16, R=4),
    H2O(ratio=0.0, extra=20),
    TOVA(ratio=0.0, extra=20),
    RandomEviction(ratio=0.0, extra=20, buffer=16),
]


@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("full", [NONE_FULL, HALF_FULL], ids=["all heads", "half full"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_the_largest_ratio_that_fits(policy, full: torch.Tensor, share: float) -> None:
    found = match_ratio(policy, share, full, SIZE, LENGTHS)
    assert found is not None
    assert replace(found, ratio=0.0) == policy
    held = kv_share(CacheSettings(eviction=found), full, SIZE, LENGTHS)
    assert share - 0.02 < held <= share  # an entry of the shortest text is 0.5% of it
    larger = replace(found, ratio=found.ratio + 2**-13)
    assert kv_share(CacheSettings(eviction=larger), full, SIZE, LENGTHS) >= held


@pytest.mark.parametrize("full", [NONE_FULL, HALF_FULL], ids=["all heads", "half full"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_the_largest_fixed_budget_that_fits(policy, full: torch.Tensor) -> None:
    target = 0.7
    found = match_budget(policy, target, full, SIZE, LENGTHS)
    assert found is not None
    assert found.ratio is None
    assert replace(found, ratio=0.0, budget=None) == policy
    assert kv_share(CacheSettings(eviction=found), full, SIZE, LENGTHS) <= target
    larger = replace(found, budget=found.budget + 1)
    assert kv_share(CacheSettings(eviction=larger), full, SIZE, LENGTHS) > target
    assert match_budget(policy, 0.001, full, SIZE, LENGTHS) is None


def test_what_must_stay_can_be_too_much() -> None:
    assert match_ratio(RKV(ratio=0.0, extra=150, observation=4), 0.3, NONE_FULL, SIZE, LENGTHS) is None
    kept = RandomEviction(ratio=0.0, extra=20)
    assert match_ratio(kept, 0.1, NONE_FULL, SIZE, LENGTHS) is None
    assert match_ratio(TOVA(ratio=0.0, extra=20), 0.3, HALF_FULL, SIZE, LENGTHS) is None  # full heads alone hold half


def test_everything_fits_into_everything() -> None:
    # the observed query comes on top of the text
    found = match_ratio(TOVA(ratio=0.0, extra=20), 1.01, NONE_FULL, SIZE, LENGTHS)
    assert found is not None
    assert found.ratio == 1.0


def test_heads_are_compressed_in_their_order_until_it_fits() -> None:
    order = [(1, 3), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3)]
    sizes = CacheSettings(sink=4, window=16)
    for share in (0.9, 0.6, 0.3):
        full = match_compressible(sizes, share, order, (2, 4), SIZE, LENGTHS)
        assert full is not None
        assert kv_share(sizes, full, SIZE, LENGTHS) <= share
        count = int((~full).sum())
        assert {tuple(head) for head in (~full).nonzero().tolist()} == set(order[:count])
        fewer = full.clone()
        fewer[order[count - 1]] = True
        assert kv_share(sizes, fewer, SIZE, LENGTHS) > share
    assert match_compressible(sizes, 0.01, order, (2, 4), SIZE, LENGTHS) is None
