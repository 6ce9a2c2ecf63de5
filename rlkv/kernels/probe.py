"""The smallest kernel: whether Triton can launch one at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_one(out):
    tl.store(out, 1)


def launch(device: torch.device) -> None:
    """Launch the kernel; raise whatever Triton raises where it cannot."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel wrote nothing")
