"""Helpers of the attention tests: gated random models and batches with padding on both sides."""

from __future__ import annotations

import torch
from peft import PeftModel, get_peft_model

from rlkv.attention.head_gate import HeadGateConfig, gate_parameters
from tests.helpers.models import make_tiny_model

SINK, WINDOW = 4, 16


def make_gated(
    family: str, value: float | str = 1.0, sink: int = SINK, window: int = WINDOW
) -> PeftModel:
    """A tiny random model with all gates at ``value``, or ``"random"`` ones."""
    config = HeadGateConfig(sink=sink, window=window)
    model = get_peft_model(make_tiny_model(family), config).eval()
    fill_gates(model, value)
    return model


def fill_gates(model: PeftModel, value: float | str) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, gate in gate_parameters(model):
            gate.copy_(
                torch.rand(gate.shape, generator=generator)
                if value == "random"
                else torch.full_like(gate, value)
            )


def make_batch(lengths: list[tuple[int, int]], total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input_ids, attention_mask)`` int64 ``[B, total]``.

    ``lengths`` are (left padding, right padding) per row.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (len(lengths), total), generator=generator)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate(lengths):
        mask[row, :left] = 0
        mask[row, total - right :] = 0
    return ids * mask, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)
