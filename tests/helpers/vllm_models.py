"""Tiny random models as folders, and their references in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.attention.head_gate import HeadGateConfig, set_gates
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Rows, Sample
from rlkv.tiny import problems
from tests.helpers.models import build_tokenizer, make_tiny_model

SINK, WINDOW = 4, 16
LAYERS, KV_HEADS = 3, 4
# float32 through three layers of random weights: what two orders of summation differ by, an order
# above what was seen
TOLERANCE = 1e-4
ENDS = [2, *range(20, 25)]  # a random model would never end a completion
OPTIONS = {"dtype": "float32", "kv_gib": 0.03, "max_rows": 8}
OPTIONS |= {"block_size": 32, "enforce_eager": True}


def make_folder(family: str, folder: Path, **overrides: Any) -> Path:
    """Save a tiny random model (3 layers, 4 KV heads of 32) and the tiny tokenizer."""
    tokenizer = build_tokenizer()
    # Qwen2 has no head_dim of its own: hidden size over heads
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "hidden_size": 256}
    model = make_tiny_model(family, **sizes, **overrides)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_reference(folder: Path, gated: bool = True) -> PreTrainedModel | PeftModel:
    """The model of :func:`make_folder` in transformers, with gates or untouched."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not gated:
        return model
    return get_peft_model(model, HeadGateConfig(sink=SINK, window=WINDOW)).eval()


def random_gates(seed: int) -> Tensor:
    """Gates of which some are exactly 0, some exactly 1."""
    alpha = torch.rand(LAYERS, KV_HEADS, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.3
    return alpha.clamp(0, 1)


def make_rows(number: int = 8, rollout: int = 0, seed: int = 0) -> Rows:
    """Prompts of 17 to 125 tokens, two rows each, as in a group of samples."""
    tokenizer = build_tokenizer()
    prompts = [render_prompt(tokenizer, p["problem"]) for p in problems(number // 2, seed)]
    encoded = tokenizer(prompts, add_special_tokens=False).input_ids
    return Rows([ids for ids in encoded for _ in range(2)], list(range(2 * len(encoded))), rollout)


@torch.no_grad()
def forced_logprobs(
    model: torch.nn.Module, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> Tensor:
    """Return log-probabilities of ``tokens`` after ``prompt``, teacher-forced, float32."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def worst_difference(
    model: torch.nn.Module, rows: Rows, samples: dict[int, Sample], temperature: float = 1.0
) -> float:
    """Return the largest difference of the samples' log-probabilities from those of ``model``.

    NaN if there is one.
    """
    assert sorted(samples) == list(range(len(rows.prompts)))
    differences = []
    for index, sample in samples.items():
        wanted = forced_logprobs(model, rows.prompts[index], sample.token_ids, temperature)
        differences.append((wanted - torch.tensor(sample.logprobs)).abs())
    return torch.cat(differences).max().item()


def put_gates(model: torch.nn.Module, alpha: Tensor) -> torch.nn.Module:
    set_gates(model, alpha)
    return model
