"""Tiny random models of families that differ from Llama in their attention or their cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4}
_LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4}
_EXPERTS = dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4)
_EXPERTS |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_EXPERTS |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
_LINEAR |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_NO_GROUPS = {"num_key_value_heads": None}
_NO_HEADS = _NO_GROUPS | {"num_attention_heads": None}
_GPT = _NO_GROUPS | {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "n_inner": 48}
_GEMMA3N = {"layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 1}
_GEMMA3N |= {"intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0]}
_GEMMA3N |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
_LLAMA4 = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
_LLAMA4 |= {"moe_layers": [], "attention_chunk_size": 8, "intermediate_size_mlp": 48}
_MIMO = {"v_head_dim": 8, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "bloom": _NO_GROUPS | {"n_layer": 2, "n_head": 4},
    "deepseek_v3": _LATENT | _EXPERTS,
    "exaone4": _HYBRID,
    "gemma2": _HYBRID,
    "gemma3_text": _HYBRID,
    "gemma3n_text": _GEMMA3N,
    "glm4_moe_lite": _LATENT | _EXPERTS,
    "gpt2": _GPT,
    "gpt_neox": _NO_GROUPS,
    "gpt_oss": _HYBRID | _EXPERTS,
    "jetmoe": _EXPERTS | {"kv_channels": 8, "num_attention_heads": None},
    "llama4_text": _EXPERTS | _LLAMA4,
    "mamba": _NO_HEADS,
    "mimo_v2_flash": _EXPERTS | _HYBRID | _MIMO,
    "minicpm3": _LATENT,
    "minimax": _EXPERTS | _LINEAR,
    "opt": _NO_GROUPS | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "rwkv": _NO_HEADS,
    "qwen3_next": _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
}


def make_family(family: str) -> PreTrainedModel:
    """Make a random decoder in eval mode, all of its parameters away from their initial values."""
    settings = SIZES | OWN_SETTINGS.get(family, {})
    settings = {name: value for name, value in settings.items() if value is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().add_(torch.randn_like(parameter) * 0.1)
    return model
