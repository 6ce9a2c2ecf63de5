"""The cache against references: a masked forward without any cache, and transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache import plan as plan_module
from rlkv.eviction import H2O, RKV, RPC, EvictionPolicy
from tests.helpers.cached_logits import (
    MIXED,
    TOLERANCE,
    cached_logits,
    draw_ids,
    real_tokens,
    starts_of,
)
from tests.helpers.models import make_tiny_model
from tests.helpers.reference_model import reference_logits
from tests.helpers.transposed import in_both_layouts

SINK, WINDOW = 3, 5


CALLS = {
    "prompt then tokens": [14] + [1] * 20,
    "prompt shorter than the sink": [2] + [1] * 20,
    "prompt of one token": [1] * 20,
    "prompt shorter than sink + window": [6] + [1] * 20,
    "prompt of exactly sink + window": [8] + [1] * 4,
    "chat turns": [9, 1, 1, 1, 7, 1, 1, 20, 1, 2, 3, 1],
    "one call": [30],
}


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("name", CALLS)
def test_cached_calls_equal_one_masked_forward(
    realloc_model: PreTrainedModel, prefill: str, name: str
) -> None:
    calls = CALLS[name]
    ids = draw_ids(2, sum(calls))
    cache = HeadReallocationCache(MIXED, SINK, WINDOW, prefill)
    got = cached_logits(realloc_model, ids, cache, calls)
    call_start = starts_of(calls) if prefill == "full" else None
    want = reference_logits(realloc_model, ids, MIXED, SINK, WINDOW, call_start)
    assert (got - want).abs().max() < TOLERANCE
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("calls", [[12] + [1] * 20, [3] + [1] * 20, [12, 1, 1, 5, 1, 1, 1]])
def test_left_padded_rows_equal_single_rows(
    realloc_model: PreTrainedModel, prefill: str, calls: list[int]
) -> None:
    ids = draw_ids(4, sum(calls))
    padding = [0, 2, calls[0] - 1, min(5, calls[0] - 1)]  # row 2 starts with a single real token
    real = real_tokens(padding, ids.shape[1])
    batched = cached_logits(
        realloc_model, ids, HeadReallocationCache(MIXED, SINK, WINDOW, prefill), calls, real
    )
    for row, pad in enumerate(padding):
        own_calls = [calls[0] - pad, *calls[1:]]
        cache = HeadReallocationCache(MIXED, SINK, WINDOW, prefill)
        single = cached_logits(realloc_model, ids[row : row + 1, pad:], cache, own_calls)
        assert (batched[row, pad:] - single[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        RKV(budget=9, buffer=4, observation=3),
        H2O(budget=8),
        RPC(P=12, R=3, c=3, aggregation="head"),
    ],
)
def test_no_store_depends_on_the_strides_of_torchs_output(
    prefill: str, policy: EvictionPolicy | None
) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids, real = draw_ids(2, 40), real_tokens([0, 5], 40)

    def run() -> torch.Tensor:
        cache = HeadReallocationCache(MIXED, SINK, WINDOW, prefill, eviction=policy)
        return cached_logits(model, ids, cache, [14, 1, 1, 1, 7, *[1] * 16], real)

    torch.testing.assert_close(*in_both_layouts(run))


def test_rows_that_all_have_the_same_padding(realloc_model: PreTrainedModel) -> None:
    calls = [6] + [1] * 12
    ids = draw_ids(2, sum(calls))
    real = real_tokens([4, 4], ids.shape[1])
    batched = cached_logits(
        realloc_model, ids, HeadReallocationCache(MIXED, SINK, WINDOW), calls, real
    )
    cache = HeadReallocationCache(MIXED, SINK, WINDOW)
    single = cached_logits(realloc_model, ids[:, 4:], cache, [2] + [1] * 12)
    assert (batched[:, 4:] - single).abs().max() < TOLERANCE


def test_padded_batch_equals_the_reference(realloc_model: PreTrainedModel) -> None:
    calls = [12] + [1] * 15
    ids = draw_ids(3, sum(calls))
    real = real_tokens([0, 7, 11], ids.shape[1])
    got = cached_logits(realloc_model, ids, HeadReallocationCache(MIXED, SINK, WINDOW), calls, real)
    want = reference_logits(realloc_model, ids, MIXED, SINK, WINDOW, starts_of(calls), real)
    assert ((got - want).abs() * real[..., None]).max() < TOLERANCE
    assert got.isfinite().all()


@pytest.mark.parametrize("sink", [0, 1, 40])
@pytest.mark.parametrize("window", [1, 2, 40])
def test_extreme_sizes(sink: int, window: int) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    calls = [5] + [1] * 10 + [4, 1, 1]
    ids = draw_ids(2, sum(calls))
    got = cached_logits(model, ids, HeadReallocationCache(MIXED, sink, window), calls)
    want = reference_logits(model, ids, MIXED, sink, window, starts_of(calls))
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("padding", [0, 9])
def test_long_local_prompt_in_blocks(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    monkeypatch.setattr(plan_module, "BLOCK", 7)
    model = make_tiny_model("qwen3")
    model.set_attn_implementation(IMPLEMENTATION)
    calls = [40] + [1] * 6
    ids = draw_ids(2, sum(calls))
    real = real_tokens([0, padding], ids.shape[1])
    got = cached_logits(
        model, ids, HeadReallocationCache(MIXED, SINK, WINDOW, "local"), calls, real
    )
    want = reference_logits(model, ids, MIXED, SINK, WINDOW, None, real)
    assert ((got - want).abs() * real[..., None]).max() < TOLERANCE


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_all_heads_full_generates_the_stock_tokens(
    tiny_model: PreTrainedModel, prefill: str
) -> None:
    ids = draw_ids(3, 10)
    mask = real_tokens([0, 3, 6], 10).long()
    settings = {
        "max_new_tokens": 40,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": mask,
    }
    stock = tiny_model.generate(ids, past_key_values=DynamicCache(), **settings)
    tiny_model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(torch.ones(3, 4, dtype=torch.bool), SINK, WINDOW, prefill)
    ours = tiny_model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(ours, stock)
    assert (
        cache.full_nbytes() == 2 * 3 * 3 * 4 * 49 * 16 * 4
    )  # K and V, layers, rows, heads, tokens, D, bytes


def test_the_full_cache_is_not_equal_to_the_compressed_one(realloc_model: PreTrainedModel) -> None:
    """Guards the comparisons above: on these models the compressed heads do change the logits."""
    calls = [14] + [1] * 20
    ids = draw_ids(2, sum(calls))
    compressed = cached_logits(
        realloc_model, ids, HeadReallocationCache(MIXED, SINK, WINDOW), calls
    )
    whole = cached_logits(realloc_model, ids, HeadReallocationCache(torch.ones_like(MIXED)), calls)
    assert (compressed - whole).abs().max() > 0.1


def test_beam_search_equals_the_stock_beams_with_all_heads_full(
    tiny_model: PreTrainedModel,
) -> None:
    ids = draw_ids(2, 9)
    mask = real_tokens([0, 3], 9).long()
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    stock = tiny_model.generate(ids, **settings)
    tiny_model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(torch.ones(3, 4, dtype=torch.bool))
    assert torch.equal(tiny_model.generate(ids, past_key_values=cache, **settings), stock)


def test_reordered_rows_go_on_as_if_they_had_been_there(realloc_model: PreTrainedModel) -> None:
    ids = draw_ids(3, 20)
    real, order = real_tokens([0, 4, 9], 20), [2, 0, 0, 1]
    cache = HeadReallocationCache(MIXED, SINK, WINDOW)
    cached_logits(realloc_model, ids[:, :12], cache, [10, 1, 1], real)
    cache.reorder_cache(torch.tensor(order))
    moved = HeadReallocationCache(MIXED, SINK, WINDOW)
    cached_logits(realloc_model, ids[order][:, :12], moved, [10, 1, 1], real[order])
    a, b = (
        cached_logits(realloc_model, ids[order], each, [1] * 8, real[order], begin=12)
        for each in (cache, moved)
    )
    assert (a - b).abs().max() < TOLERANCE  # batches of 3 and of 4 sum in another order
    assert cache.nbytes() == moved.nbytes()


def test_reset_forgets_everything(realloc_model: PreTrainedModel) -> None:
    calls = [9] + [1] * 6
    cache = HeadReallocationCache(MIXED, SINK, WINDOW)
    cached_logits(realloc_model, draw_ids(2, 15, seed=5), cache, calls)
    cache.reset()
    again = cached_logits(realloc_model, draw_ids(2, 15), cache, calls)
    fresh = cached_logits(
        realloc_model, draw_ids(2, 15), HeadReallocationCache(MIXED, SINK, WINDOW), calls
    )
    assert torch.equal(again, fresh)


def test_bfloat16_is_cached_as_bfloat16() -> None:
    model = make_tiny_model("llama").to(torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    cache = HeadReallocationCache(MIXED, SINK, WINDOW, reserve=20)
    logits = cached_logits(model, draw_ids(1, 20), cache, [10] + [1] * 10)
    assert logits.dtype == torch.bfloat16
    assert cache.nbytes() == 2 * 2 * 16 * (6 * 20 + 6 * (SINK + WINDOW))
