"""What happens to the gates apart from the optimizer: the clamp after every step, and their mean over the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlkv.training.head_gate import gate_parameters, gates_matrix


@torch.no_grad()
def clamp_gate(gate: Tensor) -> None:
    """Clamp to [0, 1] in place; under DeepSpeed its float32 master copy too, which the next step starts from."""
    if hasattr(gate, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        safe_set_full_fp32_param(gate, safe_get_full_fp32_param(gate).clamp(0, 1))
    gate.clamp_(0, 1)


class ClampGates(TrainerCallback):
    """Gates stay in [0, 1]: clamped right after the optimizer's step (arXiv 2510.08525)."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for _, gate in gate_parameters(model):
            clamp_gate(gate)


class GateMean(TrainerCallback):
    """The mean of every gate over all steps so far, float64: a head that fell later matters more."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        alpha = gates_matrix(model).double()
        self._sum = alpha if self._sum is None else self._sum + alpha
        self._count += 1

    def mean(self) -> Tensor:
        """Float32 ``[num_layers, num_kv_heads]``.

        Raises:
            ValueError: before the first step.
        """
        if self._sum is None:
            raise ValueError("no training step has been made: the gates have no mean yet")
        return (self._sum / self._count).float()

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]
