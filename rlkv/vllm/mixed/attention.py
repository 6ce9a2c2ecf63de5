"""Mixed attention over a paged KV cache in plain torch: ``alpha * full + (1 - alpha) * local`` per KV head.

The CPU path of rollouts in vLLM, and the reference of its CUDA path.  Shapes as in
:mod:`rlkv.vllm.paged.local_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkv.attention.mixed import mix
from rlkv.vllm.blocks.block_tables import GapRemover
from rlkv.vllm.blocks.demand import SinkWindowDemand
from rlkv.vllm.paged.local_attention import Reads, paged_local_attention, plan_reads

EVERYTHING = 2**31  # a window that no text exceeds


@dataclass(frozen=True)
class MixedReads:
    """What the queries of one step read in either branch."""

    full: list[Reads]
    local: list[Reads]


def plan_mixed_reads(table_RM: Tensor, starts: Tensor, lengths_R: Tensor, gap_remover: GapRemover) -> MixedReads:
    """What a step reads; arguments as of :class:`GapRemover`, which knows sinks and window."""
    begins = starts.tolist()
    most = int((starts[1:] - starts[:-1]).max())
    table_RC, shorter_R = gap_remover(table_RM, lengths_R, starts, most)
    everything = SinkWindowDemand(gap_remover.demand.block_size, 0, EVERYTHING)
    return MixedReads(
        plan_reads(table_RM, begins, lengths_R.tolist(), everything),
        plan_reads(table_RC, begins, shorter_R.tolist(), gap_remover.demand),
    )


def paged_mixed_attention(
    query_TXD: Tensor, cache: Tensor, reads: MixedReads, alpha_H: Tensor, scale: float, out: Tensor
) -> None:
    """Fill ``out`` ``[T, H * G, D]``; scores, weights and mixing are in float32.

    Args:
        query_TXD: ``[T, H * G, D]``; the query heads of one KV head are neighbours.
        alpha_H: the gates of the layer, float32 ``[H]``.
    """
    full, local = torch.zeros(2, *query_TXD.shape)
    paged_local_attention(query_TXD, cache, reads.full, scale, full)
    paged_local_attention(query_TXD, cache, reads.local, scale, local)
    # mix() wants [rows, query heads, tokens, size]
    out.copy_(mix(full.transpose(0, 1)[None], local.transpose(0, 1)[None], alpha_H)[0].transpose(0, 1))
