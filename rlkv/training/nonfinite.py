"""Steps whose gradients are not finite: left out, written to a file, and the end of the run after many in a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from rlkv.training.checkpoints import save_tensors

MOST_IN_A_ROW = 3


class SkipNonFinite(TrainerCallback):
    """Drops the gradients of such a step, so that the optimizer leaves gates and momenta as they are.

    They are reduced over all processes, so all of them leave out the same steps.  DeepSpeed, which has made its step by
    then, does so of its own accord.

    Attributes:
        skipped: steps since the start of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped = self._in_a_row = 0
        self._written = -1  # step
        self._started = time.time()

    def look(self, loss: Tensor, gates: Sequence[Tensor], inputs: dict[str, Any], step: int, rank: int) -> None:
        """After a backward pass: keep the first batch of the step after ``step`` whose own loss is not finite.

        Gradients are those of all processes: they tell which batch it was only where there is one process.
        """
        alone = not (dist.is_available() and dist.is_initialized())
        bad = not bool(loss.isfinite().all()) or (alone and not _finite(gates))
        if bad and self._written != step:
            self._written = step
            tensors = {name: value.cpu() for name, value in inputs.items() if isinstance(value, Tensor)}
            save_tensors(self._path(step, rank), {"inputs": tensors, "gates": [gate.detach().cpu() for gate in gates]})

    def state(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load(self, state: dict[str, int]) -> None:
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def _path(self, step: int, rank: int | str) -> Path:
        return self.folder / f"nonfinite_step_{step + 1:06d}_{rank}.pt"

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        gates = [gate for group in optimizer.param_groups for gate in group["params"]]
        by_deepspeed = args.deepspeed_plugin is not None and optimizer.step_was_skipped
        if _finite(gates) and not by_deepspeed:
            self._in_a_row = 0
            return
        for gate in gates:
            gate.grad = None
        self.skipped += 1
        self._in_a_row += 1
        # with several processes only one whose own loss was not finite has written its batch
        found = sorted(self.folder.glob(self._path(state.global_step, "*").name))
        written = [str(path) for path in found if path.stat().st_mtime >= self._started]  # not of an earlier attempt
        where = f" ({', '.join(written)})" if written else ""
        if args.process_index == 0:
            print(f"step {state.global_step + 1} is left out: its gradients are not finite{where}", flush=True)
        if self._in_a_row == MOST_IN_A_ROW:
            raise ValueError(
                f"the gradients of {MOST_IN_A_ROW} steps in a row are not finite{where}: try --dtype float32, or "
                "resume with the same command, which goes on from the last checkpoint"
            )


def _finite(gates: Sequence[Tensor]) -> bool:
    grads = [gate.grad.flatten() for gate in gates if gate.grad is not None]
    return not grads or bool(torch.cat(grads).isfinite().all())  # one wait for the GPU
