"""Inputs of the decode kernel other than the states of a layer, and which calls it serves.

Loads no Triton, which may be absent.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from rlkv.utils.runtime import first_line

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)  # the least that Triton supports
# one tile of queries and of outputs has to fit into registers
LARGEST_HEAD = 256
LARGEST_GROUP = 32


@dataclass
class DecodeStep:
    """Numbers that the layers on one device share while each row of a batch of B reads one token.

    The numbers are read on the device, so that a captured graph can go on: the next token needs
    ``start += 1``, in place, and nothing else.

    Attributes:
        start: int64 ``[1]``, columns before the new token.
        padding: int64 ``[B]``, or ``[1]`` for all rows: columns of left padding.
        sinks: int64 ``[B]`` or ``[1]``: S of compressible heads.
        window: W of compressible heads.
    """

    start: Tensor
    padding: Tensor
    sinks: Tensor
    window: int
    _partials: Tensor = field(init=False)
    _arrivals: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._partials = torch.empty(0, dtype=torch.float32, device=self.start.device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=self.start.device)

    def scratch(self, floats: int, heads: int) -> tuple[Tensor, Tensor]:
        """Return memory for what splits hand on: at least ``floats`` float32, ``heads`` int32 of 0.

        Every launch leaves its counters at 0, and launches of one stream follow each other: all
        layers share it.
        """
        if self._partials.numel() < floats:
            self._partials = self._partials.new_empty(floats)
        if self._arrivals.numel() < heads:
            self._arrivals = self._arrivals.new_zeros(heads)
        return self._partials, self._arrivals


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel takes these states.

    Shapes: query ``[B, H, G, n, D]``; key and value ``[B, H, n, D]``.
    """
    return (
        query.is_cuda
        and key.shape[2] == 1
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape[3] == value.shape[3] <= LARGEST_HEAD
        and query.shape[2] <= LARGEST_GROUP
        and _runs_triton(query.device)
    )


@cache
def _runs_triton(device: torch.device) -> bool:
    if find_spec("triton") is None:
        lacking = "triton is not installed"
    elif torch.cuda.get_device_capability(device) < CAPABILITY:
        lacking = f"triton needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    elif reason := _cannot_launch(device):
        lacking = f"triton cannot launch a kernel ({reason})"
    else:
        return True
    warnings.warn(f"{lacking}: tokens are decoded by plain torch, which takes longer", stacklevel=2)
    return False


def _cannot_launch(device: torch.device) -> str:
    """Return why in a line, or nothing if it can: Triton's errors have no class in common."""
    from rlkv.kernels.probe import launch

    try:
        launch(device)
    except Exception as error:
        return first_line(error)
    return ""
