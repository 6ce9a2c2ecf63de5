"""Gates that the tests of gates files save and load."""

from __future__ import annotations

import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape

SHAPE = ModelShape("owner/model", "llama", 4, 6, 12, 32)


def make_gates(**changes: object) -> HeadGates:
    generator = torch.Generator().manual_seed(0)
    values = {
        "alpha": torch.rand(4, 6, generator=generator),
        "mean_alpha": torch.rand(4, 6, generator=generator),
        "model": SHAPE,
        "sink": 4,
        "window": 16,
        "deploy_sink": 2,
        "deploy_window": 8,
        "deploy_protect_prompt": True,
        "training": {
            "steps": 60,
            "beta": 2.5e-3,
            "curve": [0.1, 1 / 3],
            "note": None,
            "nested": {"é": True},
        },
    }
    return HeadGates(**{**values, **changes})  # type: ignore[arg-type]
