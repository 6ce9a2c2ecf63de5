"""A process in which nothing but tensors allocates: how much of what they held stays resident."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from rlkv.models import loading


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Free 31 of 32 tensors of 4 MiB; print what is gone, before and after it is returned."""
    if not loading.keep_freed_memory():
        print("freed unknown")
        return
    tensors = [torch.ones((1 << 20) + 999 * i) for i in range(32)]
    held = resident()
    last = tensors.pop()  # at the end of the heap: what lies before it leaves a gap
    tensors.clear()
    kept = resident()
    assert loading.return_freed_memory()
    print("freed", held - kept, held - resident())
    del last


if __name__ == "__main__":
    main()
