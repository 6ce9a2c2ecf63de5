"""The built-in language model under compression equals its references, as the small random models
do.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlkv
import rlkv.smol
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from tests.helpers.cached_logits import cached_logits
from tests.helpers.mixed_reference import reference_logits
from tests.helpers.smol import needs_smol

pytestmark = needs_smol

SINK, WINDOW, STEPS = 4, 16, 12
TOLERANCE = 2e-3  # float32 logits up to 40 through 30 layers


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return rlkv.smol.load(dtype="float32")


@pytest.fixture(scope="module")
def prompts(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> list[str]:
    return [
        render_prompt(loaded[1], row["problem"], "plain")
        for row in rlkv.smol.problems(3, seed=5, max_steps=5)
    ]


def full_heads(model: PreTrainedModel, sparsity: float) -> torch.Tensor:
    """Bool ``[30, 3]``, drawn."""
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    order = torch.rand(shape, generator=torch.Generator().manual_seed(2)).flatten().argsort()
    full = torch.ones(len(order), dtype=torch.bool)
    full[order[: round(sparsity * len(order))]] = False
    return full.view(shape)


def test_nothing_compressed_generates_the_stock_tokens(loaded, prompts: list[str]) -> None:
    model, tokenizer = loaded
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    lengths = batch.attention_mask.sum(-1)
    assert len(set(lengths.tolist())) > 1
    options = {"max_new_tokens": 4 * STEPS, "do_sample": False}
    want = model.generate(**batch, **options)
    with rlkv.compress(model, HeadAllocation(full_heads(model, 0.0)), sink=SINK, window=WINDOW):
        got = model.generate(**batch, **options)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_cached_decoding_equals_explicit_masks(loaded, prompts: list[str], sparsity: float) -> None:
    """A left-padded batch, its rows alone, and one masked forward over the same tokens.

    Bytes as counted by hand.
    """
    model, tokenizer = loaded
    full = full_heads(model, sparsity)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    width = batch.input_ids.shape[1]
    drawn = torch.randint(
        100, 40_000, (len(prompts), STEPS), generator=torch.Generator().manual_seed(3)
    )
    ids = torch.cat([batch.input_ids, drawn], dim=1)
    real = torch.cat([batch.attention_mask.bool(), torch.ones_like(drawn, dtype=torch.bool)], dim=1)
    starts = torch.cat([torch.zeros(width, dtype=torch.long), torch.arange(width, width + STEPS)])
    want = reference_logits(model, ids, full, SINK, WINDOW, starts, real)[:, -STEPS:]
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        calls = [width] + [1] * STEPS
        batched = cached_logits(model, ids, HeadReallocationCache(full, SINK, WINDOW), calls, real)[
            :, -STEPS:
        ]
        assert (batched - want).abs().max() < TOLERANCE
        for row, length in enumerate(batch.attention_mask.sum(-1).tolist()):
            cache = HeadReallocationCache(full, SINK, WINDOW)
            own = ids[row : row + 1, width - length :]
            single = cached_logits(model, own, cache, [length] + [1] * STEPS)[0, -STEPS:]
            assert (batched[row] - single).abs().max() < TOLERANCE
            kept = int(full.sum()) * (length + STEPS) + int((~full).sum()) * (SINK + WINDOW)
            assert cache.used_nbytes() == kept * 2 * 64 * 4  # keys and values of 64 floats
    finally:
        model.set_attn_implementation("sdpa")
