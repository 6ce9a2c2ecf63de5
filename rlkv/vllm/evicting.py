"""Attention backends for vLLM of compressible heads under an eviction policy.

A step is cut where its requests evict. What is due before its first tokens is done while the
metadata are built, so that a captured graph never holds an eviction; in the middle of a prompt it
waits for the layer's own keys.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from rlkv.eviction.base import EvictionPolicy, pieces
from rlkv.utils.devices import moved
from rlkv.vllm.aligned import bin_of
from rlkv.vllm.backends import (
    LAYOUTS,
    AttendingImpl,
    BackendParts,
    States,
    TorchBackend,
    TorchBuilder,
    TorchImpl,
)
from rlkv.vllm.packing import NOWHERE, BufferDemand, SinkWindowDemand
from rlkv.vllm.paged import Writes, paged_local_attention, plan_reads


@dataclass(frozen=True)
class Round:
    """Tokens of a step that are stored and attended to together, once the rows due have evicted.

    Attributes:
        rows: the requests that take part.
        due, due_positions: those of them that evict first, and their next positions, int64.
        tokens: int64, the step's tokens that take part; None: all of them, in their order.
        row_T, position_T: row and position of each token, int64.
        starts, lengths: the first token of each request within the round, and its entries at the
            end.
    """

    rows: list[int]
    due: Tensor
    due_positions: Tensor
    tokens: Tensor | None
    row_T: Tensor
    position_T: Tensor
    starts: list[int]
    lengths: list[int]


def plan_rounds(demand: BufferDemand, starts: list[int], lengths: list[int]) -> list[Round]:
    """Cut a step where its requests evict.

    The first round has all rows, also those of padding, which have no tokens.

    Args:
        starts: request r has the queries ``starts[r] <= t < starts[r + 1]``.
        lengths: the tokens of each request, with them.
    """
    queries = [end - start for start, end in pairwise(starts)]
    first = [length - own for length, own in zip(lengths, queries, strict=False)]
    # the step's token at position 0 of each row, were it in the step
    origins = [start - begin for start, begin in zip(starts, first, strict=False)]
    rounds: list[Round] = []
    position = list(first)
    rows = list(range(len(lengths)))
    while rows:
        begins = [position[row] for row in rows]
        ends = [min(demand.next_eviction(position[row]), lengths[row]) for row in rows]
        rounds.append(_round(demand, rows, begins, ends, [origins[row] for row in rows]))
        for row, end in zip(rows, ends, strict=True):
            position[row] = end
        rows = [row for row in rows if position[row] < lengths[row]]
    return rounds if len(rounds) > 1 else [replace(rounds[0], tokens=None)]


def _round(
    demand: BufferDemand, rows: list[int], begins: list[int], ends: list[int], origins: list[int]
) -> Round:
    """Make the round of the positions ``begins[i] <= p < ends[i]`` of each row."""
    row_R, begin_R, end_R, origin_R = torch.tensor([rows, begins, ends, origins])
    count_R = end_R - begin_R
    starts = torch.cat([count_R.new_zeros(1), count_R.cumsum(0)])
    place_T = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(count_R)
    position_T = begin_R.repeat_interleave(count_R) + place_T
    is_due_R = (count_R > 0) & demand.evicts_before(begin_R)
    return Round(
        rows=rows,
        due=row_R[is_due_R],
        due_positions=begin_R[is_due_R],
        tokens=origin_R.repeat_interleave(count_R) + position_T,
        row_T=row_R.repeat_interleave(count_R),
        position_T=position_T,
        starts=starts.tolist(),
        lengths=(demand.entries(end_R - 1) + 1).clamp(min=0).tolist(),
    )


@dataclass(frozen=True)
class Eviction:
    """The policy of all compressible heads of a served model, and their blocks."""

    policy: EvictionPolicy
    demand: BufferDemand


def entry_slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, entry_T: Tensor) -> Tensor:
    """Return slots (block * N + place) of entries of the requests ``row_T``, int64 ``[T]``."""
    return _slots(demand, table_RM, row_T, entry_T + demand.query_blocks * demand.block_size)


def query_slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, place_T: Tensor) -> Tensor:
    """Return slots of observed queries, int64 ``[E, T]``; ``NOWHERE`` where ``place_T`` is."""
    each = torch.arange(demand.entries_per_query, device=place_T.device)[:, None]
    slots = _slots(demand, table_RM, row_T, place_T.clamp(min=0) * demand.entries_per_query + each)
    return slots.masked_fill(place_T == NOWHERE, NOWHERE)


def _slots(demand: BufferDemand, table_RM: Tensor, row_T: Tensor, entry: Tensor) -> Tensor:
    size = demand.block_size
    return table_RM[row_T, entry // size].long() * size + entry % size


def query_entries(query_TXD: Tensor, kv_heads: int) -> Tensor:
    """Return queries ``[T, H * G, D]`` as entries ``[E, T, H, 2 * D]``.

    Two query heads are in the place of a key and a value; an odd G is filled up.
    """
    grouped = query_TXD.unflatten(1, (kv_heads, -1))
    if grouped.shape[2] % 2:
        grouped = F.pad(grouped, (0, 0, 0, 1))
    return grouped.unflatten(2, (-1, 2)).flatten(3).permute(2, 0, 1, 3)


def evict(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float
) -> None:
    """Keep ``budget`` of the C entries of each request, in their order, at the front.

    Args:
        positions_R: of the token that comes next.
        factor: for queries, so that ``query . key / sqrt(D)`` is the attention logit.
    """
    for piece in pieces(len(table_RM), cache.shape[1] * eviction.demand.capacity * cache.shape[3]):
        _evict(cache, table_RM[piece].long(), positions_R[piece], eviction, factor)


def _evict(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float
) -> None:
    demand = eviction.demand
    policy = eviction.policy
    blocks = table_RM[:, demand.query_blocks :][:, : demand.full(demand.capacity)]
    states = _entries(cache, blocks)[:, :, : demand.capacity]  # [R, H, C, 2 * D]
    keys = states[..., : cache.shape[3] // 2]
    queries = observed_queries(cache, table_RM, positions_R, demand) * factor
    valid = torch.ones(len(keys), demand.capacity, dtype=torch.bool, device=cache.device)
    scores = policy.scores(keys, queries.flatten(1, 2), valid)
    kept = policy.keep(scores, demand.budget, valid)  # [R, H, budget]
    states = states.gather(2, kept[..., None].expand(-1, -1, -1, cache.shape[3]))
    entry = torch.arange(demand.budget, device=cache.device)
    block = blocks[:, entry // demand.block_size]
    cache[block, :, entry % demand.block_size] = states.transpose(1, 2)


def observed_queries(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, demand: BufferDemand
) -> Tensor:
    """Return the last a queries before each position, oldest first: ``[R, H, G, a, D]``."""
    observed = demand.observation
    each = demand.entries_per_query
    stored = _entries(cache, table_RM[:, : demand.query_blocks])[:, :, : observed * each]
    # an entry's key and value are two query heads: [R, H, a, 2 * E, D]
    places = stored.unflatten(2, (observed, each)).unflatten(4, (2, -1)).flatten(3, 4)
    order = demand.observed_before(positions_R)[:, None, :, None, None]
    order = order.expand(-1, places.shape[1], -1, *places.shape[3:])
    return places.gather(2, order)[:, :, :, : demand.group_size].transpose(2, 3)


def _entries(cache: Tensor, blocks_RM: Tensor) -> Tensor:
    """Return the entries in blocks ``[R, M]``, side by side: ``[R, H, M * N, 2 * D]``."""
    return cache[blocks_RM].permute(0, 2, 1, 3, 4).flatten(2, 3)


def evicting_backend() -> type[AttentionBackend]:
    """Return the backend of this platform."""
    return EvictingTorchBackend if current_platform.is_cpu() else EvictingTritonBackend


@dataclass
class PlacedRound:
    """A round with its places in the cache.

    Attributes:
        tokens: as of :class:`Round`.
        slots_T, queries_ET: of keys and values, and of observed queries.
        due: blocks and next positions of the requests that evict first.
        attention: what is read: the stock metadata on a GPU, a list of :class:`Reads` on a CPU.
        writes: on a CPU what is stored: keys and values, then the entries of queries.
    """

    tokens: Tensor | None
    slots_T: Tensor
    queries_ET: Tensor
    due: tuple[Tensor, Tensor] | None
    attention: Any = None
    writes: tuple[Writes, ...] = ()


def place(plan: Round, demand: BufferDemand, table_RM: Tensor) -> PlacedRound:
    """Place ``plan`` on the device of the block table of the step's requests."""
    device = table_RM.device
    row_T = moved(plan.row_T, device)
    position_T = moved(plan.position_T, device)
    due = None
    if len(plan.due):
        due = table_RM[moved(plan.due, device)], moved(plan.due_positions, device)
    return PlacedRound(
        tokens=None if plan.tokens is None else moved(plan.tokens, device),
        slots_T=entry_slots(demand, table_RM, row_T, demand.entries(position_T)),
        queries_ET=query_slots(demand, table_RM, row_T, demand.observed(position_T)),
        due=due,
    )


class _EvictingBuilder:
    """Common part of the builders; the engine's class gives ``vllm_config`` and ``layer_names``."""

    vllm_config: Any
    layer_names: list[str]

    @property
    def eviction(self) -> Eviction:
        return bin_of(self.vllm_config, self.layer_names).kept

    def rounds(self, common: Any) -> list[Round]:
        """Plan the rounds of a step by its metadata, vLLM's."""
        # exact without speculative decoding, which is refused
        lengths = common.seq_lens_cpu_upper_bound.tolist()
        return plan_rounds(self.eviction.demand, common.query_start_loc_cpu.tolist(), lengths)

    def begin(self, parts: list[PlacedRound]) -> list[PlacedRound]:
        """Evict what is due before the step's first tokens, in all layers at once."""
        own = bin_of(self.vllm_config, self.layer_names)
        own.impl.evict(own.kv_cache, parts[0], own.kept)
        return parts


class _EvictingImpl(AttendingImpl):
    """Common part of the implementations; subclasses attend to what is held."""

    scale: float
    num_kv_heads: int
    do_kv_cache_update: Any

    def evict(self, kv: Tensor, part: PlacedRound, eviction: Eviction) -> None:
        if part.due is not None:
            # the policies' logit is query . key / sqrt(D), whatever the model's scale
            evict(kv, *part.due, eviction, self.scale * (kv.shape[-1] // 2) ** 0.5)

    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        for number, part in enumerate(step):
            if number > 0:  # what was due before the first round is done
                self.evict(kv, part, layer.kept)
            if part.tokens is None:
                self.store(layer, states, kv, part)
                self.attend_round(layer, states.query, kv, part, out)
            else:
                own = States(*(state[part.tokens] for state in states))
                self.store(layer, own, kv, part)
                found = torch.empty_like(own.query, dtype=out.dtype)
                self.attend_round(layer, own.query, kv, part, found)
                out[part.tokens] = found

    @abstractmethod
    def store(self, layer: Any, states: States, kv: Tensor, part: PlacedRound) -> None:
        """Write the round's states, and the queries that an eviction will look at, to the cache."""

    @abstractmethod
    def attend_round(
        self, layer: Any, query: Tensor, kv: Tensor, part: PlacedRound, out: Tensor
    ) -> None:
        """Write the attention of ``query`` to ``out``, both ``[T, H * G, D]``."""


class EvictingTorchBuilder(_EvictingBuilder, TorchBuilder):
    def plan(self, common: Any) -> list[PlacedRound]:
        demand = self.eviction.demand
        table_RM = common.block_table_tensor
        everything = SinkWindowDemand(demand.block_size, 0, demand.capacity)
        parts = []
        for plan in self.rounds(common):
            part = place(plan, demand, table_RM)
            entries_RM = table_RM[plan.rows, demand.query_blocks :]
            part.attention = plan_reads(entries_RM, plan.starts, plan.lengths, everything)
            part.writes = tuple(Writes.of(slots_T) for slots_T in (part.slots_T, *part.queries_ET))
            parts.append(part)
        return self.begin(parts)


class EvictingTorchImpl(_EvictingImpl, TorchImpl):
    def store(self, layer: Any, states: States, kv: Tensor, part: PlacedRound) -> None:
        entries = query_entries(states.query, self.num_kv_heads)
        pairs = [(states.key, states.value), *(entry.chunk(2, -1) for entry in entries)]
        for writes, (first, second) in zip(part.writes, pairs, strict=True):
            writes.store(first, second, kv)

    def attend_round(
        self, layer: Any, query: Tensor, kv: Tensor, part: PlacedRound, out: Tensor
    ) -> None:
        paged_local_attention(query, kv, part.attention, self.softmax, out)


class EvictingTorchBackend(TorchBackend):
    impl = EvictingTorchImpl
    builder = EvictingTorchBuilder
    layouts = LAYOUTS


class EvictingTritonBuilder(_EvictingBuilder, TritonAttentionMetadataBuilder):
    """The stock metadata over the entries' blocks.

    A step in which every request has one token is placed on the GPU, without a copy to it, and at
    the same addresses every time.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self.vllm_config.scheduler_config.max_num_seqs
        slots = 1 + self.eviction.demand.entries_per_query
        # permanent buffers: a captured graph keeps their addresses
        self.lengths_R = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.slots = torch.full((slots, rows), NOWHERE, dtype=torch.int64, device=self.device)
        self.row_R = torch.arange(rows, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> list[PlacedRound]:
        common = common_attn_metadata
        if common.max_query_len > 1:
            return self.begin([self._reading(common, plan) for plan in self.rounds(common)])
        part = self._decoding(common)
        # on the CPU, where these lengths are exact without speculative decoding, which is refused
        position_R = common.seq_lens_cpu_upper_bound.long() - 1
        due_R = self.eviction.demand.evicts_before(position_R)
        if due_R.any():
            row_R = moved(due_R.nonzero()[:, 0], self.device)
            position_R = moved(position_R[due_R], self.device)
            part.due = common.block_table_tensor[row_R], position_R
        return self.begin([part])

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> list[PlacedRound]:
        part = self._decoding(common_attn_metadata)
        self.lengths_R.fill_(1)  # as the stock builder does: longer requests make the capture slow
        return [part]

    def _decoding(self, common: Any) -> PlacedRound:
        demand = self.eviction.demand
        table_RM = common.block_table_tensor
        rows = common.num_reqs
        row_R = self.row_R[:rows]
        position_R = common.seq_lens.long() - 1  # -1: a row of padding
        entry_R = demand.entries(position_R)
        self.lengths_R[:rows] = entry_R + 1
        self.slots[0, :rows] = entry_slots(demand, table_RM, row_R, entry_R.clamp(min=0))
        self.slots[1:, :rows] = query_slots(demand, table_RM, row_R, demand.observed(position_R))
        self.slots[:, :rows].masked_fill_(position_R < 0, NOWHERE)
        own = common.replace(
            block_table_tensor=table_RM[:, demand.query_blocks :],
            seq_lens=self.lengths_R[:rows],
            max_seq_len=min(common.max_seq_len, demand.capacity),
        )
        stock = TritonAttentionMetadataBuilder.build(self, 0, own)
        return PlacedRound(None, self.slots[0, :rows], self.slots[1:, :rows], None, stock)

    def _reading(self, common: Any, plan: Round) -> PlacedRound:
        demand = self.eviction.demand
        table_RM = common.block_table_tensor
        part = place(plan, demand, table_RM)
        starts = torch.tensor(plan.starts, dtype=torch.int32)
        rows = moved(torch.tensor(plan.rows), self.device)
        own = common.replace(
            block_table_tensor=table_RM[rows, demand.query_blocks :],
            seq_lens=moved(torch.tensor(plan.lengths, dtype=torch.int32), self.device),
            max_seq_len=max(plan.lengths),
            query_start_loc=moved(starts, self.device),
            query_start_loc_cpu=starts,
            max_query_len=int(starts.diff().max()),
            num_reqs=len(plan.rows),
            num_actual_tokens=len(plan.row_T),
        )
        part.attention = TritonAttentionMetadataBuilder.build(self, 0, own)
        return part


class EvictingTritonImpl(_EvictingImpl, TritonAttentionImpl):
    def store(self, layer: Any, states: States, kv: Tensor, part: PlacedRound) -> None:
        self.do_kv_cache_update(layer, states.key, states.value, kv, part.slots_T)
        entries = query_entries(states.query[: len(part.slots_T)], self.num_kv_heads)
        # the engine's kernel wants the heads of a token side by side: one copy for all of them
        halves = entries.unflatten(3, (2, -1)).permute(0, 3, 1, 2, 4).contiguous()
        for (first, second), slots_T in zip(halves, part.queries_ET, strict=True):
            self.do_kv_cache_update(layer, first, second, kv, slots_T)

    def attend_round(
        self, layer: Any, query: Tensor, kv: Tensor, part: PlacedRound, out: Tensor
    ) -> None:
        # keys and values are in the cache
        TritonAttentionImpl.forward(self, layer, query, None, None, kv, part.attention, out)


class EvictingTritonBackend(BackendParts, TritonAttentionBackend):
    forward_includes_kv_cache_update = True
    impl = EvictingTritonImpl
    builder = EvictingTritonBuilder
    layouts = LAYOUTS
