"""Several processes of one evaluation: which device each has, and the end, where they wait for each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rlkv.utils.extras import require

WAIT = timedelta(days=2)  # shares may end far apart; a process that died is noticed at once


@dataclass(frozen=True)
class Processes:
    """This process, ``rank`` of ``count``, and the ``device`` that it loads the model on (None: as asked for)."""

    rank: int
    count: int
    device: str | None
    group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return when every process has come here; only once.

        Raises:
            ValueError: if one of them ended without.
        """
        if self.count == 1:
            return
        import torch.distributed as dist

        try:
            dist.barrier(self.group)
        except RuntimeError as error:
            raise ValueError(
                "another process of this run ended before its share was done: its output says why; what was finished "
                "is in the files, the same command goes on"
            ) from error
        dist.destroy_process_group()


def join_processes(device: str) -> Processes:
    """This process among those that torchrun or ``accelerate launch`` started; one if it was started alone.

    Args:
        device: as for :func:`rlkv.models.loading.load_model`; with ``auto`` or ``cuda`` every process has a GPU of its
            own where there are GPUs.

    Raises:
        ValueError: if accelerate is not installed.
    """
    accelerate = require("accelerate", "eval")
    is_shared = "RANK" in os.environ
    state = accelerate.PartialState(cpu=device == "cpu" or None, **({"timeout": WAIT} if is_shared else {}))
    group = None
    if state.num_processes > 1:
        import torch.distributed as dist

        # gloo notices closed connections where nccl waits for its timeout; made now, while all processes are there
        group = dist.new_group(backend="gloo", timeout=WAIT)
    own_gpu = device in ("auto", "cuda") and state.device.type == "cuda"
    return Processes(
        state.process_index, state.num_processes, f"cuda:{state.local_process_index}" if own_gpu else None, group
    )
