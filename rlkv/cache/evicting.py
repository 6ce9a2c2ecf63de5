"""Heads under an eviction policy: a buffer of entries that evicts when it is full.

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

from rlkv.attention.softmax import Softmax
from rlkv.cache.plan import CacheState, CallLayout, JoinLayout
from rlkv.cache.schedule import RowCounts, SegmentTensors
from rlkv.cache.stores import Store, attend, grown_capacity, stack_rows
from rlkv.eviction.base import EvictionPolicy


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that one eviction kept in the heads under a policy, of one layer of one row.

    Attributes:
        row: its number at that time; rows may be reordered later.
        heads: the H KV heads of the layer that are under the policy; if that is per query head,
            positions and scores have H * G rows.
        seen: tokens of the row that had been read.
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
    """KV of the heads of one layer from which a policy evicts.

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
        self.heads = tuple(heads)
        self.layer = layer
        self.policy = policy
        self.records = records
        self.queries: Tensor | None = None  # [B, H, G, at most a, D], the latest ones

    @property
    def row_counts(self) -> RowCounts:
        assert self.state.row_counts is not None
        return self.state.row_counts

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value, entries)
        shape = (key.shape[0], self.num_heads, entries)
        if self.policy.accumulates:
            self.planes["scores"] = torch.empty(shape, dtype=torch.float32, device=key.device)
        if self.state.record:
            self.planes["positions"] = torch.empty(shape, dtype=torch.long, device=key.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        if self._splits(query):
            out = self.attend(*self._by_query_head(query, key, value), layout, softmax)
            return out.reshape(*query.shape[:4], value.shape[3])
        parts = []
        for segment in layout.segments:
            span = slice(segment.segment.begin, segment.segment.end)
            own = query[:, :, :, span]
            new = self._new_entries(key[:, :, span], value[:, :, span], segment, layout)
            held = self._append(new, segment)
            states = (own, held["keys"], held["values"])
            out = attend(*states, segment.mask, segment.is_causal, softmax)
            parts.append(out)
            self._finish(held, own, segment, softmax.scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> None:
        if self._splits(query):
            return self.store(*self._by_query_head(query, key, value), layout, scale)
        (segment,) = layout.segments
        self._finish(self._new_entries(key, value, segment, layout), query, segment, scale)

    def tensors(self) -> list[Tensor]:
        counted = [plane for name, plane in self.planes.items() if name != "positions"]
        return counted if self.queries is None else [*counted, self.queries]

    def used_nbytes(self, tokens: int) -> int:
        entries = int(self.row_counts.held.sum()) * self.num_heads
        of_entry = self.entry_nbytes
        if self.policy.accumulates:
            of_entry += self.planes["scores"].element_size()
        return entries * of_entry + (0 if self.queries is None else self.queries.nbytes)

    def select_rows(self, rows: Tensor) -> None:
        before = self.row_counts.columns  # those of the rows before
        after = self.row_counts.select(rows).columns
        capacity = self.keys.shape[2]
        for name, plane in self.planes.items():
            chosen = plane.narrow(2, 0, before).index_select(0, rows)
            self.planes[name] = stack_rows([chosen], after, capacity)
        if self.queries is not None:
            self.queries = self.queries.index_select(0, rows)

    def join(self, other: EvictingStore, layout: JoinLayout) -> None:
        own = self.row_counts.columns  # those before the join
        others = other.row_counts.columns
        columns = max(own, others)
        capacity = grown_capacity(0, columns, self._most_entries(layout.limit))
        for name, plane in self.planes.items():
            parts = [plane.narrow(2, 0, own), other.planes[name].narrow(2, 0, others)]
            self.planes[name] = stack_rows(parts, columns, capacity)
        if self.queries is not None and other.queries is not None:
            heads = self.queries.shape[1:3]
            parts = [self.queries.flatten(1, 2), other.queries.flatten(1, 2)]
            latest = max(part.shape[2] for part in parts)
            self.queries = stack_rows(parts, latest, latest).unflatten(1, heads)

    def reset(self) -> None:
        self.queries = None

    def held(self, row: int, tokens: int) -> Tensor:
        if not self.state.record:
            raise ValueError(
                "this cache does not note which tokens it holds: make it with record=True"
            )
        end = self.row_counts.columns
        columns = slice(end - int(self.row_counts.held[row]), end)
        found = torch.zeros(self.num_heads, tokens, dtype=torch.bool)
        found.scatter_(1, self.planes["positions"][row, :, columns].cpu(), True)
        # by any query head, if each keeps its own
        return found.unflatten(0, (len(self.heads), -1)).any(dim=1)

    def _splits(self, query: Tensor) -> bool:
        """Return whether each of several query heads of a KV head keeps entries of its own."""
        return self.policy.per_query_head and query.shape[2] > 1

    def _by_query_head(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give each query head its own keys and values.

        Returns:
            Queries ``[B, H * G, 1, n, D]``, keys and values ``[B, H * G, n, D]``.
        """
        key = key.repeat_interleave(query.shape[2], dim=1)
        value = value.repeat_interleave(query.shape[2], dim=1)
        if self.num_heads != key.shape[1]:  # the first call: nothing is held yet
            self.num_heads = key.shape[1]
            self.allocate(key, value)
        return query.flatten(1, 2)[:, :, None], key, value

    def _new_entries(
        self, key: Tensor, value: Tensor, segment: SegmentTensors, layout: CallLayout
    ) -> dict[str, Tensor]:
        new = {"keys": key, "values": value}
        if "scores" in self.planes:
            new["scores"] = torch.zeros(key.shape[:3], dtype=torch.float32, device=key.device)
        if "positions" in self.planes:
            begin = layout.start + segment.segment.begin
            position = torch.arange(begin, begin + segment.length, device=key.device)
            if layout.padding is not None:
                position = position - layout.padding.counts[:, None]
            new["positions"] = position.expand(key.shape[0], -1)[:, None].expand(key.shape[:3])
        return new

    def _append(self, new: dict[str, Tensor], segment: SegmentTensors) -> dict[str, Tensor]:
        """Return cached and new entries, ``[B, H, total, ...]``.

        A single token is written into the buffer at once.
        """
        used = segment.columns_before
        if segment.length == 1:
            self._make_room(used + 1, used)
            for name, states in new.items():
                self.planes[name].narrow(2, used, 1).copy_(states)
            return {name: self.planes[name].narrow(2, 0, used + 1) for name in new}
        held = {}
        for name, states in new.items():
            held[name] = torch.cat([self.planes[name].narrow(2, 0, used), states], dim=2)
        return held

    def _finish(
        self, held: dict[str, Tensor], query: Tensor, segment: SegmentTensors, scale: float
    ) -> None:
        """Observe the queries, evict from rows that are due, and put the rest into the buffer."""
        # columns of padding that no row uses are left out
        unused = segment.total - segment.columns
        held = {name: plane.narrow(2, unused, segment.columns) for name, plane in held.items()}
        # the policies' logit is query . key / sqrt(D), regardless of the model's own scale
        scaled = scale * query.shape[-1] ** 0.5
        if self.policy.observes:
            self._observe(query[:, :, :, -self.policy.observation :] * scaled)
        evictable = segment.evictable_columns
        if self.policy.accumulates and evictable:
            keys = held["keys"][:, :, -evictable:]
            queries = query[:, :, :, -evictable:].flatten(1, 2) * scaled
            scores = self._scores(keys, queries, segment.valid)
            held["scores"][:, :, -evictable:] += scores.masked_fill(~segment.valid[:, None], 0.0)
        if segment.due is not None:
            held = self._evict(held, segment)
        elif segment.length == 1:
            return  # it is in the buffer already
        self._make_room(segment.columns_after, segment.columns_before if segment.length == 1 else 0)
        for name, plane in held.items():
            self.planes[name].narrow(2, 0, segment.columns_after).copy_(plane)

    def _scores(self, keys: Tensor, queries: Tensor, valid: Tensor, **draws: Any) -> Tensor:
        # under autocast their products would be of 16 bits
        with torch.autocast(keys.device.type, enabled=False):
            scores = self.policy.scores(keys, queries, valid, **draws)
        self.policy.check_scores(scores, keys)
        return scores

    def _observe(self, latest: Tensor) -> None:
        earlier = [] if self.queries is None else [self.queries]
        queries = torch.cat([*earlier, latest], dim=3)
        self.queries = queries[:, :, :, -self.policy.observation :].contiguous()

    def _evict(self, held: dict[str, Tensor], segment: SegmentTensors) -> dict[str, Tensor]:
        """Return the entries ``[B, H, M', ...]`` that stay of ``held`` ``[B, H, M, ...]``."""
        rows = segment.due_rows
        evictable = segment.evictable_columns

        def due(tensor: Tensor) -> Tensor:
            return tensor if rows is None else tensor.index_select(0, rows)

        valid = due(segment.valid)
        if self.policy.accumulates:
            scores = due(held["scores"])[:, :, -evictable:]
        else:
            keys = due(held["keys"])[:, :, -evictable:]
            queries = keys[:, :, :0]  # without observed queries the argument is empty
            if self.queries is not None:
                queries = due(self.queries)[:, :, :, -evictable:].flatten(1, 2)
            draws: dict[str, Any] = {}
            if self.policy.draws:
                draws = {"seen": segment.seen, "layer": self.layer}
            scores = self._scores(keys, queries, valid, **draws)
        kept = self.policy.keep(scores, segment.budgets, valid)
        if self.state.record:
            self._record(due(held["positions"])[:, :, -evictable:], scores, kept, segment)
        source = segment.sources(kept)
        return {name: _take(plane, source) for name, plane in held.items()}

    def _record(
        self, positions: Tensor, scores: Tensor, kept: Tensor, segment: SegmentTensors
    ) -> None:
        assert segment.due is not None
        for i, row in enumerate(segment.due.nonzero()[:, 0].tolist()):
            index = kept[i, :, kept.shape[2] - int(segment.budgets[i]) :]
            record = KeptTokens(
                layer=self.layer,
                row=row,
                heads=self.heads,
                seen=int(segment.seen[i]),
                positions=positions[i].gather(1, index).cpu(),
                scores=scores[i].float().gather(1, index).cpu(),
            )
            self.records.append(record)

    def _make_room(self, needed: int, used: int) -> None:
        """Make room for ``needed`` entries of each row; the first ``used`` are kept."""
        capacity = self.keys.shape[2]
        if needed > capacity:
            most = self._most_entries(self.state.limit)
            self.reserve(grown_capacity(capacity, needed, most), used)

    def _most_entries(self, limit: int | None) -> int | None:
        limits = [most for most in (self.policy.max_entries(), limit) if most is not None]
        return min(limits, default=None)


def _take(plane: Tensor, source: Tensor) -> Tensor:
    """Entries ``source`` ``[B, H, M']`` of a plane ``[B, H, M]`` or ``[B, H, M, D]``."""
    if plane.dim() == 4:
        source = source[..., None].expand(-1, -1, -1, plane.shape[3])
    return plane.gather(2, source)
