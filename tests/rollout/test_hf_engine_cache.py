"""The cache that HFEngine decodes with: its own only where there is no other one, and the same
tokens as without it.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

import rlkv
from rlkv.attention.head_gate import HeadGateConfig, gate_parameters
from rlkv.cache import HeadReallocationCache
from rlkv.cache.reallocation import GrowingLayer
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from tests.helpers.models import build_tokenizer, make_tiny_model

VOCAB = 340  # covers the tiny tokenizer
PROMPTS = ["a=7 . b=2 .", "a=7 .", "c = b + a . d = c * b . find d ?", "b=2 . c = b + a ."]
LENGTH = 60


def stock_tokens(model: Any) -> list[list[int]]:
    """One prompt after the other through ``generate`` with transformers' own cache."""
    tokenizer = build_tokenizer()
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                max_new_tokens=LENGTH,
                do_sample=False,
                eos_token_id=2,
                pad_token_id=0,
            )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def engine_tokens(model: Any) -> list[list[int]]:
    completions = HFEngine(model, build_tokenizer()).generate(PROMPTS, SamplingParams(LENGTH))
    assert len({tuple(c.token_ids) for c in completions}) > 1, (
        "all completions alike: the test would prove nothing"
    )
    return [c.token_ids for c in completions]


def watch_caches(model: PreTrainedModel) -> list[Any]:
    """The caches that the model is called with from now on, each once."""
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not any(cache is kwargs["past_key_values"] for cache in seen):
            seen.append(kwargs["past_key_values"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def test_same_tokens_as_with_the_stock_cache(family: str) -> None:
    model = make_tiny_model(family, vocab_size=VOCAB)
    expected = stock_tokens(model)
    caches = watch_caches(model)
    assert engine_tokens(model) == expected
    (cache,) = caches
    assert {type(layer) for layer in cache.layers} == {GrowingLayer}


def test_same_tokens_with_gates_attached(family: str) -> None:
    model = make_tiny_model(family, vocab_size=VOCAB)
    gated = get_peft_model(model, HeadGateConfig(sink=2, window=5)).eval()
    with torch.no_grad():
        for number, (_, gate) in enumerate(gate_parameters(gated)):
            gate.copy_(torch.linspace(0, 1, len(gate)).roll(number))
    expected = stock_tokens(gated)
    with gated.disable_adapter():
        assert stock_tokens(gated) != expected, (
            "the gates change nothing: the test would prove nothing"
        )
    caches = watch_caches(model)
    assert engine_tokens(gated) == expected
    assert {type(layer) for layer in caches[0].layers} == {GrowingLayer}


def test_the_compressed_cache_is_used_where_there_is_one(family: str) -> None:
    model = make_tiny_model(family, vocab_size=VOCAB)
    full = torch.zeros(3, 4, dtype=torch.bool)
    full[1] = True
    plain = engine_tokens(model)
    with rlkv.compress(model, rlkv.HeadAllocation(full), sink=2, window=5) as session:
        expected = stock_tokens(model)
        assert engine_tokens(model) == expected
        assert type(session.cache) is HeadReallocationCache
        assert session.cache.nbytes() < session.cache.full_nbytes()
    assert expected != plain
    assert engine_tokens(model) == plain


def test_models_with_sliding_windows_keep_their_own_cache() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MistralConfig(vocab_size=VOCAB, num_key_value_heads=2, sliding_window=8, **sizes)
    model = MistralForCausalLM(config).eval()
    expected = stock_tokens(model)
    caches = watch_caches(model)
    assert engine_tokens(model) == expected
    assert type(caches[0]) is DynamicCache


def test_a_model_saved_without_a_cache_decodes_with_one() -> None:
    model = make_tiny_model("llama", vocab_size=VOCAB)
    expected = stock_tokens(model)
    model.generation_config.use_cache = model.config.use_cache = (
        False  # as training with checkpointing leaves it
    )
    assert engine_tokens(model) == expected
