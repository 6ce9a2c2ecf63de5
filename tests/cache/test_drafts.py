"""Drafts of many positions in one pass against the definition: one step over the full cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlkv import tiny
from rlkv.attention import LocalSizes
from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.cache.drafts import draft_cache, drafting
from rlkv.evaluation.acceptance import next_logits
from rlkv.models.layout import Layout
from rlkv.models.loading import cache_argument
from tests.helpers.families import make_family
from tests.helpers.models import make_tiny_model

TOLERANCE = 1e-4
LENGTH = 40
START = 12  # the last token of the prompt comes before it
SIZES = LocalSizes(3, 6)
# all kinds of layers, soft-capped logits, learned sinks, experts
FAMILIES = ("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "olmo3", "phi3", "qwen3_moe")


def some_full(model: PreTrainedModel) -> Tensor:
    layout = Layout.from_config(model.config)
    full = torch.rand(len(layout.layers), max(layout.heads), generator=torch.manual_seed(5)) < 0.4
    assert full.any()
    assert not full.all()
    return full


def draw_ids(model: PreTrainedModel) -> Tensor:
    size = model.config.get_text_config().vocab_size
    return torch.randint(3, size, (1, LENGTH), generator=torch.manual_seed(3))


@torch.no_grad()
def step_by_step(
    model: PreTrainedModel, ids: Tensor, full: Tensor, sizes: LocalSizes
) -> tuple[Tensor, Tensor]:
    """Return logits ``[T, V]`` of the full model, and of one gated step over each of its caches."""
    gated: Any = get_peft_model(model, HeadGateConfig(sink=sizes.sink, window=sizes.window)).eval()
    set_gates(gated, full.float())
    name = cache_argument()
    cache = DynamicCache(config=model.config)
    chosen = []
    drafted = []
    with gated.disable_adapter():
        gated(input_ids=ids[:, :START], **{name: cache})
    for place in range(START, LENGTH):
        token = ids[:, place : place + 1]
        drafted.append(gated(input_ids=token, **{name: copy.deepcopy(cache)}).logits[0])
        with gated.disable_adapter():
            chosen.append(gated(input_ids=token, **{name: cache}).logits[0])
    gated.unload()
    return torch.cat(chosen), torch.cat(drafted)


@torch.no_grad()
def two_streams(
    model: PreTrainedModel, ids: Tensor, full: Tensor, sizes: LocalSizes, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the same from one pass over the text, and one of drafts."""
    heads = Layout.from_config(model.config).heads
    verified = DynamicCache()
    chosen = []
    drafted = []
    with drafting(model):
        next_logits(model, ids[:, :START], verified)
        for start in range(START, LENGTH, chunk):
            part = ids[:, start : start + chunk]
            chosen.append(next_logits(model, part, verified)[0])
            cache = draft_cache(verified, start, full, heads, sizes)
            drafted.append(next_logits(model, part, cache)[0])
    return torch.cat(chosen), torch.cat(drafted)


def check(model: PreTrainedModel, full: Tensor, sizes: LocalSizes, chunk: int) -> None:
    ids = draw_ids(model)
    expected = step_by_step(model, ids, full, sizes)
    found = two_streams(model, ids, full, sizes, chunk)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=TOLERANCE, rtol=0)
        assert ours.argmax(-1).equal(plain.argmax(-1))


@pytest.mark.parametrize("chunk", [1, 9, LENGTH])
@pytest.mark.parametrize("sizes", [SIZES, LocalSizes(0, 1), LocalSizes(15, 4)], ids=str)
def test_one_pass_is_step_by_step(sizes: LocalSizes, chunk: int) -> None:
    model, _ = tiny.load()
    check(model, some_full(model), sizes, chunk)
    check(model, torch.zeros_like(some_full(model)), sizes, chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_other_families(family: str) -> None:
    model = make_family(family)
    check(model, some_full(model), SIZES, 16)


def test_the_full_cache_stays_as_it_is() -> None:
    model = make_tiny_model("qwen2")
    before = model.config._attn_implementation
    ids = draw_ids(model)
    full = some_full(model)
    first = two_streams(model, ids, torch.ones_like(full), SIZES, 16)
    torch.testing.assert_close(*first, atol=1e-5, rtol=0)  # all heads full: the same text twice
    chosen, drafted = two_streams(model, ids, full, SIZES, 16)
    torch.testing.assert_close(chosen, first[0], atol=0, rtol=0)
    assert not drafted.allclose(chosen, atol=1e-2)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 16, dtype=torch.bool)}, "no packed sequences"),
        ({"output_attentions": True}, "leave output_attentions out"),
    ],
)
def test_what_a_draft_would_ignore_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = make_tiny_model("llama")
    ids = draw_ids(model)
    heads = Layout.from_config(model.config).heads
    with torch.no_grad(), drafting(model):
        verified = DynamicCache()
        next_logits(model, ids[:, :16], verified)
        cache = draft_cache(verified, START, some_full(model), heads, SIZES)
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids[:, START:16], **{cache_argument(): cache}, **arguments)
