"""Where the entries of a compressible head lie that evicts tokens: blocks, slots, and when they are compacted.

A request holds, for all heads of a bin, first the blocks of its observed queries, then those of at most
``budget + buffer`` entries.  Everything follows from the position of a token: the first ``budget + buffer`` tokens
lie in a row; before the next one a compaction keeps ``budget`` entries, and so before every ``buffer``-th after it.
So the scheduler knows what a request holds without asking, and a request that is read anew, in other chunks,
is compacted at the same tokens (as :func:`rlkv.cache.schedule.plan_segments` does it).

The queries that judge the entries lie in the pool too, one per head and observed token: they are freed, moved to
another row and counted with the request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy

NOWHERE = -1  # the slot of a state that is not kept


class Use(Protocol):
    """Blocks that the bins of full and of compressible heads take for a request."""

    @property
    def block_size(self) -> int: ...

    def full(self, tokens: int) -> int: ...

    def compressible(self, tokens: int) -> int: ...


@dataclass(frozen=True)
class BufferUse:
    """Blocks of one bin under an eviction policy with a budget.

    Attributes:
        observation: a, queries that judge the entries.
        group_size: G, query heads per KV head.
    """

    block_size: int
    budget: int
    buffer: int
    observation: int
    group_size: int

    @classmethod
    def of(cls, policy: EvictionPolicy, block_size: int, group_size: int) -> BufferUse:
        assert policy.budget is not None, "checked with the settings"
        return cls(block_size, policy.budget, policy.buffer, policy.observation, group_size)

    @property
    def capacity(self) -> int:
        """C, the most entries that a head holds of a request."""
        return self.budget + self.buffer

    @property
    def entries_per_query(self) -> int:
        """E: an entry has room for a key and a value, so for two query heads of a group."""
        return -(-self.group_size // 2)

    @property
    def query_blocks(self) -> int:
        return self.full(self.observation * self.entries_per_query)

    def full(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def compressible(self, tokens: int) -> int:
        return self.query_blocks + self.full(min(tokens, self.capacity))

    def next_compaction(self, position: int) -> int:
        """The first token behind ``position`` before which the entries are compacted."""
        behind = position - self.capacity
        return self.capacity + (0 if behind < 0 else (behind // self.buffer + 1) * self.buffer)

    def is_compacted_before(self, position: int) -> bool:
        return position >= self.capacity and (position - self.capacity) % self.buffer == 0

    def compacted_before(self, positions: Tensor) -> Tensor:
        """:meth:`is_compacted_before` of each position, bool; a negative one, of padding, is not."""
        return (positions >= self.capacity) & ((positions - self.capacity).remainder(self.buffer) == 0)

    def entries(self, positions: Tensor) -> Tensor:
        """The entry that the token at each position is written to, int64 like ``positions``."""
        later = self.budget + (positions - self.capacity).remainder(self.buffer)
        return torch.where(positions < self.capacity, positions, later)

    def observed(self, positions: Tensor) -> Tensor:
        """The place among the observed queries of each position's; ``NOWHERE`` if no compaction will look at it.

        Those that one compaction looks at are neighbours, so no two of them share a place.
        """
        ahead = torch.where(
            positions < self.capacity,
            self.capacity - positions,
            self.buffer - (positions - self.capacity).remainder(self.buffer),
        )
        # with a short buffer a query is also looked at by later compactions
        return torch.where(ahead <= self.observation, positions.remainder(self.observation), NOWHERE)

    def observed_before(self, positions: Tensor) -> Tensor:
        """``[R] -> [R, a]``: places of the queries that a compaction before each position looks at, oldest first."""
        return (positions[:, None] + torch.arange(self.observation, device=positions.device)).remainder(
            self.observation
        )


@dataclass(frozen=True)
class Round:
    """Tokens of a step that are stored and attended to together, after the rows ``due`` were compacted.

    Attributes:
        rows: the requests that take part, by their row in the step.
        due: those of them that are compacted first; ``due_positions``: the position of their next token.
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


def plan_rounds(use: BufferUse, starts: list[int], lengths: list[int]) -> list[Round]:
    """Cut a step at the compactions of its requests.

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
        ends = [min(use.next_compaction(position[row]), lengths[row]) for row in rows]
        rounds.append(_round(use, rows, [position[row] for row in rows], ends, starts, first_T))
        for row, end in zip(rows, ends, strict=True):
            position[row] = end
        rows = [row for row in rows if position[row] < lengths[row]]
        if not rows:
            break
    return rounds if len(rounds) > 1 else [replace(rounds[0], tokens=None)]


def _round(
    use: BufferUse, rows: list[int], begins: list[int], ends: list[int], starts: list[int], first: list[int]
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
        if end > begin and use.is_compacted_before(begin)
    ]
    last = use.entries(torch.tensor(ends) - 1)
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
