"""The cache under an eviction policy, against a naive run of one row with lists of entries."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.eviction import H2O, TOVA, SinkWindow
from rlkv.eviction.base import EvictionPolicy
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.eviction_matrix import INSTANCES
from tests.helpers.models import FAMILIES, make_tiny_model
from tests.helpers.naive_eviction import naive_logits

ALL = torch.zeros(3, 4, dtype=torch.bool)


CALLS = {
    "prompt then tokens": [20] + [1] * 14,
    "prompt shorter than the budget": [4] + [1] * 16,
    "prompt of one token": [1] * 18,
    "chat turns": [9, 1, 1, 1, 17, 1, 1, 6, 1, 1, 1, 1],
    "one call": [30],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("policy", INSTANCES.values(), ids=INSTANCES)
def test_left_padded_rows_equal_naive_runs(policy: EvictionPolicy, calls: list[int]) -> None:
    check_against_naive_runs(policy, calls, MIXED)


@pytest.mark.parametrize("policy", INSTANCES.values(), ids=INSTANCES)
def test_without_full_heads(policy: EvictionPolicy) -> None:
    check_against_naive_runs(policy, [20] + [1] * 10, ALL)


def check_against_naive_runs(policy: EvictionPolicy, calls: list[int], full: Tensor) -> None:
    model = make_tiny_model("llama")
    ids = draw_ids(3, sum(calls))
    padding = [0, min(3, calls[0] - 1), calls[0] - 1]
    model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(full, eviction=policy, record=True)
    got = cached_logits(model, ids, cache, calls, real_tokens(padding, ids.shape[1]))
    for row, pad in enumerate(padding):
        want, run = naive_logits(
            model, ids[row : row + 1, pad:], [calls[0] - pad, *calls[1:]], policy, full
        )
        assert (got[row, pad:] - want[0]).abs().max() < TOLERANCE
        held = cache.held(row)
        for layer, naive in run.layers.items():
            for head, entries in enumerate(naive.heads):
                assert held[layer, head].nonzero()[:, 0].tolist() == entries.positions


@pytest.mark.parametrize("policy", INSTANCES.values(), ids=INSTANCES)
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family != "llama"]
)  # which is above
def test_other_families(family: str, policy: EvictionPolicy) -> None:
    model = make_tiny_model(family)
    calls, padding = [20] + [1] * 10, [0, 6]
    ids = draw_ids(2, sum(calls))
    model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(MIXED, eviction=policy)
    got = cached_logits(model, ids, cache, calls, real_tokens(padding, ids.shape[1]))
    for row, pad in enumerate(padding):
        own = [calls[0] - pad, *calls[1:]]
        want, _ = naive_logits(model, ids[row : row + 1, pad:], own, policy, MIXED)
        assert (got[row, pad:] - want[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "policy", [p for p in INSTANCES.values() if not p.protect_prompt], ids=lambda p: p.name
)
def test_prefill_local_equals_one_token_at_a_time(policy: EvictionPolicy) -> None:
    model = make_tiny_model("qwen3")
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(3, 40)
    real = real_tokens([0, 2, 5], ids.shape[1])
    whole = cached_logits(
        model, ids, HeadReallocationCache(MIXED, prefill="local", eviction=policy), [30, 10], real
    )
    cache = HeadReallocationCache(MIXED, prefill="full", eviction=policy)
    single = cached_logits(
        model, ids, cache, [6] + [1] * 34, real
    )  # 6 tokens: nothing is evicted yet
    assert ((whole - single).abs() * real[..., None]).max() < TOLERANCE


@pytest.mark.parametrize("name", ["rkv", "h2o", "rpc schedule", "random"])
def test_rows_can_be_reordered_and_repeated(name: str) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(2, 30)
    real = real_tokens([0, 4], ids.shape[1])
    cache = HeadReallocationCache(MIXED, eviction=INSTANCES[name])
    cached_logits(model, ids[:, :20], cache, [14] + [1] * 6, real[:, :20])
    order = [1, 0, 1]
    cache.batch_select_indices(torch.tensor(order))
    got = cached_logits(model, ids[order], cache, [1] * 10, real[order], begin=20)
    fresh = HeadReallocationCache(MIXED, eviction=INSTANCES[name])
    want = cached_logits(model, ids, fresh, [14] + [1] * 16, real)[order, 20:]
    assert (got - want).abs().max() < TOLERANCE


def test_sink_window_policy_with_a_buffer_of_one_is_the_ring() -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(2, 50)
    calls = [20] + [1] * 30
    # the ring attends to S + W entries; the policy stores the new token first and evicts after
    policy = SinkWindow(budget=7, sink=3, buffer=1)
    got = cached_logits(model, ids, HeadReallocationCache(MIXED, eviction=policy), calls)
    want = cached_logits(model, ids, HeadReallocationCache(MIXED, sink=3, window=5), calls)
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("rows", [[1], [2, 1], [2]])
@pytest.mark.parametrize("name", ["rkv", "h2o", "own", "rpc schedule"])
def test_rows_can_leave_a_batch_the_longest_first(name: str, rows: list[int]) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids, padding = draw_ids(3, 26), [0, 4, 9]
    real = real_tokens(padding, ids.shape[1])
    cache = HeadReallocationCache(MIXED, eviction=INSTANCES[name])
    cached_logits(model, ids[:, :18], cache, [14] + [1] * 4, real[:, :18])
    cache.batch_select_indices(torch.tensor(rows))
    got = cached_logits(model, ids[rows], cache, [1] * 8, real[rows], begin=18)
    fresh = HeadReallocationCache(MIXED, eviction=INSTANCES[name])
    want = cached_logits(model, ids, fresh, [14] + [1] * 12, real)[rows, 18:]
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("policy", INSTANCES.values(), ids=INSTANCES)
def test_a_reset_cache_is_as_new_and_every_run_is_the_same(policy: EvictionPolicy) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    calls, cache = [17] + [1] * 15, HeadReallocationCache(MIXED, eviction=policy, record=True)
    cached_logits(model, draw_ids(2, 34, seed=2), cache, [25] + [1] * 9)
    cache.reset()
    assert cache.kept == []
    again = cached_logits(model, draw_ids(2, 32), cache, calls)
    fresh = HeadReallocationCache(MIXED, eviction=policy, record=True)
    first = cached_logits(model, draw_ids(2, 32), fresh, calls)
    assert torch.equal(again, first)
    assert len(cache.kept) == len(fresh.kept)
    assert all(
        torch.equal(a.positions, b.positions) for a, b in zip(cache.kept, fresh.kept, strict=True)
    )
    assert all(torch.equal(a.scores, b.scores) for a, b in zip(cache.kept, fresh.kept, strict=True))


@pytest.mark.parametrize("name", ["rkv", "tova", "snapkv", "own"])
def test_recorded_scores_are_those_of_the_policy(name: str) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    policy = INSTANCES[name]
    seen: list[Tensor] = []

    class Spy(type(policy)):  # type: ignore[misc]
        def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
            seen.append(super().scores(keys, queries, valid))
            return seen[-1]

    spy = Spy(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})
    cache = HeadReallocationCache(MIXED, eviction=spy, record=True)
    cached_logits(model, draw_ids(1, 30), cache, [30])
    for scores, kept in zip(seen, cache.kept, strict=True):
        assert torch.equal(
            scores[0].gather(1, kept.positions), kept.scores
        )  # the first call: entry i is token i


def test_a_model_with_a_scale_of_its_own() -> None:
    model = make_tiny_model("granite")
    assert model.config.attention_multiplier != model.config.head_dim**-0.5
    calls, ids = [20] + [1] * 14, draw_ids(1, 34)
    for name in ("rkv", "h2o", "tova"):
        model.set_attn_implementation(IMPLEMENTATION)
        got = cached_logits(
            model, ids, HeadReallocationCache(MIXED, eviction=INSTANCES[name]), calls
        )
        want, _ = naive_logits(model, ids, calls, INSTANCES[name], MIXED)
        assert (got - want).abs().max() < TOLERANCE


def test_a_protected_prompt_does_not_count_in_a_ratio() -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    policy = TOVA(ratio=0.5, extra=4, buffer=2, protect_prompt=True)
    cache = HeadReallocationCache(ALL, eviction=policy, record=True)
    cached_logits(model, draw_ids(1, 50), cache, [20] + [1] * 30)
    held = cache.held(0)
    assert held[..., :20].all()
    # of the 30 tokens after the prompt at least 15 + 4, less than 2 more
    assert ((held[..., 20:].sum(-1) >= 18) & (held[..., 20:].sum(-1) <= 20)).all()


def test_scores_are_added_up_in_float32_whatever_the_model_and_the_default_dtype() -> None:
    model = make_tiny_model("llama").to(torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(ALL, eviction=H2O(budget=12))
    torch.set_default_dtype(torch.bfloat16)
    try:
        cached_logits(model, draw_ids(1, 25), cache, [20] + [1] * 5)
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = cache.layers[0].stores[0].tensors()
    assert sorted({str(tensor.dtype) for tensor in tensors}) == ["torch.bfloat16", "torch.float32"]


@dataclass(frozen=True)
class OneForAll(EvictionPolicy):
    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return keys[:, :1, :, 0]


@dataclass(frozen=True)
class NotANumber(EvictionPolicy):
    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        scores = keys[..., 0].float().clone()
        scores[..., ::2], scores[..., 1::4] = torch.nan, torch.inf
        return scores


def test_scores_of_ones_own_policy_are_checked() -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    assert OneForAll(budget=12).name == "oneforall"
    with pytest.raises(ValueError, match=r"oneforall.*\[1, 1, 30\]"):
        cached_logits(
            model,
            draw_ids(1, 30),
            HeadReallocationCache(ALL, eviction=OneForAll(budget=12, buffer=4)),
            [30],
        )
    cache = HeadReallocationCache(
        ALL, eviction=NotANumber(budget=12, buffer=4, sink=2, observation=3), record=True
    )
    cached_logits(model, draw_ids(1, 30), cache, [30])
    assert cache.held(0)[
        ..., [0, 1, 27, 28, 29]
    ].all()  # infinite scores do not push out what is always kept
