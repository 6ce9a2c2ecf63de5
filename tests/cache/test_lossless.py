"""The cache of speculation: what drafts read, and that rows take tokens back each for itself."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.lossless import LosslessCache
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.models import make_tiny_model

PADDING = (0, 3, 8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("qwen3", attn_implementation=IMPLEMENTATION)


@torch.no_grad()
def read(model: PreTrainedModel, cache: LosslessCache, ids: torch.Tensor, first: list[int]):
    """Logits of tokens ``ids`` in the columns of each row from ``first`` on."""
    cache.set_lengths(torch.tensor(first))
    columns = torch.tensor(first)[:, None] + torch.arange(ids.shape[1])
    position_ids = columns - torch.tensor(PADDING)[:, None]
    return model(ids, position_ids=position_ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("length", [10, 24])  # some rows are shorter than sinks and window, or none
def test_drafts_read_what_the_small_cache_keeps(model: PreTrainedModel, length: int) -> None:
    ids = draw_ids(3, length)
    real = real_tokens(PADDING, length)
    small = HeadReallocationCache(MIXED, 2, 5)
    expected = cached_logits(model, ids, small, [length - 1, 1], real)[:, -1:]
    cache = LosslessCache(MIXED, 2, 5)
    cached_logits(model, ids[:, :-1], cache, [length - 1], real[:, :-1])
    with cache.drafting():
        found = read(model, cache, ids[:, -1:], [length - 1] * 3)
    assert (found - expected).abs().max() < TOLERANCE
    in_full = read(model, cache, ids[:, -1:], [length - 1] * 3)
    if length == 24:
        assert (found - in_full).abs().max() > 100 * TOLERANCE


def test_a_protected_prompt_is_read_like_sinks(model: PreTrainedModel) -> None:
    ids = draw_ids(3, 24)
    drafts = []
    for sink, protect_prompt in ((2, True), (10, False), (2, False)):
        cache = LosslessCache(MIXED, sink, 5, protect_prompt=protect_prompt)
        cached_logits(model, ids[:, :-1], cache, [10, 13])  # 13 tokens leave the window behind it
        with cache.drafting():
            drafts.append(read(model, cache, ids[:, -1:], [23] * 3))
    protected, as_sinks, without = drafts
    assert (protected - as_sinks).abs().max() < TOLERANCE
    assert (protected - without).abs().max() > 100 * TOLERANCE


def test_drafts_of_rows_whose_lengths_differ(model: PreTrainedModel) -> None:
    ids = draw_ids(3, 24)
    cache = LosslessCache(MIXED, 2, 5)
    cached_logits(model, ids[:, :17], cache, [17], real_tokens(PADDING, 17))
    first = [13, 17, 12]
    with cache.drafting():
        for step in range(3):
            at = [start + step for start in first]
            token = ids.gather(1, torch.tensor(at)[:, None])
            found = read(model, cache, token, at)
            for row, column in enumerate(at):
                alone = HeadReallocationCache(MIXED, 2, 5)
                own = ids[row : row + 1, PADDING[row] : column + 1]
                # what is read at once before the drafts is read in full
                calls = [first[row] - PADDING[row], *[1] * (step + 1)]
                expected = cached_logits(model, own, alone, calls)[0, -1]
                assert (found[row, 0] - expected).abs().max() < TOLERANCE


def test_rows_go_on_from_lengths_of_their_own(model: PreTrainedModel) -> None:
    ids = draw_ids(3, 24)
    cache = LosslessCache(MIXED, 2, 5)
    expected = cached_logits(
        model, ids, HeadReallocationCache(torch.ones_like(MIXED)), [24], real_tokens(PADDING, 24)
    )
    cached_logits(model, ids[:, :12], cache, [12], real_tokens(PADDING, 12))
    read(model, cache, ids[:, 12:17], [12] * 3)
    first = [13, 17, 12]
    wrong = draw_ids(3, 3, seed=2)
    with cache.drafting():
        for step in range(3):
            read(model, cache, wrong[:, step : step + 1], [start + step for start in first])
    for _ in range(2):  # twice over what was read: nothing of before is left
        spans = [ids[row, start : start + 4] for row, start in enumerate(first)]
        logits = read(model, cache, torch.stack(spans), first)
        for row, start in enumerate(first):
            assert (logits[row] - expected[row, start : start + 4]).abs().max() < TOLERANCE
        first = [start + 3 for start in first]


def test_it_holds_the_full_cache(model: PreTrainedModel) -> None:
    cache = LosslessCache(MIXED, 2, 5)
    cached_logits(model, draw_ids(2, 30), cache, [30])
    assert cache.used_nbytes() == cache.full_nbytes()
