"""A step of the engine cut where its requests evict (:mod:`rlkv.vllm.blocks.demand`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkv.vllm.blocks.demand import BufferDemand


@dataclass(frozen=True)
class Round:
    """Tokens of a step that are stored and attended to together, after the rows ``due`` have evicted.

    Attributes:
        rows: the requests that take part, by their row in the step.
        due: those of them that evict first; ``due_positions``: the position of their next token.
        tokens: int64, the step's tokens that take part; None: all of them, in their order.
        row_T, position_T: row and position of each token, int64.
        starts: ``len(rows) + 1`` numbers, the first token of each request, counted within the round.
        lengths: entries of each request, with those of this round.
    """

    rows: list[int]
    due: list[int]
    due_positions: list[int]
    tokens: Tensor | None
    row_T: Tensor
    position_T: Tensor
    starts: list[int]
    lengths: list[int]


def plan_rounds(demand: BufferDemand, starts: list[int], lengths: list[int]) -> list[Round]:
    """Cut a step where its requests evict.

    Args:
        starts: ``R + 1`` numbers: request r has the queries ``starts[r] <= t < starts[r + 1]``.
        lengths: tokens of each request, those of this step included.

    Returns:
        The rounds in their order; the first one has all rows, also those of padding, which have no tokens.
    """
    first_T = [length - (end - start) for length, start, end in zip(lengths, starts, starts[1:], strict=False)]
    rounds: list[Round] = []
    rows = list(range(len(lengths)))
    position = list(first_T)
    while True:
        ends = [min(demand.next_eviction(position[row]), lengths[row]) for row in rows]
        rounds.append(_round(demand, rows, [position[row] for row in rows], ends, starts, first_T))
        for row, end in zip(rows, ends, strict=True):
            position[row] = end
        rows = [row for row in rows if position[row] < lengths[row]]
        if not rows:
            break
    return rounds if len(rounds) > 1 else [replace(rounds[0], tokens=None)]


def _round(
    demand: BufferDemand, rows: list[int], begins: list[int], ends: list[int], starts: list[int], first: list[int]
) -> Round:
    counts = torch.tensor([end - begin for begin, end in zip(begins, ends, strict=True)])
    begin_R, row_R = torch.tensor(begins), torch.tensor(rows)
    own_starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    place_T = torch.arange(int(own_starts[-1])) - own_starts[:-1].repeat_interleave(counts)
    position_T = begin_R.repeat_interleave(counts) + place_T
    token_R = torch.tensor([starts[row] for row in rows]) - torch.tensor([first[row] for row in rows])
    due = [
        (row, begin)
        for row, begin, end in zip(rows, begins, ends, strict=True)
        if end > begin and demand.evicts_before(begin)
    ]
    last = demand.entries(torch.tensor(ends) - 1)
    return Round(
        rows=rows,
        due=[row for row, _ in due],
        due_positions=[begin for _, begin in due],
        tokens=token_R.repeat_interleave(counts) + position_T,
        row_T=row_R.repeat_interleave(counts),
        position_T=position_T,
        starts=own_starts.tolist(),
        lengths=(last + 1).clamp(min=0).tolist(),
    )
