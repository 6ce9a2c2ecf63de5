"""What the cache cannot do, it refuses by name."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from tests.helpers.models import make_tiny_model

MIXED = torch.tensor([[True, False, True, False]] * 3)
IDS = torch.arange(3, 13).view(2, 5)


@pytest.fixture
def model() -> PreTrainedModel:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": -1}, "sink is -1"),
        ({"window": 0}, "window is 0"),
        ({"prefill": "none"}, "unknown prefill 'none'"),
        ({"reserve": -5}, "reserve is -5"),
    ],
)
def test_sizes_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadReallocationCache(MIXED, **arguments)


@pytest.mark.parametrize("full", [torch.ones(4, dtype=torch.bool), torch.ones(3, 4)])
def test_malformed_allocation(full: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^full .*torch\."):
        HeadReallocationCache(full)


def test_allocation_of_another_model(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"2 KV heads.*4"):
        model(IDS, past_key_values=HeadReallocationCache(torch.ones(3, 2, dtype=torch.bool)))


def test_crop(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED)
    model(IDS, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(-1)


def test_another_cache_or_none(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="HeadReallocationCache"):
        model(IDS, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="HeadReallocationCache"):
        model(IDS, use_cache=False)


def test_prepared_4d_mask(model: PreTrainedModel) -> None:
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="2D attention_mask"):
        model(IDS, attention_mask=mask, past_key_values=HeadReallocationCache(MIXED))


@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 1, 0, 1, 1]])
def test_padding_elsewhere_than_on_the_left(model: PreTrainedModel, mask: list[int]) -> None:
    with pytest.raises(ValueError, match="padding_side"):
        model(
            IDS,
            attention_mask=torch.tensor([mask, [1] * 5]),
            past_key_values=HeadReallocationCache(MIXED),
        )


def test_padding_that_changes_between_calls(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    model(IDS, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="padding_side"):
        model(IDS[:, :1], attention_mask=torch.ones(2, 6), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask.*2.*6"):
        model(IDS[:, :1], attention_mask=torch.ones(2, 2), past_key_values=cache)


def test_padding_after_an_unpadded_prompt(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED)
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="padding_side"):
        model(
            IDS[:, :1], attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2), past_key_values=cache
        )


def test_another_batch_size(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED)
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"2 rows.*1"):
        model(IDS[:1, :1], past_key_values=cache)


def test_training_with_dropout() -> None:
    model = make_tiny_model("llama", attention_dropout=0.5).train()
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        model(IDS, past_key_values=HeadReallocationCache(MIXED))


def test_a_model_with_a_sliding_window() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=4,
    )
    model = MistralForCausalLM(config).eval()
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match="sliding"):
        model(IDS, past_key_values=HeadReallocationCache(MIXED))
