"""What torchrun and ``accelerate launch`` tell the processes that they start, for work that needs no exchange."""

from __future__ import annotations

import os

from torch.cuda import device_count

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def leave_launcher() -> tuple[int, int]:
    """``(rank, number of processes)``; (0, 1) if this one was started alone.

    From then on it counts as started alone, and sees one GPU, that of its local rank: to be called before CUDA starts.

    Raises:
        ValueError: if there are fewer GPUs, or CUDA_VISIBLE_DEVICES names fewer, than processes on this machine.
    """
    found = {name: os.environ.pop(name, None) for name in _NAMES}
    rank, count, local = int(found["RANK"] or 0), int(found["WORLD_SIZE"] or 1), int(found["LOCAL_RANK"] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count > 1 and visible != "":  # empty: no GPU is to be used
        gpus = list(map(str, range(device_count()))) if visible is None else visible.split(",")
        if gpus and local >= len(gpus):
            raise ValueError(f"there is no GPU for process {local} of this machine: start {len(gpus)} processes")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local] if gpus else ""
    return rank, count
