"""Callbacks of a training run: the clamp of the gates, their mean, and the logs (JSONL, terminal, figures, W&B)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates, plot_histogram
from rlkv.training.head_gate import gate_parameters, gates_matrix
from rlkv.utils.extras import require
from rlkv.utils.jsonl import read_log, write_jsonl
from rlkv.utils.progress import duration

LOG = "log.jsonl"
GATES_LOG = "gates.jsonl"


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


class JsonlLog(TrainerCallback):
    """``log.jsonl``: one record per step; ``gates.jsonl``: all gates after every step.

    After a resume the records beyond the checkpoint are dropped: their steps are repeated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for path in (self.folder / LOG, self.folder / GATES_LOG):
            kept = [r for r in read_log(path) if r["step"] <= state.global_step] if path.exists() else []
            write_jsonl(path, kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if "gates/mean" in logs:
            alpha = [[round(value, 6) for value in row] for row in gates_matrix(model).tolist()]
            for name, record in ((LOG, logs), (GATES_LOG, {"alpha": alpha})):
                with (self.folder / name).open("a") as out:
                    out.write(json.dumps({"step": state.global_step, **record}) + "\n")


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


class GateImages(TrainerCallback):
    """A heat map and a histogram every ``every`` steps (0: never) in ``images/``."""

    def __init__(self, folder: Path, every: int, make_gates: Callable[[], HeadGates]) -> None:
        self.folder, self.every, self.make_gates = folder / "images", every, make_gates

    def paths(self, step: int) -> dict[str, Path]:
        """The figures of ``step``; empty if none are due."""
        due = ("heat_map", "histogram") if self.every and step % self.every == 0 else ()
        return {kind: self.folder / f"{kind}_{step:06d}.png" for kind in due}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if paths := self.paths(state.global_step):
            plot_gates(self.make_gates(), paths["heat_map"])
            plot_histogram(self.make_gates(), paths["histogram"])


class WandbLog(TrainerCallback):
    """Records and figures to W&B; without a login it works offline and says so."""

    def __init__(self, mode: str, project: str, config: dict[str, Any], folder: Path, images: GateImages) -> None:
        self.mode, self.project, self.config, self.folder, self.images = mode, project, config, folder, images

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wandb = require("wandb", "wandb")
        mode = self.mode
        if mode == "online" and not wandb.login(prompt=False):
            print("W&B: no login found, logging offline (later: wandb login, then wandb sync)", flush=True)
            mode = "offline"
        identity = self.folder / "wandb_id.txt"  # a resumed run keeps its id
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=self.project,
            name=args.run_name,
            id=identity.read_text().strip(),
            resume="allow",
            mode=mode,
            dir=str(self.folder),
            config=self.config,
        )
        print(f"W&B: {self.run.url or self.run.dir}", flush=True)  # its own output is silent

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        import wandb

        record: dict[str, Any] = {**logs, "gates/all": wandb.Histogram(gates_matrix(model).flatten().tolist())}
        for kind, path in self.images.paths(state.global_step).items():
            record[f"images/{kind}"] = wandb.Image(str(path))
        self.run.log(record, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.finish()
