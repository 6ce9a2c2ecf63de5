"""Torch's attention where several query heads share a KV head, by a fused kernel wherever it has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention of query ``[B, H * G, Q, D]`` over key and value ``[B, H, K, D]``: query's shape."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and not _flash_attention_takes(query, mask):
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )


def _flash_attention_takes(query: Tensor, mask: Tensor | None) -> bool:
    """Of torch's fused kernels for GPUs only this one has groups; without it all scores would be held at once."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return mask is None and half and torch.cuda.get_device_capability(query.device) >= (8, 0)
