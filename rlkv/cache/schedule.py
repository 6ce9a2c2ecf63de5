"""When the rows of a batch evict, and down to how many entries: bookkeeping that all layers share.

Its tensors are int64 ``[B]``, of B rows, on the CPU: nothing waits for a GPU.  Rows end at a common
column, as left-padded tokens do: of the M columns in use, row b holds the last ``held[b]``; M is
the largest ``held``.  So a new token goes to the same column in all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy
from rlkv.utils.devices import moved

# last tokens of a prompt that RLKV's evaluator decodes (decoding_simulation_length in its code)
DECODED = 50
_IN_FULL = {
    "full": lambda length: length,
    "local": lambda length: 0,
    "published": lambda n: max(0, n - DECODED),
}
PREFILL_MODES = tuple(_IN_FULL)


def split_call(prefill: str, start: int, length: int) -> list[tuple[int, int, bool]]:
    """The parts of a call of ``length`` tokens after ``start`` cached ones, as (start, length, in
    full).

    Tokens of a part that is read in full see each other in all heads, and compressible heads are
    compressed after it; other parts are read as if their tokens came one at a time.  Rows end at
    the last column, so that the last ``DECODED`` columns hold the last tokens of every row, or all
    of a shorter one.
    """
    whole = _IN_FULL[prefill](length)
    parts = [(start, whole, True), (start + whole, length - whole, False)]
    return [part for part in parts if part[1]]


@dataclass(frozen=True)
class RowCounts:
    """Of each row, int64 ``[B]``: entries held, tokens seen, how many of the first are never
    evicted, evictions.

    ``planned``: length of the text by which the row's budget is fixed from its start; 0: it grows
    with the text.
    """

    held: Tensor
    seen: Tensor
    protected: Tensor
    evictions: Tensor
    planned: Tensor

    @classmethod
    def start(cls, rows: int, planned: Tensor | None = None) -> RowCounts:
        held, seen, protected, evictions, none = torch.zeros(5, rows, dtype=torch.long)
        return cls(held, seen, protected, evictions, none if planned is None else planned)

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def counted(self) -> Tensor:
        """Tokens by which the policy counts: those seen, or of the planned text, without protected
        ones.
        """
        return (torch.where(self.planned > 0, self.planned, self.seen) - self.protected).clamp(
            min=0
        )

    @property
    def columns(self) -> int:
        """M: columns in use."""
        return int(self.held.max())

    def select(self, rows: Tensor) -> RowCounts:
        rows = rows.cpu()
        return RowCounts(*(counts[rows] for counts in self._columns))

    def join(self, other: RowCounts) -> RowCounts:
        """The rows of both."""
        return RowCounts(
            *(torch.cat(pair) for pair in zip(self._columns, other._columns, strict=True))
        )

    def due(self, policy: EvictionPolicy) -> Tensor:
        """bool ``[B]``: rows whose evictable entries have reached the policy's capacity."""
        return self.held - self.protected >= policy.capacity(self.counted, self.evictions)

    def advance(self, tokens: Tensor, protect: bool) -> RowCounts:
        """After ``tokens`` ``[B]`` more entries, none of which may be evicted if ``protect``."""
        protected = self.protected + tokens if protect else self.protected
        return replace(self, held=self.held + tokens, seen=self.seen + tokens, protected=protected)

    def evict(self, policy: EvictionPolicy, due: Tensor) -> tuple[RowCounts, Tensor]:
        """The counts after the rows ``due`` evicted, and how many evictable entries each row then
        has.
        """
        evictable = self.held - self.protected
        entries = policy.entries(self.counted, self.evictions)
        kept = torch.where(due, torch.minimum(entries, evictable), evictable)
        return replace(
            self, held=self.protected + kept, evictions=self.evictions + due.long()
        ), kept


@dataclass(frozen=True)
class Segment:
    """Tokens ``begin <= i < end`` of a call, which are stored and attended to together.

    ``before``: the rows when they arrive; ``stored``: with them; ``after``: the same, or after an
    eviction, when rows have ``kept`` ``[B]`` evictable entries (None: no row evicts).
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
    """How a call, or a part of one, of ``length`` tokens after ``start`` cached ones is stored.

    Args:
        counts: the rows before the call.
        padding: int64 ``[B]`` on the CPU, columns of left padding in each row; None: no padding.
        in_one_go: the tokens of the call see each other in full and eviction waits for its end;
            otherwise rows evict at exactly the tokens at which they would if the tokens came one at
            a time.
        protect: none of the tokens may ever be evicted.
    """
    begin, end = start, start + length
    padding = torch.zeros_like(counts.held) if padding is None else padding
    segments = []
    while begin < end:
        stop = end if in_one_go or protect else _next_eviction(policy, counts, padding, begin, end)
        tokens = (stop - padding.clamp(min=begin)).clamp(min=0)
        stored = counts.advance(tokens, protect)
        due = stored.due(policy)
        after, kept = stored.evict(policy, due) if due.any() else (stored, None)
        segments.append(Segment(begin - start, stop - start, counts, stored, after, kept))
        begin, counts = stop, after
    return segments


def _next_eviction(
    policy: EvictionPolicy, counts: RowCounts, padding: Tensor, begin: int, end: int
) -> int:
    """The first token count after ``begin`` at which some row is due; ``end`` if none is before."""
    if end - begin == 1:
        return end
    first = padding.clamp(min=begin)  # where each row's real tokens begin
    tokens = torch.ones_like(first)
    while True:
        # a capacity may grow with the tokens read: go on until each row is due or at the end
        stored = counts.advance(tokens, False)
        missing = policy.capacity(stored.counted, stored.evictions) - (
            stored.held - stored.protected
        )
        open_rows = (missing > 0) & (first + tokens < end)
        if not open_rows.any():
            return min(end, int((first + tokens).min()))
        tokens = torch.where(open_rows, torch.minimum(tokens + missing, end - first), tokens)


class SegmentTensors:
    """What the layers on one device need of a segment; each tensor is built when first asked for.

    M: columns once the segment is stored, N: columns that hold its evictable entries (the last of
    the M), M': columns after an eviction.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.segment, self.device = segment, device
        self.length = segment.end - segment.begin
        self.columns_before = segment.before.columns
        self.total = (
            self.columns_before + self.length
        )  # columns while attending: padding of the call too
        self.columns = segment.stored.columns
        self.columns_after = segment.after.columns
        evictable = segment.stored.held - segment.stored.protected
        self.evictable, self.evictable_columns = evictable, int(evictable.max())
        self.due = (
            None if segment.kept is None else (segment.after.evictions > segment.before.evictions)
        )

    @property
    def is_causal(self) -> bool:
        """Whether a plain causal mask, which needs no tensor, is right."""
        held = self.segment.stored.held
        return self.columns_before == 0 and self.length > 1 and bool((held == self.total).all())

    @cached_property
    def mask(self) -> Tensor | None:
        """What the queries of the segment see: bool ``[B, 1, length, total]``.

        None where a causal mask is enough.
        """
        held = self.segment.stored.held
        if self.is_causal or (self.length == 1 and bool((held == self.total).all())):
            return None
        column = torch.arange(self.total, device=self.device)
        query = column[self.columns_before :, None]
        real = column >= (self.total - moved(held, self.device))[:, None]
        # a padding query sees itself: a row of -inf alone would be NaN in some kernels
        return ((real[:, None, :] & (column <= query)) | (column == query))[:, None]

    @cached_property
    def valid(self) -> Tensor:
        """bool ``[B, N]``: which of the last N columns are evictable entries."""
        n = self.evictable_columns
        return (
            torch.arange(n, device=self.device) >= (n - moved(self.evictable, self.device))[:, None]
        )

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
        after = moved(self.segment.after.held, self.device)
        return (
            torch.arange(self.columns_after, device=self.device)
            - (self.columns_after - after)[:, None]
        )

    def sources(self, kept: Tensor) -> Tensor:
        """Where the entries of each column come from: int64 ``[B, H, M']``, columns of the M.

        Args:
            kept: int64 ``[evicting rows, H, K]``, ascending indices into their N, -1 in front.
        """
        stored = self.segment.stored
        shift = moved(self.columns - stored.held, self.device)
        source = (self._place + shift[:, None])[:, None].repeat(1, kept.shape[1], 1)
        due = slice(None) if self.due_rows is None else self.due_rows
        evictable_place = (self._place - moved(stored.protected, self.device)[:, None])[due]
        budgets = moved(self.budgets, self.device)
        within = (evictable_place + kept.shape[2] - budgets[:, None]).clamp(0, kept.shape[2] - 1)
        picked = (
            kept.gather(2, within[:, None].expand(-1, kept.shape[1], -1))
            + self.columns
            - self.evictable_columns
        )
        source[due] = torch.where((evictable_place >= 0)[:, None], picked, source[due])
        return source.clamp(0, self.columns - 1)
