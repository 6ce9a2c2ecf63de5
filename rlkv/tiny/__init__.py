"""The built-in tiny reasoning model: its task, tokenizer and packaged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkv.models.builtin import TINY
from rlkv.models.builtin import TINY_FOLDER as MODEL_DIR
from rlkv.models.loading import load_model
from rlkv.tiny.task import problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GROUND_TRUTH = MODEL_DIR / "ground_truth.json"

__all__ = ["GROUND_TRUTH", "MODEL_DIR", "load", "problems"]


def load(dtype: str = "float32", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``(model, tokenizer)`` of the packaged weights, without a network."""
    return load_model(TINY, dtype=dtype, device=device)
