"""How far results are from their reference: a ratio of times counts only where outputs agree."""

from __future__ import annotations

import torch
from torch import Tensor

# relative errors of what whole models compute
ALLOWED_OF_MODELS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of ``wanted``.

    Infinite if ``found`` is not finite.
    """
    wanted = wanted.to(found.device)
    error = (found.to(wanted.dtype) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    return float(error) if bool(error.isfinite()) else torch.inf
