"""Texts of a model under an allocation, whose rows end, leave and join."""

from __future__ import annotations

from typing import Any

import torch

from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.rollout.base import SamplingParams
from rlkv.tiny.tokenizer import build_tokenizer
from tests.helpers.cached_logits import MIXED
from tests.helpers.models import make_tiny_model

AHEAD = 7  # tokens, so that graphs end before the texts do
PROMPTS = [
    "a=7 . b=2 . c = b + a . find c ?",
    "a=3 . find a ?",
    "b=1 . a=7 . c = a + b . d = c + a . find d ?",
    "a=5 .",
]
WAYS: list[dict[str, Any]] = [
    {"heads": MIXED[:2], "temperature": 1.0},
    {"heads": MIXED[:2], "temperature": 0.0, "protect_prompt": True},
    {"heads": torch.zeros_like(MIXED[:2]), "temperature": 1.0},
]


def decode_texts(way: dict[str, Any], device: str, tokens: int = 24) -> list[list[int]]:
    """Token ids, at most ``tokens`` each, of more prompts than rows of a batch."""
    options = dict(way)
    heads, sampling = options.pop("heads"), SamplingParams(tokens, temperature=options.pop("temperature"), seed=1)
    model = make_tiny_model("llama", num_hidden_layers=len(heads), vocab_size=340).to(device)
    engine = InferenceEngine(model, build_tokenizer(), HeadAllocation(heads), sink=2, window=5, batch_size=3, **options)
    engine.eos_ids = tuple(range(0, 340, 40))  # of random tokens: rows end at different times
    return [completion.token_ids for completion in engine.generate(PROMPTS, sampling)]
