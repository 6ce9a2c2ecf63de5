"""Attention to sinks and window over a compacted paged cache, in plain torch.

The CPU path of compressible heads, and the reference of the CUDA path.

Shapes: R requests, T query tokens of all requests one after the other, H KV heads, G query heads per KV head, D size
of a head; the cache is ``[blocks, H, N, 2 * D]``: N tokens per block, keys then values.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rlkv.serving.packing import BlockUse

QUERIES_AT_ONCE = 128  # of one request: its window and these tokens are read together
ROWS_AT_ONCE = 64  # of decoding requests


def paged_local_attention(
    query_TXD: Tensor,
    cache: Tensor,
    table_RC: Tensor,
    starts: list[int],
    lengths: list[int],
    use: BlockUse,
    scale: float,
    out: Tensor,
) -> None:
    """Fill ``out`` ``[T, H * G, D]``; scores and weights are in float32.

    Args:
        query_TXD: ``[T, H * G, D]``; the query heads of one KV head are neighbours.
        table_RC, lengths: block tables and lengths without gaps (:mod:`rlkv.serving.compaction`).
        starts: ``R + 1`` numbers: request r has the queries ``starts[r] <= t < starts[r + 1]``, its last tokens.
    """
    queries = [end - start for start, end in pairwise(starts)]
    decoding = sorted((row for row, number in enumerate(queries) if number == 1), key=lambda row: lengths[row])
    for first in range(0, len(decoding), ROWS_AT_ONCE):
        rows = decoding[first : first + ROWS_AT_ONCE]
        blocks = torch.arange(-(-lengths[rows[-1]] // use.block_size))
        token_RQ = torch.tensor([[starts[row]] for row in rows])
        position_RQ = torch.tensor([[lengths[row] - 1] for row in rows])
        _attend(query_TXD, cache, table_RC[rows][:, blocks], blocks, token_RQ, position_RQ, use, scale, out)
    for row, number in enumerate(queries):
        for first in range(0, number if number > 1 else 0, QUERIES_AT_ONCE):
            own = torch.arange(first, min(first + QUERIES_AT_ONCE, number))
            position_RQ = (lengths[row] - number + own)[None]
            blocks = _blocks(int(position_RQ[0, 0]), int(position_RQ[0, -1]), use)
            token_RQ = (starts[row] + own)[None]
            _attend(query_TXD, cache, table_RC[row, blocks][None], blocks, token_RQ, position_RQ, use, scale, out)


def _blocks(first: int, last: int, use: BlockUse) -> Tensor:
    """Blocks of the keys that the queries at ``first`` to ``last`` see."""
    end = last // use.block_size + 1
    sinks = min(use.full(use.sink), end)
    window = max(sinks, (first - use.window + 1) // use.block_size)
    return torch.cat([torch.arange(sinks), torch.arange(window, end)])


def _attend(
    query_TXD: Tensor,
    cache: Tensor,
    table_RC: Tensor,
    blocks_C: Tensor,
    token_RQ: Tensor,
    position_RQ: Tensor,
    use: BlockUse,
    scale: float,
    out: Tensor,
) -> None:
    """Queries ``token_RQ`` at ``position_RQ`` over the keys in the blocks ``table_RC``, which are the ``blocks_C``-th
    of their requests."""
    _, kv_heads, in_block, twice = cache.shape
    size = twice // 2
    states = cache[table_RC.long()].permute(0, 2, 1, 3, 4).flatten(2, 3).float()  # [R, H, C * N, 2 * D]
    column = (blocks_C[:, None] * in_block + torch.arange(in_block)).flatten()
    distance = position_RQ[:, :, None] - column
    seen = (distance >= 0) & ((column < use.sink) | (distance < use.window))  # [R, Q, C * N]
    # what nobody wrote may be anything: 0 * NaN would be NaN
    value = states[..., size:].masked_fill((distance[:, -1] < 0)[:, None, :, None], 0.0)
    query = query_TXD[token_RQ].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).float()  # [R, H, G, Q, D]
    scores = (query.flatten(2, 3) @ states[..., :size].transpose(-1, -2) * scale).view(*query.shape[:4], -1)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    mixed = (weights.flatten(2, 3) @ value).view_as(query)
    out[token_RQ] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
