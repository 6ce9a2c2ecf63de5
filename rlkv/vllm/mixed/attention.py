"""Mixed attention over a paged KV cache in plain torch: ``alpha * full + (1 - alpha) * local`` per KV head.

The CPU path of rollouts in vLLM, and the reference of its CUDA path.  Both branches read the same keys, so the scores
are made once and the two weightings are mixed before they meet the values.

Shapes: R requests, T query tokens of all requests one after the other, H KV heads, G query heads per KV head, D size
of a head; the cache is ``[blocks, H, N, 2 * D]``: N tokens per block, keys then values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkv.attention.sizes import SinkWindow

PIECE = 2**25  # numbers of a temporary tensor: 128 MB in float32


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of one step lie.

    Request r has the queries ``starts[r] <= t < starts[r + 1]``, which are the last ones of its ``lengths[r]``
    tokens; token k of it is in slot ``k % N`` of block ``table_RM[r, k // N]``.
    """

    starts: list[int]
    lengths: list[int]
    table_RM: Tensor

    def parts(self) -> list[list[int]]:
        """Requests to compute together: all with one query, the longest first, and every other one for itself."""
        queries = [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]
        decoding = sorted((r for r, n in enumerate(queries) if n == 1), key=lambda r: -self.lengths[r])
        alone = [[r] for r, n in enumerate(queries) if n > 1]
        return ([decoding] if decoding else []) + alone


def paged_mixed_attention(
    query_TXD: Tensor, cache: Tensor, batch: PagedBatch, alpha_H: Tensor, sizes: SinkWindow, scale: float, out: Tensor
) -> Tensor:
    """Fill ``out`` ``[T, H * G, D]``; scores, weights and mixing are in float32.

    Args:
        query_TXD: ``[T, H * G, D]``; the query heads of one KV head are neighbours.
        alpha_H: the gates of the layer, float32 ``[H]``.
    """
    for requests in batch.parts():
        per_request = -(-max(batch.lengths[r] for r in requests) // cache.shape[2]) * cache[0].numel()
        at_once = max(1, PIECE // per_request)
        for first in range(0, len(requests), at_once):
            _attend(query_TXD, cache, batch, requests[first : first + at_once], alpha_H, sizes, scale, out)
    return out


def _attend(
    query_TXD: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    requests: list[int],
    alpha_H: Tensor,
    sizes: SinkWindow,
    scale: float,
    out: Tensor,
) -> None:
    """The requests of one part, whose numbers of queries Q are equal."""
    _, kv_heads, in_block, twice = cache.shape
    size = twice // 2
    device = cache.device
    rows = torch.tensor(requests, device=device)
    starts = torch.tensor([batch.starts[r] for r in requests], device=device)
    lengths = torch.tensor([batch.lengths[r] for r in requests], device=device)
    num_queries = batch.starts[requests[0] + 1] - batch.starts[requests[0]]
    blocks = -(-max(batch.lengths[r] for r in requests) // in_block)
    table = batch.table_RM[rows, :blocks].long()
    states = cache[table].permute(0, 2, 1, 3, 4).reshape(len(requests), kv_heads, blocks * in_block, twice).float()
    key, value = states[..., :size], states[..., size:]
    column = torch.arange(blocks * in_block, device=device)
    # a freed or unwritten slot may hold anything: 0 * NaN would be NaN
    value = value.masked_fill((column >= lengths[:, None])[:, None, :, None], 0.0)
    pieces = max(1, PIECE // (len(requests) * query_TXD.shape[1] * blocks * in_block))
    for first in range(0, num_queries, pieces):
        own = torch.arange(first, min(first + pieces, num_queries), device=device)
        token = starts[:, None] + own
        query = query_TXD[token].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).float()  # [R, H, G, Q, D]
        scores = (query.flatten(2, 3) @ key.transpose(-1, -2) * scale).view(*query.shape[:4], -1)
        position = (lengths[:, None] - num_queries + own)[:, None, None, :, None]
        seen = column <= position
        local = seen & ((column < sizes.sink) | (position - column < sizes.window))
        weights = torch.lerp(_softmax(scores, local), _softmax(scores, seen), alpha_H[None, :, None, None, None])
        mixed = (weights.flatten(2, 3) @ value).view_as(query)
        out[token] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)
