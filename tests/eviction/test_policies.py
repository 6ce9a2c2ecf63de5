"""When policies evict, down to how many entries, what they draw, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rlkv.eviction import H2O, POLICIES, RKV, RPC, RandomEviction, SinkWindow, make_policy
from rlkv.eviction.base import EvictionPolicy
from tests.helpers.naive_eviction import random_draws, random_entries


def counts(policy: EvictionPolicy, seen: int, evictions: int = 0) -> tuple[int, int]:
    where = torch.tensor([seen]), torch.tensor([evictions])
    return int(policy.entries(*where)), int(policy.capacity(*where))


@pytest.mark.parametrize("name", POLICIES)
def test_fixed_budget_and_ratio(name: str) -> None:
    fixed = make_policy(name, budget=40)
    assert counts(fixed, 1000) == (40, 40 + fixed.buffer)
    ratio = make_policy(name, ratio=0.3, extra=40, buffer=5)
    assert counts(ratio, 1000) == (340, 345)
    assert counts(ratio, 999) == (339, 344)
    assert counts(ratio, 0) == (40, 45)


def test_sink_window_is_a_budget() -> None:
    policy = SinkWindow(window=64)
    assert policy == SinkWindow(budget=80)
    assert dataclasses.replace(policy, budget=100).budget == 100
    keys, queries = random_entries(1, 200, 1, 1, seed=0)
    assert policy.select(keys, queries, 80)[0, 0].tolist() == [*range(16), *range(136, 200)]


def evictions_of(policy: EvictionPolicy, tokens: int) -> tuple[list[int], int]:
    """The tokens at which a row evicts, and what it holds at the end."""
    held, at = 0, []
    for seen in range(1, tokens + 1):
        held += 1
        entries, capacity = counts(policy, seen, len(at))
        if held >= capacity:
            held = entries
            at.append(seen)
    return at, held


def test_rpc_schedule() -> None:
    """The n-th eviction keeps (n+1) * P/c and the last R; the first comes at P + R."""
    policy = RPC()
    assert policy.observation == 32
    assert counts(policy, 1056, 0) == (256 + 32, 1056)
    assert counts(policy, 3104, 2) == (768 + 32, 512 + 32 + 1024)
    assert counts(RPC(P=4096), 4128)[1] == 4128  # "after the 4128th decoding step", appendix B.1
    at, held = evictions_of(RPC(P=50, R=7, c=3), 309)
    assert at == [57, 107, 157, 207, 257, 307]
    assert held == 6 * 16 + 7 + 2
    # a budget or a ratio replaces the schedule
    assert counts(RPC(buffer=10, budget=64), 1000, 3) == (64, 74)
    assert counts(RPC(buffer=10, ratio=0.5, extra=64), 1000, 3) == (564, 574)


def test_query_heads_that_keep_their_own_tokens_need_keys_of_their_own() -> None:
    keys, queries = random_entries(1, 60, 2, 10, seed=0)
    with pytest.raises(ValueError, match="aggregation"):
        RPC(budget=24, R=10, aggregation="head").select(keys, queries, 24)


def test_h2o_gives_half_to_recent_entries_and_adds_up_over_calls() -> None:
    policy = H2O(budget=25)
    assert policy.recent(torch.tensor([25, 40, 1])).tolist() == [12, 20, 1]
    keys, queries = random_entries(2, 60, 2, 60, seed=12)
    valid = torch.arange(60) >= torch.tensor([0, 7])[:, None]
    parts = torch.zeros(2, 3, 60)
    for begin, end in ((0, 41), (41, 42), (42, 60)):
        own = keys[:, :, :end], queries[:, :, begin:end], valid[:, :end]
        parts[..., :end] += policy.scores(*own)
    torch.testing.assert_close(policy.scores(keys, queries, valid), parts, rtol=1e-5, atol=1e-6)
    # a query gives 1 in all
    assert parts.sum().item() == pytest.approx(3 * 2.0 * (60 + 53), rel=1e-5)


def test_budgets_of_the_tables_of_rlkv() -> None:
    """r * L + S + W - 4G; one entry above it (and above 512) 128 entries go."""
    policy = RKV(ratio=0.4, extra=80 - 4 * 4, variant="rlkv_tables")
    assert counts(policy, 1000) == (872, 513)
    assert counts(policy, 2000, 8) == (2000 - 9 * 128, 800 + 64 + 1)
    at, _ = evictions_of(policy, 3000)
    assert len(at) == 14  # the 3,000 tokens less 1,264, in steps of 128
    halves = H2O(ratio=0.3, extra=5, variant="rlkv_tables")  # both rounded down
    assert [counts(halves, seen) for seen in (100, 104)] == [(34, 36), (36, 37)]


def test_random_draws_are_a_hash_of_seed_layer_head_tokens_and_place() -> None:
    policy, valid = RandomEviction(budget=24, seed=5), torch.ones(1, 40, dtype=torch.bool)
    keys, queries = random_entries(1, 40, 1, 1, seed=3)
    found = policy.scores(keys, queries, valid, layer=2)[0].numpy()
    assert np.array_equal(found, random_draws(5, 2, 3, 40))


REFUSED = [
    ("rkv", {}, "budget .* ratio .* neither"),
    ("rkv", {"budget": 64, "ratio": 0.5}, "both are given"),
    ("rpc", {"budget": 64, "ratio": 0.5}, "both are given"),
    ("rkv", {"budget": 7}, "budget is 7, .* 8 entries"),
    ("rkv", {"budget": 20, "sink": 16}, "budget is 20, .* 24 entries"),
    ("rkv", {"budget": 64.5}, "budget is 64.5"),
    ("rkv", {"budget": 64, "buffer": 0}, "buffer is 0"),
    ("rkv", {"budget": 64, "observation": 0}, "observation is 0"),
    ("rkv", {"budget": 64, "sink": -1}, "sink is -1"),
    ("rkv", {"ratio": 1.01}, "ratio is 1.01"),
    ("rkv", {"ratio": -0.1}, "ratio is -0.1"),
    ("rkv", {"ratio": float("nan")}, "ratio is nan"),
    ("rkv", {"ratio": 0.5, "extra": 4}, "extra .* is 4"),
    ("rkv", {"budget": 64, "lam": 1.5}, "lam is 1.5"),
    ("rkv", {"budget": 64, "threshold": -0.5}, "threshold is -0.5"),
    ("rkv", {"budget": 64, "recent_similar": 0}, "recent_similar is 0"),
    ("rkv", {"budget": 64, "recent_similar": 2, "variant": "published"}, "recent_similar is 2"),
    ("rkv", {"budget": 64, "variant": "mine"}, "variant is 'mine'.* paper, published, rlkv_tables"),
    ("rkv", {"budget": 64, "variant": "rlkv_tables"}, "ratio is None.*rlkv_tables"),
    ("rkv", {"ratio": 0.4, "variant": "rlkv_tables", "compacted": 135}, "compacted is 135.* 136"),
    ("rkv", {"budget": 64, "compacted": 256}, "compacted is 256"),
    ("h2o", {"budget": 64, "variant": "published"}, "variant is 'published'.* rlkv_tables"),
    ("snapkv", {"ratio": 0.4, "variant": "rlkv_tables"}, "variant is 'rlkv_tables'"),
    ("rkv", {"budget": 64, "kernel": 0}, "kernel is 0"),
    ("snapkv", {"budget": 64, "kernel": 4, "variant": "published"}, "kernel is 4.*published"),
    ("rpc", {"kernel": 0}, "kernel is 0"),
    ("rpc", {"aggregation": "layer"}, "aggregation is 'layer'.* all, group, head"),
    ("rpc", {"R": 0}, "R is 0"),
    ("rpc", {"budget": 16}, "budget is 16"),
    ("rpc", {"c": 1}, "c is 1"),
    ("rpc", {"P": 0}, "P is 0"),
    ("h2o", {"budget": 10, "sink": 6}, "sink is 6"),
    ("sink_window", {"budget": 64, "window": 64}, "budget is 64, .*sink 16 . window 64"),
    ("sink_window", {"ratio": 0.5, "window": 64}, "window and ratio"),
    ("sink_window", {"window": 0}, "window is 0"),
    ("sink_window", {"window": 64, "sink": "abc"}, "sink is abc: it must be a whole number"),
    ("h2o", {"budget": 1, "variant": "rlkv_tables"}, "paper where one entry is kept"),
    ("random", {"budget": 64, "seed": -1}, "seed is -1: it must be 0 or more"),
    ("rvk", {"budget": 64}, "'rvk'.*rkv"),
    ("tova", {"budget": 64, "lam": 0.1}, "tova .* lam.* budget, ratio"),
    ("rpc", {"observation": 8}, "rpc .* observation.*, P, R, c, aggregation"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refused_with_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make_policy(name, **options)
    assert "\n" not in str(refusal.value)
