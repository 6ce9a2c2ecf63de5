"""When the requests of a step evict, and the eviction itself, in plain torch; the same code on a CPU and on a GPU.

Shapes: R requests, H KV heads, G query heads per KV head, C entries of a request, N entries in a block, D size of a
head, a observed queries, E entries per observed query; the cache is ``[blocks, H, N, 2 * D]``, keys then values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.eviction.attention import pieces
from rlkv.eviction.base import EvictionPolicy
from rlkv.vllm.blocks.demand import NOWHERE, BufferDemand


@dataclass(frozen=True)
class Round:
    """Tokens of a step that are stored and attended to together, after the rows ``due`` have evicted.

    Attributes:
        rows: the requests that take part; due: those of them that evict first, at the next ``due_positions``.
        tokens: int64, the step's tokens that take part; None: all of them, in their order.
        row_T, position_T: row and position of each token, int64.
        starts, lengths: the first token of each request within the round, and its entries at the end.
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
    """Cut a step where its requests evict; the first round has all rows, also those of padding, which have no tokens.

    Request r has the queries ``starts[r] <= t < starts[r + 1]`` and, with them, ``lengths[r]`` tokens.
    """
    first_T = [length - (end - start) for length, start, end in zip(lengths, starts, starts[1:], strict=False)]
    rounds: list[Round] = []
    rows, position = list(range(len(lengths))), list(first_T)
    while rows:
        ends = [min(demand.next_eviction(position[row]), lengths[row]) for row in rows]
        rounds.append(_round(demand, rows, [position[row] for row in rows], ends, starts, first_T))
        for row, end in zip(rows, ends, strict=True):
            position[row] = end
        rows = [row for row in rows if position[row] < lengths[row]]
    return rounds if len(rounds) > 1 else [replace(rounds[0], tokens=None)]


def _round(
    demand: BufferDemand, rows: list[int], begins: list[int], ends: list[int], starts: list[int], first: list[int]
) -> Round:
    begin_R, end_R, row_R = torch.tensor(begins), torch.tensor(ends), torch.tensor(rows)
    counts = end_R - begin_R
    own_starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    place_T = torch.arange(int(own_starts[-1])) - own_starts[:-1].repeat_interleave(counts)
    position_T = begin_R.repeat_interleave(counts) + place_T
    token_R = torch.tensor([starts[row] - first[row] for row in rows])
    due = [
        (row, begin)
        for row, begin, end in zip(rows, begins, ends, strict=True)
        if end > begin and demand.evicts_before(begin)
    ]
    return Round(
        rows=rows,
        due=[row for row, _ in due],
        due_positions=[begin for _, begin in due],
        tokens=token_R.repeat_interleave(counts) + position_T,
        row_T=row_R.repeat_interleave(counts),
        position_T=position_T,
        starts=own_starts.tolist(),
        lengths=(demand.entries(end_R - 1) + 1).clamp(min=0).tolist(),
    )


@dataclass
class Eviction:
    """What all compressible heads of a served model share."""

    policy: EvictionPolicy
    demand: BufferDemand
    _latest: tuple[Any, list[Round]] | None = field(default=None, repr=False)

    def rounds(self, common: Any) -> list[Round]:
        """The rounds of a step by its metadata (vLLM's), planned once for all bins."""
        lengths = common.seq_lens_cpu_upper_bound  # exact without speculative decoding, which is refused
        if self._latest is None or self._latest[0] is not lengths:
            self._latest = (lengths, plan_rounds(self.demand, common.query_start_loc_cpu.tolist(), lengths.tolist()))
        return self._latest[1]


def entry_slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, entry_T: Tensor) -> Tensor:
    """Slots (block * N + place) of entries ``entry_T`` of the requests ``row_T``, int64 ``[T]``."""
    return _slots(demand, table_RM, row_T, entry_T + demand.query_blocks * demand.block_size)


def query_slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, place_T: Tensor) -> Tensor:
    """Slots of observed queries, int64 ``[E, T]``; ``NOWHERE`` where ``place_T`` is."""
    each = torch.arange(demand.entries_per_query, device=place_T.device)[:, None]
    slots = _slots(demand, table_RM, row_T, place_T.clamp(min=0) * demand.entries_per_query + each)
    return slots.masked_fill(place_T == NOWHERE, NOWHERE)


def _slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, entry: Tensor) -> Tensor:
    return table_RM[row_T, entry // demand.block_size].long() * demand.block_size + entry % demand.block_size


def query_entries(query_TXD: Tensor, kv_heads: int) -> Tensor:
    """Queries ``[T, H * G, D]`` as entries ``[E, T, H, 2 * D]``, two in the place of a key and a value; an odd G is
    filled up."""
    grouped = query_TXD.unflatten(1, (kv_heads, -1))
    if grouped.shape[2] % 2:
        grouped = F.pad(grouped, (0, 0, 0, 1))
    return grouped.unflatten(2, (-1, 2)).flatten(3).permute(2, 0, 1, 3)


def evict(cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float) -> None:
    """Keep ``budget`` of the C entries of each request, in their order, at the front of its entries.

    ``positions_R``: of the token that comes next; ``factor``: for queries, so that ``query . key / sqrt(D)`` is the
    attention logit.
    """
    for piece in pieces(len(table_RM), cache.shape[1] * eviction.demand.capacity * cache.shape[3]):
        _evict(cache, table_RM[piece].long(), positions_R[piece], eviction, factor)


def _evict(cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float) -> None:
    demand, policy, size = eviction.demand, eviction.policy, cache.shape[3] // 2
    blocks = table_RM[:, demand.query_blocks : demand.query_blocks + demand.full(demand.capacity)]
    states = _entries(cache, blocks)[:, :, : demand.capacity]  # [R, H, C, 2 * D]
    queries = observed_queries(cache, table_RM, positions_R, demand) * factor
    keys = states[..., :size]
    valid = torch.ones(len(keys), demand.capacity, dtype=torch.bool, device=cache.device)
    scores = policy.scores(keys, queries.flatten(1, 2), valid)
    kept = policy.keep(scores, demand.budget, valid)  # [R, H, budget]
    states = states.gather(2, kept[..., None].expand(-1, -1, -1, 2 * size))
    entry = torch.arange(demand.budget, device=cache.device)
    cache[blocks[:, entry // demand.block_size], :, entry % demand.block_size] = states.transpose(1, 2)


def observed_queries(cache: Tensor, table_RM: Tensor, positions_R: Tensor, demand: BufferDemand) -> Tensor:
    """The last a queries before each position, oldest first: ``[R, H, G, a, D]``."""
    stored = _entries(cache, table_RM[:, : demand.query_blocks])[:, :, : demand.observation * demand.entries_per_query]
    # an entry's key and value are two query heads
    places = stored.unflatten(2, (demand.observation, demand.entries_per_query)).unflatten(4, (2, -1)).flatten(3, 4)
    order = demand.observed_before(positions_R)[:, None, :, None, None].expand(
        -1, places.shape[1], -1, *places.shape[3:]
    )
    return places.gather(2, order)[:, :, :, : demand.group_size].transpose(2, 3)


def _entries(cache: Tensor, blocks_RM: Tensor) -> Tensor:
    """The entries in blocks ``[R, M]``, side by side: ``[R, H, M * N, 2 * D]``."""
    return cache[blocks_RM].permute(0, 2, 1, 3, 4).flatten(2, 3)
