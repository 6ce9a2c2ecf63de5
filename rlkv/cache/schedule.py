"""The schedule of evictions: when the rows of a batch evict, and down to how many entries.

All layers share this bookkeeping.  Its tensors are int64 ``[B]``, of B rows, on the CPU: nothing
waits for a GPU.  Rows end at a common column, as left-padded tokens do: of the M columns in use,
row b holds the last ``held[b]``; M is the largest ``held``.  So a new token goes to the same column
in all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy
from rlkv.utils.devices import moved

PREFILL_MODES = ("full", "local", "published")
# last tokens of a prompt that RLKV's evaluator decodes (decoding_simulation_length in its code)
DECODED = 50


def split_call(prefill: str, start: int, length: int) -> list[tuple[int, int, bool]]:
    """Cut a call of ``length`` tokens after ``start`` cached ones into parts.

    Tokens of a part that is read in full see each other in all heads, and compressible heads are
    compressed after it; other parts are read as if their tokens came one at a time.  Rows end at
    the last column, so that the last ``DECODED`` columns hold the last tokens of every row, or all
    of a shorter one.

    Returns:
        (start, length, in full) of each part.
    """
    whole = {"full": length, "local": 0, "published": max(0, length - DECODED)}[prefill]
    parts = [(start, whole, True), (start + whole, length - whole, False)]
    return [part for part in parts if part[1]]


@dataclass(frozen=True)
class RowCounts:
    """The state of every row, int64 ``[B]`` each.

    Attributes:
        held: entries held.
        seen: tokens read.
        protected: how many of the first entries are never evicted.
        evictions: how often the row has evicted.
        planned: length of the text by which the row's budget is fixed from its start; 0: it grows
            with the text.
    """

    held: Tensor
    seen: Tensor
    protected: Tensor
    evictions: Tensor
    planned: Tensor

    @classmethod
    def start(cls, rows: int, planned: Tensor | None = None) -> RowCounts:
        held, seen, protected, evictions, unplanned = torch.zeros(5, rows, dtype=torch.long)
        return cls(held, seen, protected, evictions, unplanned if planned is None else planned)

    @property
    def counted(self) -> Tensor:
        """Tokens by which the policy counts: seen, or planned ones, without protected ones."""
        tokens = torch.where(self.planned > 0, self.planned, self.seen)
        return (tokens - self.protected).clamp(min=0)

    @property
    def evictable(self) -> Tensor:
        """Entries that may be evicted."""
        return self.held - self.protected

    @property
    def columns(self) -> int:
        """M: columns in use."""
        return int(self.held.max())

    def select(self, rows: Tensor) -> RowCounts:
        rows = rows.cpu()
        return RowCounts(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: RowCounts) -> RowCounts:
        """Return the counts of the rows of both."""
        names = [field.name for field in fields(self)]
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return RowCounts(*(torch.cat(pair) for pair in pairs))

    def due(self, policy: EvictionPolicy) -> Tensor:
        """Return which rows have reached the policy's capacity: bool ``[B]``."""
        return self.evictable >= policy.capacity(self.counted, self.evictions)

    def advance(self, tokens: Tensor, protect: bool) -> RowCounts:
        """Add ``tokens`` ``[B]`` entries, none of which may ever be evicted if ``protect``."""
        protected = self.protected + tokens if protect else self.protected
        return replace(self, held=self.held + tokens, seen=self.seen + tokens, protected=protected)

    def evict(self, policy: EvictionPolicy, due: Tensor) -> tuple[RowCounts, Tensor]:
        """Return the counts after the rows ``due`` evicted, and each row's evictable entries."""
        entries = policy.entries(self.counted, self.evictions)
        kept = torch.where(due, torch.minimum(entries, self.evictable), self.evictable)
        evictions = self.evictions + due.long()
        return replace(self, held=self.protected + kept, evictions=evictions), kept


@dataclass(frozen=True)
class Segment:
    """Tokens ``begin <= i < end`` of a call, which are stored and attended to together.

    Attributes:
        before: the rows when they arrive.
        stored: the rows with them.
        after: the same, or the rows after an eviction.
        kept: evictable entries of each row after an eviction, int64 ``[B]``; None: no row evicts.
    """

    begin: int
    end: int
    before: RowCounts
    stored: RowCounts
    after: RowCounts
    kept: Tensor | None


def plan_segments(
    policy: EvictionPolicy,
    counts: RowCounts,
    padding: Tensor | None,
    start: int,
    length: int,
    in_one_go: bool,
    protect: bool = False,
) -> list[Segment]:
    """Plan how a call, or a part of one, of ``length`` tokens after ``start`` ones is stored.

    Args:
        counts: the rows before the call.
        padding: int64 ``[B]`` on the CPU, columns of left padding in each row; None: no padding.
        in_one_go: the tokens of the call see each other in full and eviction waits for its end;
            otherwise rows evict at exactly the tokens at which they would if the tokens came one at
            a time.
        protect: none of the tokens may ever be evicted.
    """
    begin = start
    end = start + length
    padding = torch.zeros_like(counts.held) if padding is None else padding
    segments = []
    while begin < end:
        stop = end if in_one_go or protect else _next_eviction(policy, counts, padding, begin, end)
        tokens = (stop - padding.clamp(min=begin)).clamp(min=0)
        stored = counts.advance(tokens, protect)
        due = stored.due(policy)
        after, kept = stored.evict(policy, due) if due.any() else (stored, None)
        segments.append(Segment(begin - start, stop - start, counts, stored, after, kept))
        begin = stop
        counts = after
    return segments


def _next_eviction(
    policy: EvictionPolicy, counts: RowCounts, padding: Tensor, begin: int, end: int
) -> int:
    """Find the first token count after ``begin`` at which some row is due, at most ``end``."""
    if end - begin == 1:
        return end
    first = padding.clamp(min=begin)  # where each row's real tokens begin
    tokens = torch.ones_like(first)
    while True:
        # a capacity may grow with the tokens read: go on until each row is due or at the end
        stored = counts.advance(tokens, False)
        missing = policy.capacity(stored.counted, stored.evictions) - stored.evictable
        open_rows = (missing > 0) & (first + tokens < end)
        if not open_rows.any():
            return min(end, int((first + tokens).min()))
        tokens = torch.where(open_rows, torch.minimum(tokens + missing, end - first), tokens)


class SegmentTensors:
    """Tensors of a segment that the layers on one device share, each built when first asked for.

    M: columns once the segment is stored, N: columns that hold its evictable entries (the last of
    the M), M': columns after an eviction.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.segment = segment
        self.device = device
        self.length = segment.end - segment.begin
        self.columns_before = segment.before.columns
        # columns while attending: padding of the call too
        self.total = self.columns_before + self.length
        self.columns = segment.stored.columns
        self.columns_after = segment.after.columns
        self.evictable_columns = int(segment.stored.evictable.max())
        self.due: Tensor | None = None
        if segment.kept is not None:
            self.due = segment.after.evictions > segment.before.evictions

    @property
    def is_causal(self) -> bool:
        """Return whether a plain causal mask, which needs no tensor, is right."""
        return self.columns_before == 0 and self.length > 1 and self._is_unpadded

    @property
    def _is_unpadded(self) -> bool:
        return bool((self.segment.stored.held == self.total).all())

    @cached_property
    def mask(self) -> Tensor | None:
        """Mask of the queries: bool ``[B, 1, length, total]``; None: a causal one is enough."""
        if self.is_causal or (self.length == 1 and self._is_unpadded):
            return None
        column = torch.arange(self.total, device=self.device)
        query = column[self.columns_before :, None]
        real = column >= (self.total - moved(self.segment.stored.held, self.device))[:, None]
        # a padding query sees itself: a row of -inf alone would be NaN in some kernels
        return ((real[:, None, :] & (column <= query)) | (column == query))[:, None]

    @cached_property
    def valid(self) -> Tensor:
        """bool ``[B, N]``: which of the last N columns are evictable entries."""
        n = self.evictable_columns
        evictable = moved(self.segment.stored.evictable, self.device)
        return torch.arange(n, device=self.device) >= (n - evictable)[:, None]

    @cached_property
    def due_rows(self) -> Tensor | None:
        """int64 indices of the rows that evict; None: all of them."""
        assert self.due is not None
        return None if self.due.all() else moved(self.due.nonzero()[:, 0], self.device)

    @cached_property
    def budgets(self) -> Tensor:
        """Evictable entries that each evicting row keeps, on the CPU."""
        assert self.segment.kept is not None
        return self.segment.kept[self.due]

    @cached_property
    def seen(self) -> Tensor:
        """Tokens read by each evicting row."""
        return moved(self.segment.stored.seen[self.due], self.device)

    @cached_property
    def _place(self) -> Tensor:
        """int64 ``[B, M']``: which entry of its row is to be in which column; negative: none."""
        empty = self.columns_after - moved(self.segment.after.held, self.device)
        return torch.arange(self.columns_after, device=self.device) - empty[:, None]

    def sources(self, kept: Tensor) -> Tensor:
        """Return where the entries of each column come from: int64 ``[B, H, M']``, of the M.

        Args:
            kept: int64 ``[evicting rows, H, K]``, ascending indices into their N, -1 in front.
        """
        stored = self.segment.stored
        shift = moved(self.columns - stored.held, self.device)
        source = (self._place + shift[:, None])[:, None].repeat(1, kept.shape[1], 1)
        due = slice(None) if self.due_rows is None else self.due_rows
        evictable_place = (self._place - moved(stored.protected, self.device)[:, None])[due]
        budgets = moved(self.budgets, self.device)
        most = kept.shape[2]
        within = (evictable_place + most - budgets[:, None]).clamp(0, most - 1)
        picked = kept.gather(2, within[:, None].expand(-1, kept.shape[1], -1))
        picked = picked + self.columns - self.evictable_columns
        source[due] = torch.where((evictable_place >= 0)[:, None], picked, source[due])
        return source.clamp(0, self.columns - 1)
