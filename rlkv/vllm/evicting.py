"""vLLM attention backends of compressible heads under an eviction policy.

A step is cut where its requests evict. What is due before its first tokens is done while the
metadata are built, so that a captured graph never holds an eviction; in the middle of a prompt it
waits for the layer's own keys.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from rlkv.eviction.base import EvictionPolicy, pieces
from rlkv.utils.devices import moved
from rlkv.vllm.backends import (
    LAYOUTS,
    AttendingImpl,
    BackendParts,
    TorchBackend,
    TorchBuilder,
    TorchImpl,
    bin_of,
)
from rlkv.vllm.packing import NOWHERE, BufferDemand, SinkWindowDemand
from rlkv.vllm.paged import Places, Reads, Writes, paged_local_attention, plan_reads


@dataclass(frozen=True)
class Round:
    """Tokens of a step that are stored and attended to together, after the rows ``due`` have
    evicted.

    Attributes:
        rows: the requests that take part; due: those of them that evict first, at the next
            ``due_positions``.
        tokens: int64, the step's tokens that take part; None: all of them, in their order.
        row_T, position_T: row and position of each token, int64.
        starts, lengths: the first token of each request within the round, and its entries at the
            end.
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
    """Cut a step where its requests evict; the first round has all rows, also those of padding,
    which have no tokens.

    Request r has the queries ``starts[r] <= t < starts[r + 1]`` and, with them, ``lengths[r]``
    tokens.
    """
    first_T = [
        length - (end - start)
        for length, start, end in zip(lengths, starts, starts[1:], strict=False)
    ]
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
    demand: BufferDemand,
    rows: list[int],
    begins: list[int],
    ends: list[int],
    starts: list[int],
    first: list[int],
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
        lengths = (
            common.seq_lens_cpu_upper_bound
        )  # exact without speculative decoding, which is refused
        if self._latest is None or self._latest[0] is not lengths:
            self._latest = (
                lengths,
                plan_rounds(self.demand, common.query_start_loc_cpu.tolist(), lengths.tolist()),
            )
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
    return (
        table_RM[row_T, entry // demand.block_size].long() * demand.block_size
        + entry % demand.block_size
    )


def query_entries(query_TXD: Tensor, kv_heads: int) -> Tensor:
    """Queries ``[T, H * G, D]`` as entries ``[E, T, H, 2 * D]``, two in the place of a key and a
    value; an odd G is filled up.
    """
    grouped = query_TXD.unflatten(1, (kv_heads, -1))
    if grouped.shape[2] % 2:
        grouped = F.pad(grouped, (0, 0, 0, 1))
    return grouped.unflatten(2, (-1, 2)).flatten(3).permute(2, 0, 1, 3)


def evict(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float
) -> None:
    """Keep ``budget`` of the C entries of each request, in their order, at the front of its
    entries.

    ``positions_R``: of the token that comes next; ``factor``: for queries, so that ``query . key /
    sqrt(D)`` is the attention logit.
    """
    for piece in pieces(len(table_RM), cache.shape[1] * eviction.demand.capacity * cache.shape[3]):
        _evict(cache, table_RM[piece].long(), positions_R[piece], eviction, factor)


def _evict(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float
) -> None:
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
    cache[blocks[:, entry // demand.block_size], :, entry % demand.block_size] = states.transpose(
        1, 2
    )


def observed_queries(
    cache: Tensor, table_RM: Tensor, positions_R: Tensor, demand: BufferDemand
) -> Tensor:
    """The last a queries before each position, oldest first: ``[R, H, G, a, D]``."""
    stored = _entries(cache, table_RM[:, : demand.query_blocks])[
        :, :, : demand.observation * demand.entries_per_query
    ]
    # an entry's key and value are two query heads
    places = (
        stored.unflatten(2, (demand.observation, demand.entries_per_query))
        .unflatten(4, (2, -1))
        .flatten(3, 4)
    )
    order = demand.observed_before(positions_R)[:, None, :, None, None].expand(
        -1, places.shape[1], -1, *places.shape[3:]
    )
    return places.gather(2, order)[:, :, :, : demand.group_size].transpose(2, 3)


def _entries(cache: Tensor, blocks_RM: Tensor) -> Tensor:
    """The entries in blocks ``[R, M]``, side by side: ``[R, H, M * N, 2 * D]``."""
    return cache[blocks_RM].permute(0, 2, 1, 3, 4).flatten(2, 3)


def evicting_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return EvictingTorchBackend if current_platform.is_cpu() else EvictingTritonBackend


@dataclass
class PlacedRound:
    """A round with its places in the cache:

    ``slots_T`` of keys and values, ``queries_ET`` of observed queries.

    ``due``: blocks and next positions of the requests that evict first. On a GPU attention needs
    ``stock``; on a CPU it needs ``reads``, and storing the ``observed`` tokens, which have a place
    among the queries, and ``writes``.
    """

    tokens: Tensor | None
    slots_T: Tensor
    queries_ET: Tensor
    due: tuple[Tensor, Tensor] | None
    stock: TritonAttentionMetadata | None = None
    reads: list[Reads] = field(default_factory=list)
    observed: Tensor | None = None
    writes: Writes | None = None


def place(plan: Round, demand: BufferDemand, table_RM: Tensor) -> PlacedRound:
    """``plan`` on the device of the block table ``table_RM`` of the step's requests."""
    device = table_RM.device
    row_T, position_T = moved(plan.row_T, device), moved(plan.position_T, device)
    return PlacedRound(
        tokens=None if plan.tokens is None else moved(plan.tokens, device),
        slots_T=entry_slots(demand, table_RM, row_T, demand.entries(position_T)),
        queries_ET=query_slots(demand, table_RM, row_T, demand.observed(position_T)),
        due=_place_due(torch.tensor(plan.due), torch.tensor(plan.due_positions), table_RM)
        if plan.due
        else None,
    )


def _place_due(row_R: Tensor, position_R: Tensor, table_RM: Tensor) -> tuple[Tensor, Tensor]:
    return table_RM[moved(row_R, table_RM.device)], moved(position_R, table_RM.device)


class _EvictingBuilder:
    """What both builders do; the engine's base class gives ``vllm_config`` and ``layer_names``."""

    vllm_config: Any
    layer_names: list[str]

    @property
    def eviction(self) -> Eviction:
        return bin_of(self.vllm_config, self.layer_names).eviction

    def begin(self, parts: list[PlacedRound]) -> list[PlacedRound]:
        """The step's metadata ``parts``, after what is due before its first tokens was done in all
        layers at once.
        """
        own = bin_of(self.vllm_config, self.layer_names)
        own.impl.evict(own.kv_cache, parts[0], own.eviction)
        return parts


class _EvictingImpl(AttendingImpl):
    """What both implementations do; subclasses attend to what is held."""

    scale: float
    num_kv_heads: int
    do_kv_cache_update: Any

    def evict(self, kv_cache: Tensor, part: PlacedRound, eviction: Eviction) -> None:
        if part.due is not None:
            # the policies' logit is query . key / sqrt(D), whatever the model's scale
            evict(kv_cache, *part.due, eviction, self.scale * (kv_cache.shape[-1] // 2) ** 0.5)

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        step: Any,
        out: Tensor,
    ) -> None:
        for number, part in enumerate(step):
            if number > 0:  # what was due before the first round is done
                self.evict(kv, part, layer.eviction)
            if part.tokens is None:
                self.store(layer, query, key, value, kv, part)
                self.attend_round(layer, query, kv, part, out)
            else:
                own = query[part.tokens]
                self.store(layer, own, key[part.tokens], value[part.tokens], kv, part)
                found = torch.empty_like(own, dtype=out.dtype)
                self.attend_round(layer, own, kv, part, found)
                out[part.tokens] = found

    @abstractmethod
    def store(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        part: PlacedRound,
    ) -> None:
        """Write the round's keys and values, and the queries that an eviction will look at, to
        their places.
        """

    @abstractmethod
    def attend_round(
        self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor
    ) -> None:
        """Write the attention of ``query`` to ``output``, both ``[tokens, query heads, size]``."""


class EvictingTorchBuilder(_EvictingBuilder, TorchBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> list[PlacedRound]:
        demand, table_RM = self.eviction.demand, common_attn_metadata.block_table_tensor
        everything = SinkWindowDemand(demand.block_size, 0, demand.capacity)
        parts = []
        for plan in self.eviction.rounds(common_attn_metadata):
            part = place(plan, demand, table_RM)
            entries_RM = table_RM[plan.rows, demand.query_blocks :]
            part.reads = plan_reads(entries_RM, plan.starts, plan.lengths, everything)
            part.observed = (part.queries_ET[0] >= 0).nonzero()[:, 0]
            part.writes = Writes(
                Places(torch.cat([part.slots_T, part.queries_ET[:, part.observed].flatten()]))
            )
            parts.append(part)
        return self.begin(parts)


class EvictingTorchImpl(_EvictingImpl, TorchImpl):
    def store(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        part: PlacedRound,
    ) -> None:
        assert part.observed is not None
        assert part.writes is not None
        tokens = len(part.slots_T)
        states = torch.cat([key[:tokens], value[:tokens]], -1)
        if len(part.observed):
            entries = query_entries(query[part.observed], self.num_kv_heads)
            states = torch.cat([states, entries.flatten(0, 1)])
        part.writes.write(states, kv_cache)

    def attend_round(
        self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor
    ) -> None:
        paged_local_attention(query, kv_cache, part.reads, self.scale, output)


class EvictingTorchBackend(TorchBackend):
    impl, builder, layouts = EvictingTorchImpl, EvictingTorchBuilder, LAYOUTS


class EvictingTritonBuilder(_EvictingBuilder, TritonAttentionMetadataBuilder):
    """The stock metadata over the entries' blocks.

    A step in which every request has one token is placed on the GPU, without a copy to it, and at
    the same addresses every time.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        # permanent buffers: a captured graph keeps their addresses
        self.lengths_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.slots = torch.full(
            (1 + self.eviction.demand.entries_per_query, rows), -1, dtype=torch.int64, device=device
        )
        self.row_R = torch.arange(rows, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        if common.max_query_len == 1:
            parts = [self._decoding(common)]
            # on the CPU, where these lengths are exact without speculative decoding, which is
            # refused
            position_R = common.seq_lens_cpu_upper_bound.long() - 1
            due_R = self.eviction.demand.evicts_before(position_R)
            if due_R.any():
                parts[0].due = _place_due(
                    due_R.nonzero()[:, 0], position_R[due_R], common.block_table_tensor
                )
        else:
            parts = [self._reading(common, plan) for plan in self.eviction.rounds(common)]
        return self.begin(parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        part = self._decoding(common_attn_metadata)
        self.lengths_R.fill_(1)  # as the stock builder does: longer requests make the capture slow
        return [part]

    def _decoding(self, common: Any) -> PlacedRound:
        demand, table_RM, rows = self.eviction.demand, common.block_table_tensor, common.num_reqs
        position_R, row_R = common.seq_lens.long() - 1, self.row_R[:rows]  # -1: a row of padding
        entry_R = demand.entries(position_R)
        self.lengths_R[:rows] = entry_R + 1
        self.slots[0, :rows] = entry_slots(demand, table_RM, row_R, entry_R.clamp(min=0))
        self.slots[1:, :rows] = query_slots(demand, table_RM, row_R, demand.observed(position_R))
        self.slots[:, :rows].masked_fill_(position_R < 0, -1)
        own = common.replace(
            block_table_tensor=table_RM[:, demand.query_blocks :],
            seq_lens=self.lengths_R[:rows],
            max_seq_len=min(common.max_seq_len, demand.capacity),
        )
        stock = TritonAttentionMetadataBuilder.build(self, 0, own)
        return PlacedRound(None, self.slots[0, :rows], self.slots[1:, :rows], None, stock)

    def _reading(self, common: Any, plan: Round) -> PlacedRound:
        demand, table_RM = self.eviction.demand, common.block_table_tensor
        part = place(plan, demand, table_RM)
        lengths = torch.tensor(plan.lengths, dtype=torch.int32)
        starts = torch.tensor(plan.starts, dtype=torch.int32)
        own = common.replace(
            block_table_tensor=table_RM[
                moved(torch.tensor(plan.rows), self.device), demand.query_blocks :
            ],
            seq_lens=moved(lengths, self.device),
            max_seq_len=max(plan.lengths),
            query_start_loc=moved(starts, self.device),
            query_start_loc_cpu=starts,
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            num_reqs=len(plan.rows),
            num_actual_tokens=len(plan.row_T),
        )
        part.stock = TritonAttentionMetadataBuilder.build(self, 0, own)
        return part


class EvictingTritonImpl(_EvictingImpl, TritonAttentionImpl):
    def store(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        part: PlacedRound,
    ) -> None:
        self.do_kv_cache_update(layer, key, value, kv_cache, part.slots_T)
        entries = query_entries(query[: len(part.slots_T)], self.num_kv_heads).unflatten(3, (2, -1))
        # the engine's kernel wants the heads of a token side by side: one copy for all of them
        halves = entries.permute(0, 3, 1, 2, 4).contiguous()
        for (first, second), slots_T in zip(halves, part.queries_ET, strict=True):
            self.do_kv_cache_update(layer, first, second, kv_cache, slots_T)

    def attend_round(
        self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor
    ) -> None:
        # keys and values are in the cache
        TritonAttentionImpl.forward(self, layer, query, None, None, kv_cache, part.stock, output)


class EvictingTritonBackend(BackendParts, TritonAttentionBackend):
    forward_includes_kv_cache_update = True
    impl, builder, layouts = EvictingTritonImpl, EvictingTritonBuilder, LAYOUTS
