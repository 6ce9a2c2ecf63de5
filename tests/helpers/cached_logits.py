"""Token ids, an allocation, and the logits of a model that reads in several calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rlkv.cache import HeadReallocationCache

# fp32 logits up to 4 that differ by the order of summation only: 3e-6 was measured
TOLERANCE = 2e-5
MIXED = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def draw_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


def real_tokens(padding: Sequence[int], length: int) -> torch.Tensor:
    """Bool ``[rows, length]``: all but the first ``padding[row]`` columns."""
    return torch.arange(length) >= torch.tensor(padding)[:, None]


def starts_of(calls: list[int]) -> torch.Tensor:
    """For each token the first token of its call."""
    return torch.cat([torch.full((n,), sum(calls[:i])) for i, n in enumerate(calls)])


@torch.no_grad()
def cached_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: HeadReallocationCache,
    calls: list[int],
    real: torch.Tensor | None = None,
    begin: int = 0,
) -> torch.Tensor:
    """Logits of the columns from ``begin`` on, fed to ``cache`` in calls of these lengths."""
    outputs = []
    for length in calls:
        end = begin + length
        extra = {}
        if real is not None:
            positions = (real.long().cumsum(-1) - 1).clamp(min=0)
            extra["attention_mask"] = real[:, :end].long()
            extra["position_ids"] = positions[:, begin:end]
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True, **extra)
        outputs.append(output.logits)
        begin = end
    assert begin == ids.shape[1]
    return torch.cat(outputs, dim=1)
