"""SIGTERM, which schedulers and launchers send: the run ends after its step, with a checkpoint and exit code 0."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

GRACE = 20.0  # seconds for the running step: launchers kill their processes after 30


class StopOnTermination(TrainerCallback):
    """Ends the training with the running step; a step that takes longer than ``GRACE`` is given up.

    Under several processes all end with the same step, whichever of them was told.  It should be the last callback:
    at the end of the training it leaves the program.
    """

    def __init__(self) -> None:
        self.told = self.stopped = self._late = False
        self._timer = threading.Timer(GRACE, self._remind)
        self._timer.daemon = True
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: Any) -> None:
        if not self.told:
            self.told = True
            self._timer.start()
        elif self._late:
            print("stopped by SIGTERM within a step: the same command goes on from the last checkpoint", flush=True)
            sys.exit(0)

    def _remind(self) -> None:
        self._late = True
        os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any_process(self.told) and state.global_step < state.max_steps:
            self._timer.cancel()  # the checkpoint may take its time
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self.stopped:
            print(f"stopped by SIGTERM after step {state.global_step}: the same command goes on from there", flush=True)
            sys.exit(0)


def any_process(told: bool) -> bool:
    """Whether ``told`` holds in any of the processes, which all call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return told
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([float(told)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
