"""Block tables without gaps in plain torch: the reference of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkv.vllm.packing import SinkWindowDemand


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
