"""Compressible heads under an eviction policy: a buffer of entries, some of which are evicted when
it is full.

Shapes: B rows, H heads of this store, G query heads per KV head, n new tokens, M columns in use
(rows end at the last one, :mod:`rlkv.cache.schedule`), N the last of them, which hold evictable
entries, a observed queries, D size of a head.  Keys are cached after RoPE with the position that
their token had: evicted tokens leave holes, nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkv.cache.plan import CacheState, CallLayout, JoinLayout
from rlkv.cache.schedule import SegmentTensors
from rlkv.cache.stores import Store, attend, grown_capacity, stack_rows
from rlkv.eviction.base import EvictionPolicy


@dataclass(frozen=True)
class KeptTokens:
    """What one eviction kept in the compressible heads of one layer of one row.

    Attributes:
        row, seen: its number at that time (rows may be reordered later), and tokens of it that had
            been read.
        heads: the H KV heads of the layer that are compressible; under a policy per query head
            positions and scores have H * G rows.
        positions: int64 ``[H, K]``, ascending positions of the kept tokens in their row (padding
            does not count).
        scores: float32 ``[H, K]``, their scores (of tokens that are always kept: as the policy gave
            them).
    """

    layer: int
    row: int
    heads: tuple[int, ...]
    seen: int
    positions: Tensor
    scores: Tensor


class EvictingStore(Store):
    """KV of the compressible heads of one layer.

    Positions of the entries are held only to record what is kept.
    """

    def __init__(
        self,
        heads: Sequence[int],
        layer: int,
        state: CacheState,
        policy: EvictionPolicy,
        records: list[KeptTokens],
    ) -> None:
        super().__init__(len(heads), state)
        self.heads, self.layer, self.policy, self.records = tuple(heads), layer, policy, records
        self.queries: Tensor | None = None  # [B, H, G, at most a, D], the latest ones

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value)
        shape = (key.shape[0], self.num_heads, 0)
        if self.policy.accumulates:
            self.planes["scores"] = torch.empty(shape, dtype=torch.float32, device=key.device)
        if self.state.record:
            self.planes["positions"] = torch.empty(shape, dtype=torch.long, device=key.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float
    ) -> Tensor:
        if self.policy.per_query_head and query.shape[2] > 1:
            return self.attend(*self._by_query_head(query, key, value), plan, scale).reshape(
                query.shape
            )
        parts = []
        for segment in plan.segments:
            span = slice(segment.segment.begin, segment.segment.end)
            query_S, new = (
                query[:, :, :, span],
                self._new_entries(key[:, :, span], value[:, :, span], segment, plan),
            )
            held = self._append(new, segment)
            parts.append(
                attend(
                    query_S, held["keys"], held["values"], segment.mask, segment.is_causal, scale
                )
            )
            self._finish(held, query_S, segment, scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float
    ) -> None:
        if self.policy.per_query_head and query.shape[2] > 1:
            return self.store(*self._by_query_head(query, key, value), plan, scale)
        (segment,) = plan.segments
        self._finish(self._new_entries(key, value, segment, plan), query, segment, scale)

    def tensors(self) -> list[Tensor]:
        counted = [plane for name, plane in self.planes.items() if name != "positions"]
        return counted if self.queries is None else [*counted, self.queries]

    def used_nbytes(self, tokens: int) -> int:
        assert self.state.row_counts is not None
        entries = int(self.state.row_counts.held.sum()) * self.num_heads
        score = 4 if self.policy.accumulates else 0
        return entries * (self.entry_nbytes + score) + (
            0 if self.queries is None else self.queries.nbytes
        )

    def select_rows(self, rows: Tensor) -> None:
        assert self.state.row_counts is not None  # still that of the rows before
        before, after = self.state.row_counts.columns, self.state.row_counts.select(rows).columns
        super().select_rows(rows)
        if after < before:  # the fullest rows are gone: the others now end at an earlier column
            for plane in self.planes.values():
                plane.narrow(2, 0, after).copy_(plane.narrow(2, before - after, after).clone())
        if self.queries is not None:
            self.queries = self.queries.index_select(0, rows)

    def join(self, other: EvictingStore, layout: JoinLayout) -> None:
        own, others = self.state.row_counts, other.state.row_counts
        assert own is not None  # still those before the join
        assert others is not None
        columns = max(own.columns, others.columns)
        capacity = grown_capacity(0, columns, self._most_entries(layout.limit))
        for name, plane in self.planes.items():
            parts = [
                plane.narrow(2, 0, own.columns),
                other.planes[name].narrow(2, 0, others.columns),
            ]
            self.planes[name] = stack_rows(parts, columns, capacity)
        if self.queries is not None and other.queries is not None:
            observed = [queries.flatten(1, 2) for queries in (self.queries, other.queries)]
            latest = max(queries.shape[2] for queries in observed)
            self.queries = stack_rows(observed, latest, latest).unflatten(
                1, self.queries.shape[1:3]
            )

    def reset(self) -> None:
        self.queries = None

    def held(self, row: int, tokens: int) -> Tensor:
        if not self.state.record:
            raise ValueError(
                "this cache does not note which tokens it holds: make it with record=True"
            )
        assert self.state.row_counts is not None
        counts = self.state.row_counts
        columns = slice(counts.columns - int(counts.held[row]), counts.columns)
        found = torch.zeros(self.num_heads, tokens, dtype=torch.bool)
        found.scatter_(1, self.planes["positions"][row, :, columns].cpu(), True)
        return found.unflatten(0, (len(self.heads), -1)).any(
            dim=1
        )  # by any query head, if each keeps its own

    def _by_query_head(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, H * G, 1, n, D]``, and keys and values ``[B, H * G, n, D]``, each query
        head with its own.
        """
        key, value = (states.repeat_interleave(query.shape[2], dim=1) for states in (key, value))
        if self.num_heads != key.shape[1]:  # the first call: nothing is held yet
            self.num_heads = key.shape[1]
            self.allocate(key, value)
        return query.flatten(1, 2)[:, :, None], key, value

    def _new_entries(
        self, key: Tensor, value: Tensor, segment: SegmentTensors, plan: CallLayout
    ) -> dict[str, Tensor]:
        new = {"keys": key, "values": value}
        if "scores" in self.planes:
            new["scores"] = torch.zeros(key.shape[:3], dtype=torch.float32, device=key.device)
        if "positions" in self.planes:
            begin = plan.start + segment.segment.begin
            position = torch.arange(begin, begin + segment.length, device=key.device)
            if plan.padding is not None:
                position = position - plan.padding.counts[:, None]
            new["positions"] = position.expand(key.shape[0], -1)[:, None].expand(key.shape[:3])
        return new

    def _append(self, new: dict[str, Tensor], segment: SegmentTensors) -> dict[str, Tensor]:
        """Cached and new entries, ``[B, H, total, ...]``.

        A single token is written into the buffer at once.
        """
        used = segment.columns_before
        if segment.length > 1:
            return {
                name: torch.cat([self.planes[name].narrow(2, 0, used), t], dim=2)
                for name, t in new.items()
            }
        self._make_room(used + 1, used)
        for name, states in new.items():
            self.planes[name].narrow(2, used, 1).copy_(states)
        return {name: self.planes[name].narrow(2, 0, used + 1) for name in new}

    def _finish(
        self, held: dict[str, Tensor], query: Tensor, segment: SegmentTensors, scale: float
    ) -> None:
        """Observe the queries of the segment, evict from the rows that are due, and put the rest
        into the buffer.
        """
        # columns of padding that no row uses
        held = {
            name: plane.narrow(2, segment.total - segment.columns, segment.columns)
            for name, plane in held.items()
        }
        # the policies' logit is query . key / sqrt(D), regardless of the model's own scale
        factor, n = scale * query.shape[-1] ** 0.5, segment.evictable_columns
        if self.policy.uses_queries and not self.policy.accumulates:
            earlier = [] if self.queries is None else [self.queries]
            latest = query[:, :, :, -self.policy.observation :] * factor
            self.queries = torch.cat([*earlier, latest], dim=3)[
                :, :, :, -self.policy.observation :
            ].contiguous()
        if self.policy.accumulates and n:
            keys = held["keys"][:, :, -n:]
            scores = self.policy.scores(
                keys, query[:, :, :, -n:].flatten(1, 2) * factor, segment.valid
            )
            self.policy.check_scores(scores, keys)
            held["scores"][:, :, -n:] += scores.masked_fill(~segment.valid[:, None], 0.0)
        if segment.due is not None:
            held = self._evict(held, segment)
        elif segment.length == 1:
            return
        self._make_room(segment.columns_after, segment.columns_before if segment.length == 1 else 0)
        for name, plane in held.items():
            self.planes[name].narrow(2, 0, segment.columns_after).copy_(plane)

    def _evict(self, held: dict[str, Tensor], segment: SegmentTensors) -> dict[str, Tensor]:
        """The entries ``[B, H, M', ...]`` that stay of ``held`` ``[B, H, M, ...]``."""
        rows, n = segment.due_rows, segment.evictable_columns

        def due(tensor: Tensor) -> Tensor:
            return tensor if rows is None else tensor.index_select(0, rows)

        valid = due(segment.valid)
        if self.policy.accumulates:
            scores = due(held["scores"])[:, :, -n:]
        else:
            keys = due(held["keys"])[:, :, -n:]
            # without observed queries the argument is empty
            queries = (
                keys[:, :, :0]
                if self.queries is None
                else due(self.queries)[:, :, :, -n:].flatten(1, 2)
            )
            draws: dict[str, Any] = (
                {"seen": segment.seen, "layer": self.layer} if self.policy.draws else {}
            )
            scores = self.policy.scores(keys, queries, valid, **draws)
            self.policy.check_scores(scores, keys)
        kept = self.policy.keep(scores, segment.budgets, valid)
        if self.state.record:
            self._record(due(held["positions"])[:, :, -n:], scores, kept, segment)
        source = segment.sources(kept)
        return {name: _take(plane, source) for name, plane in held.items()}

    def _record(
        self, positions: Tensor, scores: Tensor, kept: Tensor, segment: SegmentTensors
    ) -> None:
        assert segment.due is not None
        for i, row in enumerate(segment.due.nonzero()[:, 0].tolist()):
            index = kept[i, :, kept.shape[2] - int(segment.budgets[i]) :]
            kept_positions, kept_scores = (
                plane[i].gather(1, index).cpu() for plane in (positions, scores.float())
            )
            seen = int(segment.seen[i])
            self.records.append(
                KeptTokens(self.layer, row, self.heads, seen, kept_positions, kept_scores)
            )

    def _make_room(self, needed: int, used: int) -> None:
        """Make room for ``needed`` entries of each row; the first ``used`` are kept."""
        capacity = self.keys.shape[2]
        if needed <= capacity:
            return
        self.reserve(grown_capacity(capacity, needed, self._most_entries(self.state.limit)), used)

    def _most_entries(self, limit: int | None) -> int | None:
        limits = [most for most in (self.policy.max_entries(), limit) if most is not None]
        return min(limits, default=None)


def _take(plane: Tensor, source: Tensor) -> Tensor:
    """Entries ``source`` ``[B, H, M']`` of a plane ``[B, H, M]`` or ``[B, H, M, D]``."""
    if plane.dim() == 4:
        source = source[..., None].expand(-1, -1, -1, plane.shape[3])
    return plane.gather(2, source)
