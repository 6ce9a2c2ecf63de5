"""What the cache cannot do, it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.accounting import KVSizes
from rlkv.eviction import TOVA
from tests.helpers.cached_logits import MIXED
from tests.helpers.families import make_family
from tests.helpers.models import make_tiny_model

IDS = torch.arange(3, 13).view(2, 5)
FULL_MASK = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("llama", attn_implementation=IMPLEMENTATION)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": -1}, "sink is -1"),
        ({"window": 0}, "window is 0"),
        ({"prefill": "none"}, "unknown prefill 'none'"),
        ({"eviction": "rkv"}, "eviction is 'rkv'"),
        ({"protect_prompt": "yes"}, "protect_prompt is 'yes'"),
        ({"evict_from": "all"}, "unknown evict_from 'all'"),
        ({"evict_from": "full"}, "evict_from='full' .* there is none"),
        ({"full": torch.ones(4, dtype=torch.bool)}, r"^full .*torch\.bool \[4\]"),
        ({"full": torch.ones(3, 4)}, r"^full .*torch\.float32"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadReallocationCache(**{"full": MIXED, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": HeadReallocationCache(MIXED[:, :2])}, r"2 KV heads.*4"),
        ({"past_key_values": DynamicCache()}, "HeadReallocationCache"),
        ({"use_cache": False}, "HeadReallocationCache"),
        ({"attention_mask": FULL_MASK}, "2D attention_mask"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1] * 5])}, "padding_side"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1] * 5])}, "padding_side"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1, 1], [1] * 5])}, "padding_side"),
    ],
)
def test_first_calls(model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    if "use_cache" not in arguments:
        arguments = {"past_key_values": HeadReallocationCache(MIXED), **arguments}
    with pytest.raises(ValueError, match=message):
        model(IDS, **arguments)


@pytest.mark.parametrize("first", [None, torch.tensor([[0, 1, 1, 1, 1], [1] * 5])])
def test_later_calls(model: PreTrainedModel, first: torch.Tensor | None) -> None:
    cache = HeadReallocationCache(MIXED)
    model(IDS, attention_mask=first, past_key_values=cache)
    changed = torch.ones(2, 6) if first is not None else torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)
    for rows, mask, message in (
        (2, changed, "padding_side"),
        (2, torch.ones(2, 2), r"attention_mask.*2.*6"),
        (1, None, r"2 rows.*1"),
        (1, torch.ones(1, 6), r"2 rows.*1"),
    ):
        with pytest.raises(ValueError, match=message):
            model(IDS[:rows, :1], attention_mask=mask, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="does not offload"):
        cache.layers[0].offload()


def test_a_call_after_one_that_ended_in_an_error(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED)
    model(IDS, past_key_values=cache)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, :1], past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"layer 1 holds 5 .* 6: start a new cache"):
        model(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("policy", [None, TOVA(budget=6)])
def test_a_call_that_ended_in_the_first_layer(model: PreTrainedModel, policy: Any) -> None:
    """All layers hold 5 tokens still, but an eviction was counted, or a window moved."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    cache = HeadReallocationCache(MIXED, eviction=policy)
    model(IDS, past_key_values=cache)
    store = cache.layers[0].stores[-1]
    stock = store.attend
    for _ in range(2):
        store.attend = fail
        with pytest.raises(KeyboardInterrupt):
            model(IDS, past_key_values=cache)
        store.attend = stock
        with pytest.raises(ValueError, match="left some of its tokens in it: start a new cache"):
            model(IDS[:, :1], past_key_values=cache)
        cache.reset()
        model(IDS, past_key_values=cache)


def test_training_with_dropout() -> None:
    own = {"attn_implementation": IMPLEMENTATION, "attention_dropout": 0.5}
    model = make_tiny_model("llama", **own).train()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        model(IDS, past_key_values=HeadReallocationCache(MIXED))


def test_a_model_with_a_sliding_window() -> None:
    own = {"attn_implementation": IMPLEMENTATION, "layer_types": ["sliding_attention"] * 3}
    model = make_tiny_model("mistral", sliding_window=4, **own)
    with pytest.raises(ValueError, match="sliding"):
        model(IDS, past_key_values=HeadReallocationCache(MIXED))


@pytest.mark.parametrize(
    ("family", "sentence"),
    [("minimax", "a cache class of its own"), ("deepseek_v4", "which rlkv does not know")],
)
def test_models_whose_bytes_are_not_known(family: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KVSizes.of(make_family(family))


def test_what_an_eviction_policy_makes_impossible(model: PreTrainedModel) -> None:
    cache = HeadReallocationCache(MIXED, eviction=TOVA(budget=4))
    with pytest.raises(ValueError, match="no queries"):
        cache.fill(torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16))
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="record=True"):
        cache.held(0)
