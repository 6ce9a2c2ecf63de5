"""Kernels that torch's attention chooses from, instructions of the CPU, copies that do not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cpu_has_any(*names: str) -> bool:
    """Return whether the CPU has any of these, by torch's names; False before torch 2.11."""
    known: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name) for name in names)


def leave_cudnn_out(device: torch.device) -> None:
    """Keep torch in this process from cuDNN's attention if ``device`` is a GPU.

    cuDNN, torch's first choice on an H100, makes a plan for each length of the keys: decoding waits
    for a new one at every token, and none is freed.  It has also given wrong results (pytorch
    issues 191612, 193893 and 196678).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def attention_kernels() -> list[str]:
    """Name the kernels that are switched on, in the order in which torch tries them."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    return [kernel.name.lower() for kernel in _cur_sdpa_kernel_backends(with_priority=True)]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device``; to a GPU without waiting for what it computes."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
