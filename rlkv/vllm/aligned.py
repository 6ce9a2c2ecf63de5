"""Aligned windows: stock kernels over block tables from which whole blocks are cut out.

A head sees the whole blocks that hold its sinks and its window: from position t those tokens p with
``p < ceil(S / N) * N`` or ``p // N >= (t - W + 1) // N``, N tokens a block.  They are the blocks
that a request holds anyway, and no kernel needs a mask for them: queries with the same blocks are a
sequence of their own, with a shorter table.  Positions alone decide, so chunks, preemption and
speculation change nothing.

Shapes: R requests, P pieces, C columns of a table.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport

from rlkv.utils.devices import moved
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import GapRules


class AlignedPiece(NamedTuple):
    """Queries of a request that see the same blocks.

    Attributes:
        row: the request.
        end: the place in the step where the piece ends; it begins where the one before ends.
        length: tokens of the request up to its last query.
        gap: blocks between sinks and window.
    """

    row: int
    end: int
    length: int
    gap: int


def aligned_pieces(
    starts: list[int],
    lengths: list[int],
    demand: SinkWindowDemand,
    prompts: list[int] | None = None,
    prefixes: list[int] | None = None,
) -> list[AlignedPiece]:
    """Cut the requests of a step where the first block of the window changes.

    Args:
        starts: request r has the queries ``starts[r] <= place < starts[r + 1]``.
        lengths: tokens of each request.
        prompts: how many first tokens of each are a prompt that this step reads in full.
        prefixes: first tokens that each request sees, by default the sinks.
    """
    size = demand.block_size
    pieces = []
    for row, (first, last) in enumerate(pairwise(starts)):
        place = first
        if prompts and prompts[row]:
            place += prompts[row]
            pieces.append(AlignedPiece(row, place, prompts[row], 0))
        kept = demand.full(prefixes[row] if prefixes else demand.sink)
        behind = lengths[row] - last  # of a place, to get the position of its token
        while place < last:
            gap = max(0, (place + behind - demand.window + 1) // size - kept)
            # the first token whose window begins in the block after this one's
            change = (kept + gap + 1) * size + demand.window - 1
            place = min(last, change - behind)
            pieces.append(AlignedPiece(row, place, place + behind, gap))
    return pieces


def cut_tables(table_RC: Tensor, gap_R: Tensor, kept_R: Tensor | int, columns: int) -> Tensor:
    """Leave ``gap_R`` blocks out of each table, after the first ``kept_R``: ``[R, columns]``."""
    column_C = torch.arange(columns, device=table_RC.device)
    behind_RC = column_C >= (kept_R if isinstance(kept_R, int) else kept_R[:, None])
    source_RC = column_C + behind_RC * gap_R[:, None]
    return table_RC.gather(1, source_RC.clamp(max=table_RC.shape[1] - 1).long())


def cut_aligned(common: Any, rules: GapRules, vllm_config: Any) -> Any:
    """Return a step's metadata, vLLM's, in which every piece is a request with a shorter table."""
    demand = rules.demand
    size = demand.block_size
    prefix_R = rules.prefixes(common, vllm_config)
    prompts = rules.full_prompts(common, vllm_config)
    if common.max_query_len == 1:  # a prompt of one token sees itself only
        kept_R = demand.full(demand.sink if prefix_R is None else prefix_R)
        lengths_R = common.seq_lens
        gap_R = ((lengths_R - demand.window) // size - kept_R).clamp(min=0)
        columns = min(rules.width(1), common.block_table_tensor.shape[1])
        return common.replace(
            block_table_tensor=cut_tables(common.block_table_tensor, gap_R, kept_R, columns),
            seq_lens=lengths_R - gap_R * size,
            max_seq_len=min(common.max_seq_len, columns * size),
        )
    starts = common.query_start_loc_cpu.tolist()
    lengths = common.seq_lens_cpu_upper_bound.tolist()
    prefixes = None if prefix_R is None else prefix_R.tolist()
    pieces = aligned_pieces(starts, lengths, demand, prompts, prefixes)
    return _in_pieces(common, pieces, demand, prefix_R)


def _in_pieces(
    common: Any, pieces: list[AlignedPiece], demand: SinkWindowDemand, prefix_R: Tensor | None
) -> Any:
    size = demand.block_size
    numbers = torch.tensor(pieces, dtype=torch.int32).T.contiguous()
    ends_P = numbers[1]
    cuts = torch.cat([ends_P.new_zeros(1), ends_P])
    seen_P = numbers[2] - numbers[3] * size
    longest = int(seen_P.max())
    columns = min(int(demand.full(longest)), common.block_table_tensor.shape[1])
    device = common.block_table_tensor.device
    row_P, _, length_P, gap_P = moved(numbers, device).unbind()
    row_P = row_P.long()
    kept = demand.full(demand.sink if prefix_R is None else prefix_R.to(device)[row_P])
    return common.replace(
        block_table_tensor=cut_tables(
            common.block_table_tensor[row_P], gap_P, kept, columns
        ).contiguous(),
        seq_lens=length_P - gap_P * size,
        query_start_loc=moved(cuts, device),
        query_start_loc_cpu=cuts,
        num_reqs=len(pieces),
        max_query_len=int(cuts.diff().max()),
        max_seq_len=longest,
    )


def bin_of(vllm_config: Any, layer_names: list[str]) -> Any:
    """Return the bin of a builder: its only layer."""
    (name,) = layer_names
    return vllm_config.compilation_config.static_forward_context[name]


class AlignedBuilder:
    """Mix-in of a stock builder of metadata, whose layer is a bin with sinks and a window."""

    # tables are new in every step: a graph would keep the addresses of its own
    _cudagraph_support = AttentionCGSupport.NEVER

    vllm_config: Any
    layer_names: list[str]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        rules = bin_of(self.vllm_config, self.layer_names).kept
        cut = cut_aligned(common_attn_metadata, rules, self.vllm_config)
        return super().build(0, cut, fast_build)  # type: ignore[misc]
