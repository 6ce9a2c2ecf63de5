"""Attention of groups of query heads equals that of repeated KV heads, and on a GPU never holds all
scores.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlkv.attention.branches import grouped_attention

TOKENS = 70


def states(
    groups: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = [(2, heads, TOKENS, 64) for heads in (2 * groups, 2, 2)]
    query, key, value = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 7])
def test_equals_repeated_heads(groups: int, masked: bool) -> None:
    query, key, value = states(groups, "cpu", torch.float32)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    found = grouped_attention(query, key, value, seen if masked else None, not masked, scale=0.3)
    repeated = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    torch.testing.assert_close(
        found, F.scaled_dot_product_attention(query, *repeated, attn_mask=seen, scale=0.3)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_fused_kernel_serves_groups(dtype: torch.dtype, masked: bool) -> None:
    query, key, value = states(4, "cuda", dtype)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cuda").tril() if masked else None
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    ):  # an error without one
        found = grouped_attention(query, key, value, mask, not masked, scale=0.3)
    assert found.isfinite().all()
