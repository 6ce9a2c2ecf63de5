"""Block tables without gaps in plain torch: the reference of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.vllm.packing import SinkWindowDemand

# (queries of this step, tokens) of each request: decoding, prompts in one or several pieces, none
REQUESTS = [(1, 1), (1, 17), (1, 260), (9, 9), (7, 33), (1, 64), (150, 300), (40, 90), (2, 5000)]
REQUESTS.append((0, 0))
# (block, sink, window)
SIZES = [(5, 0, 1), (5, 4, 9), (16, 16, 64), (8, 7, 3), (16, 17, 33), (4, 600, 600)]


def without_gaps(
    demand: SinkWindowDemand,
    table_RM: Tensor,
    lengths_R: Tensor,
    starts: Tensor,
    prefix_R: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Cut the gaps out of a table, ``[R, width]`` or as many columns as there are, and lengths."""
    sinks_R = demand.full(prefix_R)
    first_R = lengths_R - (starts[1:] - starts[:-1])
    gap_R = ((first_R - demand.window + 1) // demand.block_size - sinks_R).clamp(min=0)
    columns = table_RM.shape[1]
    column_C = torch.arange(min(width, columns))
    source_RC = column_C + torch.where(column_C < sinks_R[:, None], 0, gap_R[:, None])
    table = table_RM.gather(1, source_RC.clamp(max=columns - 1).long())
    return table, (lengths_R - gap_R * demand.block_size).to(lengths_R.dtype)


def wrong_entries(block: int, sink: int, window: int, queries: int, device: str = "cpu") -> int:
    """Count where the kernel and the reference differ, or the kernel wrote elsewhere.

    queries: the most of a request.
    """
    from rlkv.kernels.gaps import cut_gaps
    from rlkv.vllm.paged import GapRules

    rules = GapRules(SinkWindowDemand(block, sink, window), 6000)
    requests = [(min(n, queries), length) for n, length in REQUESTS]
    starts = torch.tensor([0] + [n for n, _ in requests]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    table = torch.randint(1, 9999, (len(requests), 5000 // block + 3), dtype=torch.int32)
    prefixes = torch.randint(sink, sink + 99, (len(requests),), dtype=torch.int32)
    expected = without_gaps(rules.demand, table, lengths, starts, prefixes, rules.width(queries))
    buffers = [
        torch.full(size, -1, dtype=torch.int32, device=device) for size in ((16, 9000), (16,))
    ]
    rows, width = expected[0].shape
    out = buffers[0][:rows, :width], buffers[1][:rows]
    inputs = [tensor.to(device) for tensor in (table, lengths, starts, prefixes)]
    cut_gaps(*inputs, block, window, out)
    outside = (buffers[0][rows:], buffers[0][:, width:], buffers[1][rows:])
    wrong = sum(int((found.cpu() != own).sum()) for found, own in zip(out, expected, strict=True))
    return wrong + sum(int((rest != -1).sum()) for rest in outside)
