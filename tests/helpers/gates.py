"""Gates that the tests of gates files save and load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rlkv import tiny
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape

SHAPE = ModelShape("owner/model", "llama", 4, 6, 12, 32)


def make_gates(**changes: object) -> HeadGates:
    generator = torch.Generator().manual_seed(0)
    gates = HeadGates(
        torch.rand(4, 6, generator=generator),
        torch.rand(4, 6, generator=generator),
        SHAPE,
        sink=4,
        window=16,
        deploy_sink=2,
        deploy_window=8,
        deploy_protect_prompt=True,
        training={"steps": 60, "curve": [0.1, 1 / 3], "note": None, "nested": {"é": True}},
    )
    return replace(gates, **changes)  # type: ignore[arg-type]


def random_gates(model: PreTrainedModel, name: str | None = None, **fields: Any) -> HeadGates:
    """Random gates for ``model``, which is called ``name``."""
    shape = ModelShape.from_config(model.config, name)
    generator = torch.Generator().manual_seed(0)
    alpha = torch.rand(shape.num_layers, shape.num_kv_heads, generator=generator)
    return HeadGates(alpha, model=shape, **fields)


def tiny_gates() -> HeadGates:
    """Random gates for the built-in model tiny."""
    return random_gates(tiny.load()[0], deploy_sink=4, deploy_window=16)
