"""Torch's attention with the strides that fused kernels of a GPU give their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

STOCK = F.scaled_dot_product_attention


def transposed_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``[B, H, T, D]`` as the transposed view of a contiguous ``[B, T, H, D]``."""
    return STOCK(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


def in_both_layouts(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what ``run`` gives with torch's output as it is on a CPU, and as it is on a GPU."""
    wanted = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", transposed_attention)
        return wanted, run()
