"""The cache under an eviction policy: what the matrix of rows does not say."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.eviction import H2O, POLICIES, RKV, RPC, TOVA, SinkWindow
from rlkv.eviction.base import EvictionPolicy
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.models import SOFTMAXES, make_tiny_model
from tests.helpers.naive_eviction import INSTANCES, naive_logits, small_policy

NONE_FULL = torch.zeros_like(MIXED)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("llama", attn_implementation=IMPLEMENTATION)


@pytest.mark.parametrize("kind", ["budget", "ratio"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_beyond_the_text_is_the_full_cache_bit_for_bit(
    model: PreTrainedModel, name: str, kind: str
) -> None:
    policy = small_policy(name, budget=64, buffer=4)
    if kind == "ratio":
        policy = replace(policy, budget=None, ratio=1.0, extra=8)
    ids, calls = draw_ids(2, 35), [20] + [1] * 15
    real = real_tokens([0, 5], 35)
    want = cached_logits(model, ids, HeadReallocationCache(~NONE_FULL), calls, real)
    cache = HeadReallocationCache(NONE_FULL, eviction=policy)
    assert torch.equal(cached_logits(model, ids, cache, calls, real)[real], want[real])


@pytest.mark.parametrize("family", ["llama", *SOFTMAXES])
def test_sink_window_policy_with_a_buffer_of_one_is_the_ring(family: str) -> None:
    model = make_tiny_model(family, attn_implementation=IMPLEMENTATION)
    ids, calls = draw_ids(2, 50), [20] + [1] * 30
    # the ring attends to S + W entries; the policy stores the new token first and evicts after
    policy = SinkWindow(budget=7, sink=3, buffer=1)
    got = cached_logits(model, ids, HeadReallocationCache(MIXED, eviction=policy), calls)
    want = cached_logits(model, ids, HeadReallocationCache(MIXED, sink=3, window=5), calls)
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["rkv", "tova"])
def test_recorded_scores_are_those_of_the_policy(model: PreTrainedModel, name: str) -> None:
    policy = INSTANCES[name]
    seen: list[Tensor] = []

    class Spy(type(policy)):  # type: ignore[misc]
        def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
            seen.append(super().scores(keys, queries, valid))
            return seen[-1]

    spy = Spy(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})
    cache = HeadReallocationCache(MIXED, eviction=spy, record=True)
    cached_logits(model, draw_ids(1, 30), cache, [30])
    assert len(seen) == 2  # layers with compressible heads
    for scores, kept in zip(seen, cache.kept, strict=True):
        assert kept.seen == 30
        # in the first call entry i is token i
        assert torch.equal(scores[0].gather(1, kept.positions), kept.scores)


@pytest.mark.parametrize("name", ["rkv", "snapkv", "h2o"])
def test_autocast_does_not_reach_scores(model: PreTrainedModel, name: str) -> None:
    policy = INSTANCES[name]
    calls: list[tuple[Tensor, ...]] = []

    class Spy(type(policy)):  # type: ignore[misc]
        def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
            scores = super().scores(keys, queries, valid)
            # the buffers are written again later
            calls.append((scores.clone(), keys.clone(), queries.clone(), valid.clone()))
            return scores

    spy = Spy(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})
    with torch.autocast("cpu", torch.bfloat16):
        cached_logits(
            model, draw_ids(1, 30), HeadReallocationCache(MIXED, eviction=spy), [20] + [1] * 10
        )
    assert calls
    for scores, *arguments in calls:
        assert torch.equal(scores, policy.scores(*arguments))


@pytest.mark.parametrize("name", ["rkv", "h2o"])
def test_a_model_with_a_scale_of_its_own(name: str) -> None:
    model = make_tiny_model("granite", attn_implementation=IMPLEMENTATION)
    assert model.config.attention_multiplier != model.config.head_dim**-0.5
    calls, ids = [20] + [1] * 14, draw_ids(1, 34)
    cache = HeadReallocationCache(MIXED, eviction=INSTANCES[name])
    got = cached_logits(model, ids, cache, calls)
    want, _ = naive_logits(model, ids[0], calls, INSTANCES[name], MIXED, prompt=20)
    assert (got - want).abs().max() < TOLERANCE


def test_scores_are_added_up_in_float32_whatever_the_model_and_the_default_dtype() -> None:
    model = make_tiny_model("llama", attn_implementation=IMPLEMENTATION).bfloat16()
    cache = HeadReallocationCache(NONE_FULL, eviction=H2O(budget=12))
    torch.set_default_dtype(torch.bfloat16)
    try:
        cached_logits(model, draw_ids(1, 25), cache, [20] + [1] * 5)
    finally:
        torch.set_default_dtype(torch.float32)
    dtypes = {tensor.dtype for tensor in cache.layers[0].stores[0].tensors()}
    assert dtypes == {torch.bfloat16, torch.float32}


@dataclass(frozen=True)
class OneForAll(EvictionPolicy):
    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return keys[:, :1, :, 0]


@dataclass(frozen=True)
class NotANumber(EvictionPolicy):
    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        scores = keys[..., 0].float().clone()
        scores[..., ::2] = torch.nan
        scores[..., 1::4] = torch.inf
        return scores


def test_scores_of_ones_own_policy_are_checked(model: PreTrainedModel) -> None:
    assert OneForAll(budget=12).name == "oneforall"
    cache = HeadReallocationCache(NONE_FULL, eviction=OneForAll(budget=12, buffer=4))
    with pytest.raises(ValueError, match=r"oneforall.*\[1, 1, 30\]"):
        cached_logits(model, draw_ids(1, 30), cache, [30])
    policy = NotANumber(budget=12, buffer=4, sink=2, observation=3)
    cache = HeadReallocationCache(NONE_FULL, eviction=policy, record=True)
    cached_logits(model, draw_ids(1, 30), cache, [30])
    # infinite scores do not push out what is always kept
    assert cache.held(0)[..., [0, 1, 27, 28, 29]].all()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same function with as many KV heads as query heads."""
    config, state = model.config, model.state_dict()
    group = config.num_attention_heads // config.num_key_value_heads
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (-1, config.head_dim))
            state[name] = heads.repeat_interleave(group, dim=0).flatten(0, 1)
    own = config.to_dict() | {"num_key_value_heads": config.num_attention_heads}
    twin = LlamaForCausalLM(type(config)(**own))
    twin.load_state_dict(state)
    twin.set_attn_implementation(IMPLEMENTATION)
    return twin.eval()


def test_query_heads_keep_their_own_tokens(model: PreTrainedModel) -> None:
    """What a model with a KV head per query head keeps, and the bytes of as many copies."""
    policy, padding = RPC(P=12, R=3, c=3, aggregation="head"), torch.tensor([0, 5, 17])
    calls, ids = [20] + [1] * 45, draw_ids(3, 65)
    real = real_tokens(padding.tolist(), 65)
    grouped, own = (
        HeadReallocationCache(full, eviction=policy, record=True)
        for full in (MIXED, MIXED.repeat_interleave(2, dim=1))
    )
    logits = cached_logits(model, ids, grouped, calls, real)
    of_twin = cached_logits(twin_of(model), ids, own, calls, real)
    assert (logits - of_twin)[real].abs().max() < TOLERANCE
    # three rows, three evictions, two layers with compressible heads
    assert len(grouped.kept) >= 3 * 3 * 2
    for mine, theirs in zip(grouped.kept, own.kept, strict=True):
        assert torch.equal(mine.positions, theirs.positions)
    # more choices than the layer has KV heads
    assert max(len(torch.unique(kept.positions, dim=0)) for kept in grouped.kept) > 4
    for row in range(3):
        assert torch.equal(grouped.held(row), own.held(row).unflatten(1, (-1, 2)).any(dim=2))
    size = KVSizes.of(model)
    held, _ = kv_nbytes(CacheSettings(eviction=policy), MIXED, size, 20 - padding, 65 - padding)
    of_padding = int(padding.sum()) * size.nbytes * int(MIXED.sum())
    assert grouped.used_nbytes() == int(held.sum()) + of_padding


@pytest.mark.parametrize(
    "policy",
    [
        RKV(ratio=0.3, extra=4, buffer=4, observation=3),
        H2O(ratio=0.3, extra=4),
        TOVA(ratio=0.3, extra=4, buffer=2, protect_prompt=True),
    ],
    ids=lambda policy: policy.name,
)
def test_planned_budgets_are_those_of_single_rows(
    model: PreTrainedModel, policy: EvictionPolicy
) -> None:
    """A share of a length known before: rows that join bring theirs."""
    planned, padding = torch.tensor([30, 60, 45]), [0, 3, 9]
    ids, real = draw_ids(3, 40), real_tokens(padding, 40)
    caches = []
    for rows in ([0, 1], [2]):
        cache = HeadReallocationCache(MIXED, eviction=policy)
        cache.state.planned = planned[rows]
        cached_logits(model, ids[rows, :30], cache, [20] + [1] * 10, real[rows, :30])
        caches.append(cache)
    caches[0].join(caches[1], 30)
    got = cached_logits(model, ids, caches[0], [1] * 10, real, begin=30)
    for row, pad in enumerate(padding):
        prompt, tokens = torch.tensor([20 - pad]), torch.tensor([40 - pad])
        counted = planned[row] - prompt if policy.protect_prompt else planned[row]
        own = replace(policy, ratio=None, budget=int(policy.ratio * counted) + policy.extra)
        alone = HeadReallocationCache(MIXED, eviction=own)
        want = cached_logits(model, ids[row : row + 1, pad:], alone, [20 - pad] + [1] * 20)
        assert (got[row] - want[0, -10:]).abs().max() < TOLERANCE
        settings, size = CacheSettings(eviction=policy), KVSizes.of(model)
        held, _ = kv_nbytes(settings, MIXED, size, prompt, tokens, planned[row : row + 1])
        assert int(held) == alone.used_nbytes()
