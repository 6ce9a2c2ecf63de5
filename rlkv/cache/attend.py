"""Attention of one group of heads, and the growth of buffers: what all stores of a layer share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# A buffer grows by 1/16 of its entries, rounded up to a multiple of 16: little headroom, and copying 16 entries a
# token (on average) is nothing next to reading all of them in each step.
GROWTH = 16
GRANULE = 16


def grown_capacity(capacity: int, needed: int, limit: int | None) -> int:
    """Entries of the next buffer: a sixteenth more than now, at least ``needed``, a multiple of 16.

    ``limit`` (the length at which generation ends, if known) cuts the headroom off, never the needed entries.
    """
    wanted = max(needed, capacity + capacity // GROWTH)
    rounded = -(-wanted // GRANULE) * GRANULE
    return max(needed, min(rounded, limit)) if limit is not None else rounded


def resized(buffer: torch.Tensor, capacity: int, used: int) -> torch.Tensor:
    """A buffer ``[B, H, capacity, ...]`` with the first ``used`` entries of ``buffer`` ``[B, H, N, ...]``."""
    new = buffer.new_empty(*buffer.shape[:2], capacity, *buffer.shape[3:])
    new.narrow(2, 0, used).copy_(buffer.narrow(2, 0, used))
    return new


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of one group of heads: query ``[B, H, G, n, D]``, keys and values ``[B, H, N, D]`` -> query's shape."""
    b, h, g, n, d = query.shape
    if n == 1:
        # the G queries of a KV head as G rows of one product: its keys are read once, not G times
        out = F.scaled_dot_product_attention(query.reshape(b, h, g, d), keys, values, attn_mask=mask, scale=scale)
    else:
        if mask is not None and query.is_cuda and g > 1:  # masked GQA has no fused kernel there
            keys, values = keys.repeat_interleave(g, dim=1), values.repeat_interleave(g, dim=1)
        out = F.scaled_dot_product_attention(
            query.flatten(1, 2), keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=g > 1
        )
    return out.reshape(b, h, g, n, values.shape[-1])
