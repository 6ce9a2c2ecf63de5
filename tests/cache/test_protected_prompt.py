"""A protected prompt: compressible heads keep it in addition to the window."""

from __future__ import annotations

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.cache.accounting import EntrySize, kv_nbytes
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

SINK, WINDOW = 3, 5
PADDING = [
    0,
    3,
    11,
    13,
]  # prompts of 14, 11, 3 and 1 tokens: more, as many and fewer than the sinks
CALLS = [14, *[1] * 12, 6, *[1] * 8]  # a prompt, an answer, a further turn and its answer
PREFILLS = ["full", "local", "published"]


def new_cache(
    prefill: str = "full", sink: int = SINK, protect_prompt: bool = True
) -> HeadReallocationCache:
    return HeadReallocationCache(MIXED, sink, WINDOW, prefill, protect_prompt=protect_prompt)


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("prompt", [1, 2, 9, 14])
def test_cached_calls_equal_a_mask_whose_sinks_are_the_prompt(
    realloc_model, prefill: str, prompt: int
) -> None:
    calls = [prompt, *CALLS[1:]]
    ids = draw_ids(2, sum(calls))
    got = cached_logits(realloc_model, ids, new_cache(prefill), calls)
    call_start = starts_of(calls) if prefill == "full" else None
    want = reference_logits(realloc_model, ids, MIXED, max(SINK, prompt), WINDOW, call_start)
    assert (got - want).abs().max() < TOLERANCE


def test_protection_changes_what_is_seen_after_the_prompt_alone(realloc_model) -> None:
    """Guards the comparisons above: without protection the same calls give other logits."""
    ids = draw_ids(1, sum(CALLS))
    kept, lost = (
        cached_logits(realloc_model, ids, new_cache(protect_prompt=on), CALLS)[0]
        for on in (True, False)
    )
    assert torch.equal(kept[: CALLS[0]], lost[: CALLS[0]])
    assert (kept - lost)[CALLS[0] + WINDOW :].abs().amax(-1).min() > 100 * TOLERANCE


@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_prompt_within_the_sinks_changes_nothing(realloc_model, prefill: str) -> None:
    calls = [6, *CALLS[1:]]
    ids, real = draw_ids(3, sum(calls)), real_tokens([0, 1, 5], sum(calls))
    caches = [new_cache(prefill, sink=6, protect_prompt=on) for on in (True, False)]
    protected, plain = (cached_logits(realloc_model, ids, cache, calls, real) for cache in caches)
    assert torch.equal(protected, plain)
    assert caches[0].nbytes() == caches[1].nbytes()
    assert caches[0].used_nbytes() == caches[1].used_nbytes()


@pytest.mark.parametrize("prefill", PREFILLS)
def test_left_padded_rows_equal_single_rows(realloc_model, prefill: str) -> None:
    ids, real = draw_ids(4, sum(CALLS)), real_tokens(PADDING, sum(CALLS))
    batch = new_cache(prefill)
    batched = cached_logits(realloc_model, ids, batch, CALLS, real)
    used = 0
    for row, pad in enumerate(PADDING):
        cache = new_cache(prefill)
        single = cached_logits(
            realloc_model, ids[row : row + 1, pad:], cache, [CALLS[0] - pad, *CALLS[1:]]
        )
        assert (batched[row, pad:] - single[0]).abs().max() < TOLERANCE
        assert torch.equal(batch.held(row), cache.held(0))
        used += cache.used_nbytes()
    padding_of_full_heads = sum(PADDING) * int(MIXED.sum()) * 2 * 16 * 4
    assert batch.used_nbytes() == used + padding_of_full_heads


def test_bytes_are_the_formula_counted_by_hand(realloc_model) -> None:
    """6 full and 6 compressible heads, entries of 2 x 16 floats.

    Rows with 14, 11, 3 and 1 tokens of prompt.
    """
    entry, tokens = 2 * 16 * 4, sum(CALLS)
    cache = HeadReallocationCache(MIXED, SINK, WINDOW, reserve=tokens, protect_prompt=True)
    cached_logits(realloc_model, draw_ids(4, tokens), cache, CALLS, real_tokens(PADDING, tokens))
    assert cache.nbytes() == entry * 4 * (6 * tokens + 6 * (14 + WINDOW))
    assert cache.used_nbytes() == entry * (6 * 4 * tokens + 6 * (14 + 11 + 3 + 3 + 4 * WINDOW))
    cache.batch_select_indices(torch.tensor([3, 1]))
    assert cache.nbytes() == entry * 2 * (6 * tokens + 6 * (11 + WINDOW))


@pytest.mark.parametrize("lengths", [(20, 44), (4, 31), (30, 30), (2, 6), (1, 26)])
def test_computed_bytes_are_those_of_a_cache(lengths: tuple[int, int]) -> None:
    model = make_tiny_model("qwen3")
    model.set_attn_implementation(IMPLEMENTATION)
    settings = CacheSettings(SINK, WINDOW, protect_prompt=True)
    held, full = kv_nbytes(
        settings, MIXED, EntrySize.of(model), *(torch.tensor([n]) for n in lengths)
    )
    cache = new_cache()
    cached_logits(
        model, draw_ids(1, lengths[1]), cache, [lengths[0], *[1] * (lengths[1] - lengths[0])]
    )
    assert (int(held), int(full)) == (cache.used_nbytes(), cache.full_nbytes())


@pytest.mark.parametrize("order", [[2, 0, 0, 1], [1, 2], [2]])
def test_reordered_rows_go_on_as_if_they_had_been_there(realloc_model, order: list[int]) -> None:
    ids, real = draw_ids(3, 26), real_tokens([0, 4, 9], 26)
    cache, moved = new_cache(), new_cache()
    cached_logits(realloc_model, ids[:, :12], cache, [10, 1, 1], real)
    cache.reorder_cache(torch.tensor(order))
    cached_logits(realloc_model, ids[order][:, :12], moved, [10, 1, 1], real[order])
    assert cache.nbytes() == moved.nbytes()
    logits = [
        cached_logits(
            realloc_model, ids[order], each, [1] * (ids.shape[1] - 12), real[order], begin=12
        )
        for each in (cache, moved)
    ]
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE
    assert cache.used_nbytes() == moved.used_nbytes()


@pytest.mark.parametrize("prompts", [(6, 12), (12, 6)])
def test_rows_that_join_keep_their_own_prompts(realloc_model, prompts: tuple[int, int]) -> None:
    """Two rows of one text length but other prompts: no padding, and other numbers of sinks."""
    ids = draw_ids(2, 34)
    caches = [new_cache(), new_cache()]
    for row, (cache, prompt) in enumerate(zip(caches, prompts, strict=True)):
        cached_logits(realloc_model, ids[row : row + 1, :18], cache, [prompt, *[1] * (18 - prompt)])
    caches[0].join(caches[1], 18)
    assert caches[0].held(1).sum() == MIXED.sum() * 18 + (~MIXED).sum() * (prompts[1] + WINDOW)
    joined = cached_logits(
        realloc_model, ids, caches[0], [1] * 16, torch.ones(2, 34, dtype=torch.bool), begin=18
    )
    for row, prompt in enumerate(prompts):
        calls = [prompt, *[1] * (34 - prompt)]
        want = cached_logits(realloc_model, ids[row : row + 1], new_cache(), calls)
        assert (joined[row] - want[0, 18:]).abs().max() < TOLERANCE


def test_beams_equal_beams_of_a_cache_without_compressible_heads_left(realloc_model) -> None:
    """Windows as long as the text: beams move between rows of different prompts without losing
    anything.
    """
    ids, mask = draw_ids(2, 9), real_tokens([0, 3], 9).long()
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    everything = HeadReallocationCache(torch.ones_like(MIXED))
    stock = realloc_model.generate(ids, past_key_values=everything, **settings)
    wide = HeadReallocationCache(MIXED, 1, 12, protect_prompt=True)
    assert torch.equal(realloc_model.generate(ids, past_key_values=wide, **settings), stock)


def test_reset_forgets_the_prompt(realloc_model) -> None:
    cache = new_cache()
    cached_logits(realloc_model, draw_ids(2, 20, seed=5), cache, [16, 1, 1, 1, 1])
    cache.reset()
    calls = [9] + [1] * 12
    again = cached_logits(realloc_model, draw_ids(2, 21), cache, calls)
    fresh = new_cache()
    assert torch.equal(again, cached_logits(realloc_model, draw_ids(2, 21), fresh, calls))
    assert cache.used_nbytes() == fresh.used_nbytes()


def test_fill_keeps_the_whole_prompt() -> None:
    cache = new_cache()
    cache.fill(torch.randn(2, 4, 40, 16), torch.randn(2, 4, 40, 16))
    assert cache.held(0)[~MIXED].all()


def test_a_setting_that_is_not_a_truth_value_is_refused() -> None:
    with pytest.raises(ValueError, match="protect_prompt is 'yes'"):
        CacheSettings(protect_prompt="yes")  # type: ignore[arg-type]
