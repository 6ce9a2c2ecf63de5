"""torchrun with two processes that import nothing:

``python -m tests.helpers.torchrun FAULT OUTPUT_DIR [options]``.

FAULT is SIGNAL:STEP:WHOM, whom: ``rank`` (rank 1 sends it to itself in the step) or ``launcher``;
or none.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import TrainerCallback

from tests.helpers import random_run


class Fault(TrainerCallback):
    """Writes which processes there are, and sends a signal at the start of a step."""

    def __init__(self, name: str, step: int, to_launcher: bool) -> None:
        self.signal, self.step, self.to_launcher = signal.Signals[name], step, to_launcher

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 != self.step:
            return
        torch.distributed.barrier()  # the other one listens to signals too
        if args.process_index == 1:
            os.kill(os.getppid() if self.to_launcher else os.getpid(), self.signal)


def work(fault: str, folder: str, options: list[str]) -> None:
    """One rank."""
    (Path(folder).parent / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    callbacks = []
    if fault != "none":
        name, step, whom = fault.split(":")
        callbacks = [Fault(name, int(step), whom == "launcher")]
    random_run.run(Path(folder), options, callbacks)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    config = LaunchConfig(
        *(1, 1, 2),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, work)(sys.argv[1], sys.argv[2], sys.argv[3:])
