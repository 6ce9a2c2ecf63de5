"""One builder of small models: random decoders of several families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload, dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.models.loading import load_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3")  # what every equality is tested with
MODEL_TYPES = {"gemma3": "gemma3_text"}  # where they are not the family's name
_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 1.0},
    "gpt_oss": {"num_local_experts": 4, "experts_implementation": "eager"},
    "gemma3": {"query_pre_attn_scalar": 32},
    "granitemoehybrid": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        **{"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 16},
    },
    "mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
    "qwen3_moe": {
        "experts_implementation": "eager",
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
    "qwen3_next": {
        "experts_implementation": "eager",
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "shared_expert_intermediate_size": 32,
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    # the default, 1, makes logits so large that rounding shows
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}
SOFTMAXES = ("gemma2", "gpt_oss")  # with soft-capped logits, and with learned sinks

# options of rlkv-bench for a model of toy size
TOY_LLAMA: dict[str, Any] = {"layers": 2, "hidden": 32, "intermediate": 85, "query_heads": 4}
TOY_LLAMA |= {"kv_heads": 2, "head_dim": 8, "vocabulary": 32}


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Load the tokenizer of the built-in tiny model."""
    return load_tokenizer("tiny")


def make_tiny_model(family: str, noise: float = 0.1, **overrides: Any) -> PreTrainedModel:
    """Make a random decoder in eval mode: 3 layers, 8 query heads, 4 KV heads of 16, 128 tokens."""
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings |= _OWN_SETTINGS.get(family, {}) | overrides
    if family in SOFTMAXES:  # transformers' "sdpa" computes neither
        full = {"sliding_window": 8, "layer_types": ["full_attention"] * 3}
        settings |= {"attn_implementation": "eager"} | full | overrides
    torch.manual_seed(0)
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # the default initialisation is so small that attention would be uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def dispatched(model: PreTrainedModel, folder: Path | None = None) -> PreTrainedModel:
    """Return a copy as ``device_map="auto"`` makes it; with ``folder`` its weights lie there."""
    model = copy.deepcopy(model)
    if folder is None:
        return dispatch_model(model, {"": "cpu"}, force_hooks=True)
    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
