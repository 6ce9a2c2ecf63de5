"""Families of models: each works exactly, or is refused in one sentence before any text is read."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import rlkv
from rlkv import HeadAllocation
from rlkv.attention.head_gate import HeadGateConfig, gates_matrix, set_gates
from rlkv.eviction import RKV
from rlkv.models.shape import ModelShape
from tests.helpers.families import make_family
from tests.helpers.models import make_tiny_model

peft = pytest.importorskip("peft")
IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
WORKS = None
LATENT = "multi-head latent attention.*8 numbers"
TOUCHED = "attention modules of this model compute with the keys and values that the cache returns"
OWN_CODE = "computes attention in its own code"
NO_GROUPS = "no layer with full attention over grouped heads"
# what compress(...) and what gates say; WORKS: they compute what the model does
FAMILIES: dict[str, tuple[str | None, str | None]] = {
    "bloom": ("does not let its attention implementation be set", OWN_CODE),
    "deepseek_v3": (LATENT, LATENT),
    "diffllama": (TOUCHED, WORKS),
    "doge": (TOUCHED, "compute with the attention mask"),
    "exaone4": (WORKS, WORKS),
    "gemma2": ("softcap", "softcap"),
    "gemma3_text": (WORKS, WORKS),
    # transformers 5.23 says in the cache which layers share those of others
    "gemma3n_text": (f"{TOUCHED}|cached as DummyLayer", WORKS),
    "glm4_moe_lite": (LATENT, LATENT),
    "gpt2": (WORKS, NO_GROUPS),
    "gpt_neox": (WORKS, NO_GROUPS),
    "gpt_oss": ("s_aux", "s_aux"),
    "jetmoe": (TOUCHED, "4 KV heads, but gates for 2"),
    "llama4_text": ("chunked_attention", WORKS),
    "mamba": ("linear_attention", "only layers of kind linear_attention"),
    "mimo_v2_flash": ("s_aux", "s_aux"),
    "minicpm3": (LATENT, LATENT),
    "minimax": ("linear_attention", WORKS),
    "opt": (WORKS, NO_GROUPS),
    "qwen3_next": ("linear_attention", WORKS),
    "rwkv": ("no attention heads", OWN_CODE),
}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_compress(family: str) -> None:
    model = make_family(family)
    refusal = FAMILIES[family][0]
    before = model.config._attn_implementation
    if refusal is not WORKS:
        entered = False
        allocation = HeadAllocation(torch.ones(_heads(model)) > 0)
        with pytest.raises(ValueError, match=refusal) as raised, rlkv.compress(model, allocation):
            entered = True
        assert not entered
        assert "\n" not in str(raised.value)
        assert model.config._attn_implementation == before
        return
    expected = logits(model)
    text = model.generate(IDS, **GREEDY)
    for full, sizes in ((True, {}), (False, {"sink": 0, "window": 64})):
        allocation = HeadAllocation(torch.full(_heads(model), full))
        with rlkv.compress(model, allocation, prefill="local", **sizes):
            assert largest(logits(model) - expected) < 1e-4
            assert torch.equal(model.generate(IDS, **GREEDY), text)
    none_full = HeadAllocation(torch.zeros(_heads(model)) > 0)
    with rlkv.compress(model, none_full, sink=1, window=2, prefill="local"):
        assert largest(logits(model) - expected) > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_gates(family: str) -> None:
    model = make_family(family)
    refusal = FAMILIES[family][1]
    before = model.config._attn_implementation
    config = HeadGateConfig(sink=1, window=2)
    if refusal is not WORKS:
        with pytest.raises(ValueError, match=refusal) as raised:
            peft.get_peft_model(model, config)
        assert "\n" not in str(raised.value)
        assert model.config._attn_implementation == before
        assert not any("rlkv" in name for name, _ in model.named_parameters())
        return
    expected = logits(model)
    gated = peft.get_peft_model(model, config)
    assert largest(logits(gated) - expected) < 1e-4
    set_gates(gated, torch.zeros_like(gates_matrix(gated)))
    assert largest(logits(gated) - expected) > 1e-4


def _heads(model: Any) -> tuple[int, int]:
    if not hasattr(model.config, "num_attention_heads"):
        return (2, 2)
    shape = ModelShape.from_config(model.config)
    return (shape.num_layers, shape.num_kv_heads)


ALL_FULL = HeadAllocation(torch.ones(3, 4) > 0)


def test_weights_of_attention_are_refused() -> None:
    model = make_tiny_model("llama")
    asked = {"output_attentions": True}
    with rlkv.compress(model, ALL_FULL):
        with pytest.raises(ValueError, match="output_attent"):
            model(IDS, **asked)
        with pytest.raises(ValueError, match="output_attent"):
            model.generate(IDS, **GREEDY, **asked, return_dict_in_generate=True)
    eager = make_tiny_model("llama", attn_implementation="eager")
    eager.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attent"), rlkv.compress(eager, ALL_FULL):
        pass
    with pytest.raises(ValueError, match="output_attent"):
        peft.get_peft_model(eager, HeadGateConfig())
    gated = peft.get_peft_model(model, HeadGateConfig())
    with pytest.raises(ValueError, match="output_attent"):
        gated(IDS, **asked)


def test_packed_texts_and_models_without_a_head_are_refused() -> None:
    model = make_tiny_model("llama")
    packed = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
    positions = torch.arange(20).expand(2, -1)
    expected = model(IDS).logits
    with rlkv.compress(model, ALL_FULL):
        assert largest(model(IDS, position_ids=positions).logits - expected) < 1e-5
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="start again"):
                model(IDS, position_ids=packed, use_cache=use_cache)
    with (
        pytest.raises(ValueError, match="AutoModelForCausalLM"),
        rlkv.compress(model.base_model, ALL_FULL),
    ):
        pass


@pytest.mark.parametrize(
    ("family", "eviction"),
    [("llama", None), ("gemma3_text", RKV(budget=6, buffer=2, observation=2))],
)
def test_copies_of_a_cache_branch_the_text_and_do_not_hold_the_model(
    family: str, eviction: Any
) -> None:
    model = make_tiny_model(family) if family == "llama" else make_family(family)
    none_full = HeadAllocation(torch.zeros(_heads(model)) > 0)
    with rlkv.compress(model, none_full, eviction=eviction) as session:
        first = model.generate(IDS, **GREEDY)
        cache = session.cache
        file = io.BytesIO()
        torch.save(cache, file)
        assert file.tell() < 500_000
        file.seek(0)
        branches = [torch.load(file, weights_only=False), copy.deepcopy(cache)]
        turn = {**GREEDY, "attention_mask": torch.ones(2, first.shape[1] + 20)}
        states = cache.used_nbytes()
        other = torch.cat([first, IDS + 1], dim=1)
        model.generate(other, past_key_values=copy.deepcopy(cache), **turn)
        assert cache.used_nbytes() == states  # not touched by the other branch
        more = torch.cat([first, IDS], dim=1)
        text = model.generate(more, past_key_values=cache, **turn)
        for branch in branches:
            assert torch.equal(model.generate(more, past_key_values=branch, **turn), text)


def test_a_model_is_tried_once() -> None:
    model = make_tiny_model("llama")
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        with rlkv.compress(model, ALL_FULL):
            pass
    assert len(calls) == 1
