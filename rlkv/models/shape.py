"""The shape of a model, as gates files name it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlkv.utils.jsonl import is_text
from rlkv.utils.numbers import check_whole


@dataclass(frozen=True)
class ModelShape:
    """What a gates file says about the model that it was trained for."""

    model_id: str
    model_type: str
    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for fields of other types, which a damaged or foreign file may hold."""
        for name in ("model_id", "model_type"):
            value = getattr(self, name)
            if not isinstance(value, str) or not is_text(value):
                raise ValueError(f"{name} is {value!r}: it must be text")
        for name in ("num_layers", "num_kv_heads", "num_query_heads", "head_dim"):
            check_whole(name, getattr(self, name), 0)

    @classmethod
    def from_config(cls, config: Any, model_id: str | None = None) -> ModelShape:
        """Read the shape off a transformers config; ``model_id`` defaults to the name it was loaded from."""
        text = config.get_text_config()
        query_heads = getattr(text, "num_attention_heads", None)
        if query_heads is None:
            raise ValueError(
                f"{text.model_type} has no attention heads (its config has no num_attention_heads): use a model with "
                "attention"
            )
        return cls(
            model_id=model_id or getattr(config, "_name_or_path", "") or "unknown",
            model_type=text.model_type,
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or query_heads,
            num_query_heads=query_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // query_heads,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
