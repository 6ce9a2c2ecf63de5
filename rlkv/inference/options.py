"""Options that several commands share, each declared once: config classes inherit from these dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: str = "tiny"
    """tiny (built in), a local folder or a hub id"""
    dtype: str = "auto"
    """auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16 or float16"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """As :func:`rlkv.models.loading.load_model`."""
        from rlkv.models.loading import load_model

        return load_model(self.model, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What compressible heads keep without an eviction policy, and how the prompt is read."""

    sink: int | None = None
    """first tokens that a compressible head keeps; default: what the gates file says, else 16"""
    window: int | None = None
    """last tokens that a compressible head keeps; default: what the gates file says, else 64"""
    prefill: Literal["full", "local"] = "full"
    """full: every head reads the whole prompt and is compressed afterwards; local: as in training"""


def check_positive(config: Any, *names: str) -> None:
    """Raise ``ValueError`` unless the fields ``names`` of a config are None or at least 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
