"""When policies evict, down to how many entries, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlkv.eviction import (
    H2O,
    POLICIES,
    RKV,
    RPC,
    TOVA,
    RandomEviction,
    SinkWindow,
    SnapKV,
    make_policy,
)
from tests.helpers.eviction_matrix import CASES, IDS, build, random_entries


def counts(policy, seen, evictions=0):
    where = torch.tensor([seen]), torch.tensor([evictions])
    return int(policy.entries(*where)), int(policy.capacity(*where))


def test_only_policies_that_read_queries_ask_for_them():
    assert {name for name, policy in POLICIES.items() if not policy.uses_queries} == {
        "sink_window",
        "random",
    }
    assert {name for name, policy in POLICIES.items() if policy.accumulates} == {"h2o"}
    assert {name for name, policy in POLICIES.items() if policy.draws} == {"random"}
    assert {name for name in POLICIES if make_policy(name, budget=64).protect_prompt} == {
        "rpc",
        "random",
    }


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fixed_budget_and_ratio(case):
    name, options = case
    fixed = build(case, budget=40)
    assert counts(fixed, 1000) == (40, 40 + fixed.buffer)
    ratio = make_policy(name, ratio=0.3, extra=30, buffer=5, **options)
    assert counts(ratio, 1000) == (330, 335)
    assert counts(ratio, 999) == (329, 334)
    assert counts(ratio, 0) == (30, 35)


def test_sink_window_is_a_budget():
    policy = SinkWindow(window=64)
    assert policy == SinkWindow(budget=80)
    assert dataclasses.replace(policy, budget=100).budget == 100
    keys, queries = random_entries(1, 200, 1, 1, seed=0)
    assert policy.select(keys, queries, 80)[0, 0].tolist() == [*range(16), *range(136, 200)]


def test_rpc_schedule():
    """The n-th eviction keeps (n+1) * P/c and the last R.

    The first comes at P + R, the next one P tokens later.
    """
    policy = RPC()
    assert counts(policy, 1056, 0) == (256 + 32, 1056)
    assert counts(policy, 2080, 1) == (512 + 32, 256 + 32 + 1024)
    assert counts(policy, 3104, 2) == (768 + 32, 512 + 32 + 1024)
    assert policy.observation == 32
    assert counts(RPC(P=4096), 4128)[1] == 4128  # "after the 4128th decoding step", appendix B.1
    odd = RPC(P=50, R=7, c=3)
    assert counts(odd, 57, 0) == (16 + 7, 57)
    assert counts(odd, 99, 4) == (80 + 7, 64 + 7 + 50)


def test_rpc_schedule_evicts_every_p_tokens():
    policy = RPC(P=50, R=7, c=3)
    held, evictions, at = 0, 0, []
    for seen in range(1, 310):
        held += 1
        entries, capacity = counts(policy, seen, evictions)
        if held >= capacity:
            held, evictions = entries, evictions + 1
            at.append(seen)
    assert at == [57, 107, 157, 207, 257, 307]
    assert held == 6 * 16 + 7 + 2


@pytest.mark.parametrize("options", [{"budget": 64}, {"ratio": 0.5, "extra": 64}])
def test_rpc_budget_replaces_the_schedule(options):
    policy = RPC(buffer=10, **options)
    entries, capacity = counts(policy, 1000, 3)
    assert entries == (64 if "budget" in options else 564)
    assert capacity == entries + 10


def test_rpc_head_needs_a_key_for_each_query_head():
    keys, queries = random_entries(1, 60, 1, 10, seed=0)
    per_head = RPC(budget=24, R=10, aggregation="head").select(keys, queries, 24)
    assert (per_head == RPC(budget=24, R=10, aggregation="group").select(keys, queries, 24)).all()
    keys, queries = random_entries(1, 60, 2, 10, seed=0)
    with pytest.raises(ValueError, match="aggregation"):
        RPC(budget=24, R=10, aggregation="head").select(keys, queries, 24)


def test_h2o_gives_half_to_recent_entries():
    assert H2O(budget=25).recent(torch.tensor([25, 40, 1])).tolist() == [12, 20, 1]
    keys, queries = random_entries(1, 60, 2, 60, seed=1)
    assert set(range(48, 60)) <= set(H2O(budget=25).select(keys, queries, 25)[0, 0].tolist())


def test_budgets_of_the_tables_of_rlkv():
    """r * L + S + W - 4G; one entry above it (and above 512) 128 entries go.  H2O: both halves
    rounded down.
    """
    policy = RKV(ratio=0.4, extra=80 - 4 * 4, variant="rlkv_tables")
    assert counts(policy, 1000) == (872, 513)
    assert counts(policy, 2000, 8) == (2000 - 9 * 128, 800 + 64 + 1)
    seen, held, evictions = 0, 0, 0
    while seen < 3000:
        seen, held = seen + 1, held + 1
        entries, capacity = counts(policy, seen, evictions)
        if held >= capacity:
            assert held == capacity
            assert entries == held - 128
            held, evictions = entries, evictions + 1
    assert evictions == 14  # the 3,000 tokens less 1,264, in steps of 128
    assert [
        counts(H2O(ratio=0.3, extra=5, variant="rlkv_tables"), seen) for seen in (100, 104)
    ] == [(34, 36), (36, 37)]


def test_snapkv_is_rkv_with_lambda_1():
    keys, queries = random_entries(2, 90, 2, 8, seed=2)
    for variant in ("paper", "published"):
        snap = SnapKV(budget=24, variant=variant).select(keys, queries, 24)
        assert (snap == RKV(budget=24, lam=1, variant=variant).select(keys, queries, 24)).all()
        assert (snap != RKV(budget=24, variant=variant).select(keys, queries, 24)).any()


def test_random_draws_again_for_seed_layer_head_and_tokens_read():
    policy, valid = RandomEviction(budget=24), torch.ones(2, 4000, dtype=torch.bool)
    keys, queries = random_entries(2, 4000, 1, 1, seed=3)
    seen = torch.tensor([5000, 6000])
    draws = policy.scores(keys, queries, valid, seen, 3)
    assert (draws == policy.scores(keys, queries, valid, seen, 3)).all()
    others = [
        RandomEviction(budget=24, seed=1).scores(keys, queries, valid, seen, 3),
        policy.scores(keys, queries, valid, seen, 4),
        policy.scores(keys, queries, valid, seen + 1, 3),
        draws.roll(1, dims=1),
        draws.roll(1, dims=0),
        draws.roll(1, dims=2),
    ]
    for other in others:
        # independent draws of 24 bits: 24,000 of them are equal in 0.0014 places on average, and
        # not correlated
        assert (draws == other).sum() <= 2
        assert (
            abs(torch.corrcoef(torch.stack([draws.flatten(), other.flatten()]))[0, 1])
            < 5 / 24_000**0.5
        )
    uniform = draws / 2**24
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # 5 standard errors of the mean (1/12 ** 0.5) and of tenths of 24,000 draws
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / 24_000) ** 0.5
    assert (uniform.histc(10, 0, 1) - 2400).abs().max() < 5 * (2400 * 0.9) ** 0.5


REFUSED = [
    ("rkv", {}, "budget .* ratio .* neither"),
    ("rkv", {"budget": 64, "ratio": 0.5}, "both are given"),
    ("rpc", {"budget": 64, "ratio": 0.5}, "both are given"),
    ("rkv", {"budget": 7}, "budget is 7, .* 8 entries"),
    ("rkv", {"budget": 20, "sink": 16}, "budget is 20, .* 24 entries"),
    ("rkv", {"budget": -1}, "budget is -1"),
    ("rkv", {"budget": 64.5}, "budget is 64.5"),
    ("rkv", {"budget": 64, "buffer": 0}, "buffer is 0"),
    ("rkv", {"budget": 64, "buffer": 1.5}, "buffer is 1.5"),
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
    ("snapkv", {"budget": 64, "variant": "mine"}, "variant is 'mine'"),
    ("rkv", {"budget": 64, "kernel": 0}, "kernel is 0"),
    ("snapkv", {"budget": 64, "kernel": 4, "variant": "published"}, "kernel is 4.*published"),
    ("rpc", {"kernel": 0}, "kernel is 0"),
    ("rpc", {"aggregation": "layer"}, "aggregation is 'layer'.* all, group, head"),
    ("rpc", {"R": 0}, "R is 0"),
    ("rpc", {"budget": 16}, "budget is 16"),
    ("rpc", {"c": 0.5}, "c is 0.5"),
    ("rpc", {"c": 1}, "c is 1"),
    ("rpc", {"P": 0}, "P is 0"),
    ("h2o", {"budget": 10, "sink": 6}, "sink is 6"),
    ("sink_window", {"budget": 64, "window": 64}, "budget is 64, .*sink 16 . window 64"),
    ("sink_window", {"ratio": 0.5, "window": 64}, "window and ratio"),
    ("sink_window", {"window": 0}, "window is 0"),
    ("random", {"budget": 64, "seed": -1}, "seed is -1"),
    ("rvk", {"budget": 64}, "'rvk'.*rkv"),
    ("tova", {"budget": 64, "lam": 0.1}, "tova .* lam.* budget, ratio"),
    ("rpc", {"observation": 8}, "rpc .* observation.*, P, R, c, aggregation"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refused_with_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_policy(name, **options)
    assert "\n" not in str(refusal.value)


def test_select_refuses_what_does_not_fit():
    keys, queries = random_entries(2, 60, 2, 8, seed=4)
    policy = RKV(budget=24)
    with pytest.raises(ValueError, match="budget is 4"):
        policy.select(keys, queries, 4)
    with pytest.raises(ValueError, match=r"\[2, 4, 8, 16\]"):
        policy.select(keys, queries[:, :4], 24)
    with pytest.raises(ValueError, match=r"valid.*\[2, 59\]"):
        policy.select(keys, queries, 24, torch.ones(2, 59, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"8 queries.*5"):
        TOVA(budget=4).select(keys[:, :, :5], queries, 4)
