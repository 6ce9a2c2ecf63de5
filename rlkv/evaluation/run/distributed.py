"""Several processes of one evaluation: which device each has, and the end, where they wait for each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT = timedelta(days=2)  # shares may end far apart; a process that died is noticed at once


@dataclass(frozen=True)
class Processes:
    """This process, ``rank`` of ``count``, and the ``device`` that it loads the model on."""

    rank: int
    count: int
    device: str

    def wait_for_all(self) -> None:
        """Return when every process has come here; a ``ValueError`` if one of them ended without.  Only once."""
        if self.count == 1:
            return
        try:
            dist.barrier()
        except RuntimeError as error:
            raise ValueError(
                "another process of this run ended before its share was done: its output says why; finished rows "
                "are kept: run the same command again to resume"
            ) from error
        dist.destroy_process_group()


def join_processes(device: str) -> Processes:
    """This process among those that torchrun or ``accelerate launch`` started; one if it was started alone.

    With ``device`` ``auto`` or ``cuda`` each of several processes has a GPU of its own where there are GPUs.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes(0, 1, device)
    # gloo: only the end is waited for, and it notices closed connections where nccl waits for its timeout
    dist.init_process_group("gloo", timeout=WAIT)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return Processes(rank, count, device)
