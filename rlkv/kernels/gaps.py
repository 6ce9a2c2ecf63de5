"""Block tables without gaps: one launch for all requests of a step.

Shapes: R requests, M blocks of the longest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # columns at once


# types come from a launch: the compiler looks up what annotations name
@triton.jit
def _cut_gaps(
    table,
    lengths,
    starts,
    prefixes,
    out_table,
    out_lengths,
    columns,
    width,
    stride,
    out_stride,
    window,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cut the gap of request ``program_id``: between its prefix and its window."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    queries = tl.load(starts + row + 1) - tl.load(starts + row)
    sinks = (tl.load(prefixes + row) + BLOCK_SIZE - 1) // BLOCK_SIZE
    # below 0, where division rounds to 0 and not down, there is no gap in either case
    gap = tl.maximum((length - queries - window + 1) // BLOCK_SIZE - sinks, 0)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        source = tl.minimum(column + tl.where(column < sinks, 0, gap), columns - 1)
        block = tl.load(table + row.to(tl.int64) * stride + source, mask=column < width)
        tl.store(out_table + row.to(tl.int64) * out_stride + column, block, mask=column < width)
    tl.store(out_lengths + row, length - gap * BLOCK_SIZE)


def cut_gaps(
    table_RM: Tensor,
    lengths_R: Tensor,
    starts: Tensor,
    prefix_R: Tensor,
    block_size: int,
    window: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """Cut the gaps out of a step's block tables ``table_RM`` and lengths, into ``out``.

    All tensors are int32.

    Args:
        lengths_R: tokens of each request, those of this step included.
        starts: ``[R + 1]``, the first query of each.
        prefix_R: the first tokens that it sees.
        out: the table ``[R, width]``, with no more columns than ``table_RM``, and the lengths
            ``[R]``.
    """
    table, shorter = out
    rows, width = table.shape
    if not rows:
        return
    with torch.cuda.device_of(table):  # Triton launches on the current device
        _cut_gaps[(rows,)](
            table_RM,
            lengths_R,
            starts,
            prefix_R,
            table,
            shorter,
            table_RM.shape[1],
            width,
            table_RM.stride(0),
            table.stride(0),
            window,
            BLOCK_SIZE=block_size,
            TILE=TILE,
        )
