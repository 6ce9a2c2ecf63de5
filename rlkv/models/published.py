"""The three models of the RLKV paper (arXiv 2510.08525): short names, and shapes that a plan reads without the hub.

The shapes are those of the models' ``config.json`` as public repositories quote them; the hub itself was not asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_HEADS_OF_128: dict[str, Any] = {"head_dim": 128, "dtype": "bfloat16"}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        "llama8b",
        {
            **_HEADS_OF_128,
            "model_type": "llama",
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        "qwen7b",
        {
            **_HEADS_OF_128,
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "num_attention_heads": 28,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen/Qwen3-4B-Thinking-2507": (
        "qwen3_4b",
        {
            **_HEADS_OF_128,
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_attention_heads": 32,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
}


def short_name(model: str) -> str:
    """``llama8b``, ``qwen7b`` or ``qwen3_4b``, as the configs; of another model the last part of its name."""
    return PUBLISHED[model][0] if model in PUBLISHED else Path(model).absolute().name


def same_model(first: str, second: str) -> bool:
    """Whether two names mean one model; of a local folder and a hub id the last part decides."""
    if first == second:
        return True
    folders = [Path(name) for name in (first, second) if Path(name).is_dir()]
    if len(folders) == 2:
        return folders[0].samefile(folders[1])
    return bool(folders) and Path(first).absolute().name == Path(second).absolute().name
