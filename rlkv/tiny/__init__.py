"""The built-in tiny reasoning model: its task, tokenizer, pretraining and packaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlkv.tiny.task import draw_problem, problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_DIR = Path(__file__).parent / "model"
GROUND_TRUTH = MODEL_DIR / "ground_truth.json"

__all__ = ["GROUND_TRUTH", "MODEL_DIR", "draw_problem", "load", "problems"]


def load(dtype: str = "float32", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``(model, tokenizer)`` of the packaged weights, without a network."""
    from rlkv.models import TINY, load_model

    return load_model(TINY, dtype=dtype, device=device)
