"""Whether Triton can build and launch a kernel: it needs a C compiler and a driver, which not every machine has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _one(out):
    tl.store(out, 1)


def launch(device: torch.device) -> None:
    """Launch the smallest kernel; raises whatever Triton raises where it cannot."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel wrote nothing")
