"""Tiny random models of every family that transformers maps to a causal LM: one line each.

``kinds`` of a family says what its layers are, one letter a layer: full attention ``f``, sliding
``s``, chunked ``c``, linear ``l``, multi-head latent ``m``, attention and a linear layer next to
each other ``h``, keys and values of an earlier layer ``r``, no cache ``-``, another kind ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "models.md"
# what configs call their sizes; a family gets those that its own config has
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "embedding_size": 32,
}
_LAYERS = ("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
_LAYERS += ("num_decoder_layers", "num_encoder_layers", "num_hidden_layers")
_HEADS = ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_HEADS += ("num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads")
_WIDTHS = ("n_embd", "d_model", "emb_dim", "dim_model", "word_embed_proj_dim", "out_hidden_size")
_INNER = ("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner", "dff", "dim_ff")
_INNER += ("ffn_hidden_size", "intermediate_size_mlp", "block_ff_dim", "dense_intermediate_size")
_INNER += ("prefix_dense_intermediate_size", "mlp_intermediate_size")
_HEAD_SIZES = ("d_head", "rotary_dim", "attention_head_size", "dim_head", "attention_head_dim")
_HEAD_SIZES += ("swa_head_dim", "swa_v_head_dim", "v_head_dim", "index_head_dim", "kv_channels")
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size")
_WINDOWS += ("local_attention", "attention_window_size")
_RANKS = ("q_lora_rank", "kv_lora_rank", "o_lora_rank")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_latent_size")
_EXPERT_SIZES += ("shared_intermediate_size", "moe_shared_expert_intermediate_size")
_EXPERT_SIZES += ("expert_ffn_hidden_size",)
_ONE = ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups")
_ONE += ("n_groups", "num_dense_layers")
_TWO = ("linear_num_key_heads", "linear_num_value_heads", "linear_attn_num_heads", "n_mamba_heads")
_TWO += ("swa_num_key_value_heads", "index_n_heads", "linear_num_heads", "mamba_expand")
_LINEAR_SIZES = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")
_LINEAR_SIZES += ("mamba_d_state", "ssm_state_size", "state_size")
_POSITIONS = ("n_positions", "n_ctx", "max_seq_len", "vocab_size_per_layer_input")
SIZES |= dict.fromkeys(_LAYERS, 2) | dict.fromkeys(_HEADS, 4) | dict.fromkeys(_WIDTHS, 32)
SIZES |= dict.fromkeys(_INNER, 48) | dict.fromkeys(_HEAD_SIZES, 8) | dict.fromkeys(_WINDOWS, 8)
SIZES |= dict.fromkeys(_RANKS, 8) | dict.fromkeys(_EXPERTS, 4) | dict.fromkeys(_CHOSEN, 2)
SIZES |= dict.fromkeys(_EXPERT_SIZES, 16) | dict.fromkeys(_ONE, 1) | dict.fromkeys(_TWO, 2)
SIZES |= dict.fromkeys(_LINEAR_SIZES, 8) | dict.fromkeys(_POSITIONS, 64)
SIZES |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "index_topk": 4}
SIZES |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_num_heads": 4}
SIZES |= {"mamba_head_dim": 16, "mamba_dt_rank": 4, "mamba_chunk_size": 4, "chunk_size": 4}
SIZES |= {"conv_dim": 32, "block_dim": 32, "block_multiple_of": 8, "lru_width": 32}
SIZES |= {"attention_num_heads": 4, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
SIZES |= {"image_size": 8, "patch_size": 4, "global_head_dim": 16, "num_global_key_value_heads": 1}
# sizes that a config leaves open by default
_OPEN = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "v_head_dim"})


@dataclass(frozen=True)
class Family:
    """One line of the table.

    Attributes:
        kinds: of its layers; empty: full attention in all.
        settings: of the config, where the general sizes do not serve; None: as the config has it.
        model_type: as transformers names it, where the table has several lines for it.
        gates: what the refusal of gates says; empty: they work.
        serving: what ``rlkv.compress`` says; empty: it works.
    """

    kinds: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    gates: str = ""
    serving: str = ""


def _layers(*kinds: str) -> dict[str, Any]:
    names = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
    names |= {"c": "conv", "h": "hybrid"}
    types = [names[kind] for kind in kinds]
    return {"layer_types": types, "num_hidden_layers": len(types)}


_LATENT = {"num_key_value_heads": 4, "head_dim": 4}
_CHOOSING = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_THETA = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_REFORMER = {"attn_layers": ["local", "local"], "axial_pos_embds": False}
_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_GEMMA3N = {"num_kv_shared_layers": 2, "intermediate_size": [48] * 6, **_layers(*"sfsfsf")}
_GEMMA3N |= {"activation_sparsity_pattern": [0.0] * 6}
_GEMMA4 = {"num_kv_shared_layers": 2, **_layers(*"sfsfsf")}
# as in every checkpoint: it has layers of the numbers of the decoder's
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
_TOWER |= {"num_key_value_heads": 2, "num_hidden_layers": 8}
_GPT_NEO = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_QWEN4 |= {"indexer_compress_ratio": 4, "hc_lowrank": 8}

_NO_HEADS = "no attention heads"
_NO_FULL = "no layer with full attention"
_NOT_GROUPED = "no layer with full attention over grouped heads"
_OWN_CODE = "computes attention in its own code"
_NOT_SET = "does not let its attention"
_OWN_CACHE = "a cache class of its own"
_TOUCHED = "compute with the keys and values that the cache returns"
_LATENT_STATE = "multi-head latent attention.*8 numbers"
_SEVERAL = "attention modules of .* do not belong to one layer each"
_SPARSE = "layers of kind (qwen_sparse|indexed)_attention"
_COMPRESSED = "layers of kind compressed_sparse_attention, heavily_compressed_attention"


def _latent(kinds: str, **settings: Any) -> Family:
    return _refused(kinds, _LATENT_STATE, settings=_LATENT | settings)


def _refused(kinds: str, sentence: str, serving: str = "", **line: Any) -> Family:
    return Family(kinds, gates=sentence, serving=serving or sentence, **line)


FAMILIES: dict[str, Family] = {
    # linear layers between full ones
    "bamba": Family("lfl", {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "granitemoehybrid": Family("lfl", _layers(*"lfl")),
    "jamba": Family(
        "lfl", {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1}
    ),
    "kimi_linear": _latent("llllm", num_experts_per_tok=2, num_experts=4),
    "lfm2": Family("lfl", _layers(*"cfc")),
    "lfm2_moe": Family("lfl", _layers(*"cfc")),
    "minimax": Family("fl", serving=_OWN_CACHE),
    "nemotron_h": Family("l-f-"),
    "olmo_hybrid": Family("lllf"),
    "qwen3_5": Family("lllf"),
    "qwen3_5_moe": Family("lllf"),
    "qwen3_5_text": Family("lllf"),
    "qwen3_5_moe_text": Family("lllf"),
    "qwen3_next": Family("lllf"),
    "qwen4_exp": _refused("lllx", _SPARSE, settings={"text_config": _QWEN4}),
    "qwen4_exp_text": _refused("lllx", _SPARSE, settings=_QWEN4),
    # sliding windows and linear layers between full ones
    "lara_mini": Family("lslf"),
    "lfm3": Family("llfls"),
    # a linear layer next to attention
    "falcon_h1": Family("hh"),
    "inkling_text": _refused("sssssh", "position_bias"),
    "zamba": _refused("lhlh", _SEVERAL, settings=_ZAMBA),
    "zamba2": _refused("lhlh", _SEVERAL, settings=_ZAMBA | {"num_mem_blocks": 1}),
    "zaya": Family("hh", {"num_experts_per_tok": 1}),
    # sliding windows between full layers
    "afmoe": Family("sssf"),
    "beam": Family("sssssf"),
    "cohere2": Family("sssf"),
    "cohere2_moe": Family("sssf"),
    "cwm": Family("fs"),
    "exaone4": Family("sssf"),
    "exaone_moe": Family("sssf"),
    "flint": Family("fsf", _layers(*"fsf")),
    "gemma2": Family("sf", {"attn_logit_softcapping": 1.0}),
    "gemma3": Family("sssssf"),
    "gemma3_text": Family("sssssf"),
    "gemma3n_text": Family("sfsrrr", _GEMMA3N),
    "gemma4": Family("sssssf", {"vision_config": _TOWER}),
    "gemma4_text": Family("sssssf"),
    "gemma4_shared": Family("sfsrrr", _GEMMA4, "gemma4_text"),
    "gemma4_unified": Family("sssssf"),
    "gemma4_unified_text": Family("sssssf"),
    "gpt_oss": Family("sf"),
    "granite_swa": Family("fs"),
    "granitemoe_swa": Family("fs"),
    "kolibri1": Family("ssssf"),
    "laguna": Family("sf", _layers(*"sf")),
    "llama4": Family("cccf"),
    "llama4_text": Family("cccf"),
    "mellum": Family("sf", _layers(*"sf")),
    "mimo_v2_flash": Family("fs", {"v_head_dim": 4}),
    "ministral": Family("fsss", _layers(*"fsss")),
    "modernbert-decoder": Family("fs", gates=_NOT_GROUPED),
    "olmo3": Family("sssf"),
    "qwen2_sliding": Family("fs", _layers(*"fs") | {"use_sliding_window": True}, "qwen2"),
    "smollm3": Family("ffff", {"num_hidden_layers": 4}),
    "vaultgemma": Family("sf", {"attn_logit_softcapping": 1.0}),
    "mistral": Family("ff", {"sliding_window": None}),
    "mistral_sliding": _refused("ss", _NO_FULL, model_type="mistral"),
    # multi-head latent attention
    "axk1": _latent("mm"),
    "axk2": _latent("xx"),
    "deepseek_v2": _latent("mm", num_experts_per_tok=2),
    "deepseek_v3": _latent("mm"),
    "deepseek_v32": _latent("xx"),
    "deepseek_v4": _refused("xxx", _COMPRESSED),
    "glm4_moe_lite": _latent("mm"),
    "glm_moe_dsa": _latent("xx"),
    "hy_v4": _latent("xx"),
    "longcat_flash": _latent("mm"),
    "minicpm3": _latent("mm"),
    "youtu": _latent("mm"),
    # what else needs settings of its own
    "cohere_compass_text": Family("ff", {"rope_parameters": {"full_attention": _THETA}}),
    "dbrx": Family("ff", {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}),
    "dots1": Family("ff", _CHOOSING | {"n_routed_experts": 4, "n_shared_experts": 1}),
    "gpt_neo": _refused("fs", _OWN_CODE, _NOT_SET, settings=_GPT_NEO),
    "mamba2": _refused("ll", _NO_HEADS, settings={"num_heads": 4, "head_dim": 16}),
    "nemotron": Family("ff", {"num_key_value_heads": 2}),
    "recurrent_gemma": _refused("lls", _NO_FULL, settings={"num_hidden_layers": 3}),
    "reformer": _refused("xx", _OWN_CODE, _OWN_CACHE, settings=_REFORMER),
    "xlstm": _refused("ll", _NO_HEADS, settings={"hidden_size": 128, "chunk_size": 16}),
    "xmod": Family("ff", {"default_language": "en_XX"}, gates=_NOT_GROUPED),
    # attention of another form, or in other code
    "bloom": _refused("ff", _OWN_CODE, _NOT_SET),
    "diffllama": Family("ff", serving=_TOUCHED),
    "doge": _refused("ff", "compute with the attention mask", _TOUCHED),
    "falcon": _refused("ff", _OWN_CODE, _NOT_SET),
    "got_ocr2": _refused("ff", _NOT_SET),
    "gpt2": Family("ff", gates=_NOT_GROUPED),
    "gpt_bigcode": Family("ff", {"num_key_value_heads": 1}),
    "gpt_neox": Family("ff", gates=_NOT_GROUPED),
    "hrm_text": _refused("ff", _SEVERAL),
    "jetmoe": _refused("ff", "4 KV heads, but gates for 2", _TOUCHED),
    "mamba": _refused("ll", _NO_HEADS),
    "moshi": _refused("ss", _NOT_GROUPED, _NO_FULL),
    "opt": Family("ff", gates=_NOT_GROUPED),
    "rwkv": _refused("ll", _NO_HEADS),
    "xlnet": _refused("ff", _OWN_CODE, _OWN_CACHE),
    # full attention in every layer
    "glm": Family("ff"),
    "llama": Family("ff"),
    "ministral3": Family("ff"),
    "phi3": Family("ff"),
    "qwen3": Family("ff"),
    "qwen3_moe": Family("ff"),
}


# the refusals in words
SAID = {
    _COMPRESSED: "unknown kind of layer",
    _LATENT_STATE: "multi-head latent attention",
    _NOT_GROUPED: "no layer with full attention over grouped heads",
    _NOT_SET: "attention in its own code",
    _NO_FULL: "no layer with full attention",
    _NO_HEADS: "no attention",
    _OWN_CACHE: "a cache class of its own",
    _OWN_CODE: "attention in its own code",
    _SEVERAL: "an attention module serves several layers",
    _SPARSE: "unknown kind of layer",
    _TOUCHED: "modules compute with the cached states",
    "4 KV heads, but gates for 2": "other KV heads than its config says",
    "compute with the attention mask": "modules compute with the mask",
    "position_bias": "position biases",
}


def make_config(family: str, **changed: Any) -> Any:
    """Make the config of a family of the table, or of a model type with the general sizes.

    changed: settings in the place of these.
    """
    line = FAMILIES.get(family, Family())
    config_class = CONFIG_MAPPING[line.model_type or family]
    settings = _general_sizes(config_class())
    for name, value in line.settings.items():
        is_part = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = settings[name] | value if is_part else value
    return config_class(**settings | changed)


def _general_sizes(default: Any) -> dict[str, Any]:
    """Return tiny sizes for a config, with as many layers as show each kind that it has."""
    settings: dict[str, Any] = {}
    parts = getattr(type(default), "sub_configs", None) or {}
    values = default.to_dict()
    for name, value in values.items():
        if name in parts:
            part = getattr(default, name, None)
            if part is not None and not isinstance(part, dict):
                settings[name] = _general_sizes(part)
            continue
        is_size = name in SIZES and not isinstance(value, list | tuple | dict)
        if is_size and (value is not None or name in _OPEN):
            settings[name] = SIZES[name]
    if "num_hidden_layers" in settings:
        settings["num_hidden_layers"] = _layers_shown(values.get("layer_types") or [])
    return settings


def _layers_shown(kinds: list[str]) -> int:
    """Return the least number of first layers, from 2 to 8, that are of every kind."""
    for number in range(2, 9):
        if set(kinds[:number]) == set(kinds):
            return number
    return 2


def make_family(family: str, **changed: Any) -> PreTrainedModel:
    """Make a random decoder in eval mode, all of its parameters away from their initial values."""
    torch.manual_seed(0)
    config = make_config(family, **changed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # "sdpa", the default of some, ignores the cap
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().add_(torch.randn_like(parameter) * 0.1)
    return model


def table() -> str:
    """Return the table of ``docs/models.md``."""
    rows = ["| family | layers | gates | `rlkv.compress` |", "|---|---|---|---|"]
    for name, line in FAMILIES.items():
        outcomes = []
        for sentence in (line.gates, line.serving):
            outcomes.append(f"refused: {SAID[sentence]}" if sentence else "yes")
        rows.append(f"| `{name}` | `{line.kinds}` | {' | '.join(outcomes)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    before, _, _ = PAGE.read_text().partition("| family |")
    PAGE.write_text(before + table())
