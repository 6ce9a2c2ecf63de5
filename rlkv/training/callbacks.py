"""Callbacks of a training run: the clamp of the gates, their mean, and a line per step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlkv.models.host_memory import return_freed_memory
from rlkv.training.head_gate import gate_parameters, gates_matrix
from rlkv.utils.progress import duration


@torch.no_grad()
def clamp_gate(gate: Tensor) -> None:
    """Clamp to [0, 1] in place; under DeepSpeed also its float32 master copy, from which the next step starts."""
    if hasattr(gate, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        safe_set_full_fp32_param(gate, safe_get_full_fp32_param(gate).clamp(0, 1))
    gate.clamp_(0, 1)


class ClampGates(TrainerCallback):
    """Keeps the gates in [0, 1] after each step of the optimizer (arXiv 2510.08525)."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for _, gate in gate_parameters(model):
            clamp_gate(gate)


class ReturnMemory(TrainerCallback):
    """On a CPU memory goes back to the system between micro-batches, as the next ones have tensors of other sizes."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cpu":
            return_freed_memory()

    on_step_end = on_substep_end


class GateMean(TrainerCallback):
    """The mean of every gate over all steps so far, float64: a head whose gate fell later matters more."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        alpha = gates_matrix(model).double()
        self._sum = alpha if self._sum is None else self._sum + alpha
        self._count += 1

    def mean(self) -> Tensor:
        """Float32 ``[num_layers, num_kv_heads]``."""
        if self._sum is None:
            raise ValueError("no training step has been made: max_steps and num_train_epochs leave none")
        return (self._sum / self._count).float()

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]


class StepLine(TrainerCallback):
    """One line per step on stdout: progress, reward, gates and the time left."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        per_step = (time.monotonic() - self._started) / max(1, state.global_step - self._first)
        left = duration(per_step * (state.max_steps - state.global_step))
        print(
            f"step {state.global_step}/{state.max_steps}  reward {logs['reward/mean']:.3f}  "
            f"gates {logs['gates/mean']:.3f}  below 0.5: {logs['gates/below_0.5']:.2f}  "
            f"beta' {logs['penalty/beta_prime']:.4g}  {logs['time/step_s']:.1f} s, {left} left",
            flush=True,
        )
