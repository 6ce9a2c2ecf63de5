"""The shape of a model, as gates files name it, and the three published ones."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlkv.models.gguf import find_gguf
from rlkv.models.layout import Layout
from rlkv.utils.files import is_text
from rlkv.utils.numbers import check_whole

# hub id -> name of its config, and what the hub says of it
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        "llama8b",
        {
            "model_type": "llama",
            "dtype": "bfloat16",
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_attention_heads": 32,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        "qwen7b",
        {
            "model_type": "qwen2",
            "dtype": "bfloat16",
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "num_attention_heads": 28,
            "head_dim": 128,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen/Qwen3-4B-Thinking-2507": (
        "qwen3_4b",
        {
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_attention_heads": 32,
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
}


def short_name(model: str) -> str:
    """Return the name of a model's config (``llama8b``), else the last part of its own."""
    return PUBLISHED[model][0] if model in PUBLISHED else Path(model).absolute().name


def same_model(first: str, second: str) -> bool:
    """Return whether two names mean one model; for a folder and a hub id the last part decides."""
    if first == second:
        return True
    paths = [Path(os.path.expanduser(name)) for name in (first, second)]
    local = [path for path in paths if path.exists()]
    if len(local) == 2:
        return _weights(local[0]).samefile(_weights(local[1]))
    return bool(local) and paths[0].absolute().name == paths[1].absolute().name


def _weights(path: Path) -> Path:
    """Return the GGUF file that a folder stands for, else the path itself."""
    try:
        return find_gguf(str(path)) or path
    except ValueError:  # several files: the folder stands for none of them
        return path


def max_positions(config: Any) -> int:
    """Return how many positions a model of this config has; no limit if it names none.

    Rotary frequencies that are scaled reach further than those that it was trained with: by YaRN
    from what the scaling names, in kinds "linear" and "dynamic" from ``max_position_embeddings``.
    """
    own = config.get_text_config()
    most = getattr(own, "max_position_embeddings", None) or sys.maxsize
    rotation = getattr(own, "rope_parameters", None) or {}
    original = rotation.get("original_max_position_embeddings")
    if rotation.get("rope_type") == "yarn" and original and rotation.get("factor"):
        most = max(most, int(rotation["factor"] * original))
    elif rotation.get("rope_type") in ("linear", "dynamic"):
        most = max(most, int(rotation["factor"] * most))
    return most


class RotationChange(NamedTuple):
    """A length of texts behind which a model turns keys by other rotary frequencies.

    ``keeps``: a call has the frequencies of the longest text so far, not of its own longest one.
    """

    keeps: bool
    said: str


def rotation_change(config: Any, shortest: int, limit: int) -> RotationChange | None:
    """Find where a model changes its rotary frequencies, if texts may cross that length.

    transformers chooses them by the longest text of a call, for all of its rows.

    Args:
        shortest: tokens of the shortest prompt.
        limit: tokens at which the longest text ends.
    """
    config = config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or {}
    # of all layers, or of each kind of layer
    for of in (rotation, *rotation.values()):
        kind = of.get("rope_type", "") if isinstance(of, dict) else ""
        if "dynamic" in kind:
            last = config.max_position_embeddings
            first = 0
        elif kind == "longrope":  # another set of frequencies for all texts longer than that
            last = of["original_max_position_embeddings"]
            first = shortest
        else:
            continue
        if first <= last < limit - 1:  # the last token is never read
            said = (
                f"{config.model_type} turns keys by other frequencies in texts longer than {last} "
                f"tokens (rope_type {kind}), and these may have {limit}"
            )
            return RotationChange("dynamic" in kind, said)
    return None


@dataclass(frozen=True)
class ModelShape:
    """Facts that a gates file states about the model that it was trained for.

    ``model_id`` is empty if it has no name.
    """

    model_id: str
    model_type: str
    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Raise ValueError for fields of other types, which a damaged or foreign file may hold."""
        for name in ("model_id", "model_type"):
            value = getattr(self, name)
            if not isinstance(value, str) or not is_text(value):
                raise ValueError(f"{name} is {value!r}: it must be text")
        for name in ("num_layers", "num_kv_heads", "num_query_heads", "head_dim"):
            check_whole(name, getattr(self, name), 0)

    @property
    def title(self) -> str:
        """What sentences call the model."""
        return f"the model {self.model_id}".strip()

    @classmethod
    def from_config(cls, config: Any, model_id: str | None = None) -> ModelShape:
        """Read the shape off a config; ``model_id`` defaults to the name it was loaded from.

        KV heads and their size are those of the layers with gates, if there are any.
        """
        layout = Layout.from_config(config)
        layers = [layer for layer in layout.layers if layer.has_gates] or layout.layers
        return cls(
            model_id=model_id or getattr(config, "_name_or_path", None) or "",
            model_type=layout.model_type,
            num_layers=len(layout.layers),
            num_kv_heads=max(layer.kv_heads for layer in layers),
            num_query_heads=layers[0].query_heads,
            head_dim=layers[0].head_dim,
        )
