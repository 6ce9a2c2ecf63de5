"""Where the tokens of one forward call go in the cache, and what each of them may see.

Shapes: B rows, n tokens of this call, T tokens after it, S sinks, W window, R = S + W ring entries.
A row's *position* counts its real tokens from 0; left padding has negative positions.  Position p lives in
ring slot p if p < S, else in slot S + (p - S) mod W: the newest token overwrites the one that leaves the window, and
slot j of a row whose newest position is t is in use exactly if j <= t.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.cache.schedule import PREFILL_MODES, RowCounts, Segment, SegmentTensors, plan_segments, split_call
from rlkv.eviction.base import EvictionPolicy

BLOCK = 512  # queries of a local prompt that attend together: the cost is linear in the prompt


@dataclass(frozen=True)
class CacheSettings(LocalSizes):
    """What the compressible heads keep: ``sink`` first and ``window`` last real tokens of each row.

    With ``eviction`` they keep what that policy chooses instead, and ``sink`` and ``window`` have no effect.
    """

    sink: int = 16
    window: int = 64
    prefill: str = "full"
    eviction: EvictionPolicy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill not in PREFILL_MODES:
            raise ValueError(f"unknown prefill {self.prefill!r}: choose one of {', '.join(PREFILL_MODES)}")
        if self.eviction is not None and not isinstance(self.eviction, EvictionPolicy):
            raise ValueError(
                f"eviction is {self.eviction!r}, which is not a policy: pass an instance, such as "
                "rlkv.eviction.RKV(budget=256)"
            )

    @property
    def ring(self) -> int:
        """Entries that a compressible head holds for one row: R = S + W."""
        return self.sink + self.window


@dataclass(frozen=True)
class Padding:
    """Left padding of a batch: ``counts`` int64 ``[B]``, and the extremes as plain ints."""

    counts: Tensor
    smallest: int
    largest: int

    @classmethod
    def of(cls, counts: Tensor) -> Padding | None:
        """None if no row is padded."""
        smallest, largest = (int(x) for x in torch.aminmax(counts))
        return cls(counts, smallest, largest) if largest else None

    def select(self, rows: Tensor) -> Padding | None:
        return Padding.of(self.counts.index_select(0, rows.to(self.counts.device)))

    def to(self, device: torch.device) -> Padding:
        return Padding(self.counts.to(device), self.smallest, self.largest)

    def real(self, num_tokens: int) -> Tensor:
        """bool [B, num_tokens]: which columns hold real tokens."""
        return torch.arange(num_tokens, device=self.counts.device) >= self.counts[:, None]


def read_padding(attention_mask: Tensor | None, known: Padding | None, start: int, length: int) -> Padding | None:
    """The padding that a 2D mask ``[B, start + length]`` describes; ``known`` is that of the cache if start > 0.

    Raises:
        ValueError: if padding lies anywhere but at the start of the rows, or changes between two calls.
    """
    end = start + length
    if attention_mask is None:
        return known if start else None
    if attention_mask.shape[-1] != end:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[-1]} columns but the cache will hold {end} tokens: pass one "
            "column for every token so far, cached and new"
        )
    padding = known if start else Padding.of(end - attention_mask.sum(-1))
    expected = True if padding is None else padding.real(end).to(attention_mask.device)
    if not (attention_mask == expected).all():
        raise ValueError(
            "attention_mask masks tokens that are not padding at the start of a row: this cache takes left padding "
            "only, the same in every call (set tokenizer.padding_side = 'left')"
        )
    return padding


@dataclass(frozen=True)
class CallPart:
    """Tokens of a call that are read in one way (:func:`rlkv.cache.schedule.split_call`).

    ``start``: columns before them; ``segments``: how an eviction policy stores them, empty without one.
    """

    start: int
    length: int
    in_full: bool
    segments: list[Segment] = field(default_factory=list)


@dataclass
class CacheState:
    """What the layers of one cache share.

    ``limit`` is the length at which generation ends, if known; ``row_counts`` where the rows stand under an eviction
    policy; ``record`` whether the positions of cached tokens are noted; ``planned`` as of :class:`RowCounts`.
    """

    settings: CacheSettings
    limit: int | None = None
    padding: Padding | None = None
    row_counts: RowCounts | None = None
    record: bool = False
    planned: Tensor | None = None

    def begin_call(self, mask: Tensor | None, start: int, length: int, rows: int) -> list[CallPart]:
        """Note the padding, cut the call into its parts, and plan how an eviction policy stores them."""
        self.padding = read_padding(mask, self.padding, start, length)
        policy = self.settings.eviction
        parts = [CallPart(*part) for part in split_call(self.settings.prefill, start, length)]
        if policy is None:
            return parts
        counts = RowCounts.start(rows, self.planned) if self.row_counts is None else self.row_counts
        padded = self.padding.counts if self.padding is not None else None
        protect = policy.protect_prompt and start == 0
        for part in parts:
            span = (part.start, part.length, part.in_full)
            part.segments.extend(plan_segments(policy, counts, padded, *span, protect=protect))
            counts = part.segments[-1].after
        self.row_counts = counts
        return parts

    def join(self, other: CacheState, rows: tuple[int, int], layout: JoinLayout) -> None:
        """Append the rows of ``other``; ``rows``: how many each has."""
        parts = []
        for state, count, columns in zip((self, other), rows, (layout.own, layout.others), strict=True):
            padding = torch.zeros(count, dtype=torch.long) if state.padding is None else state.padding.counts
            parts.append(padding + layout.columns - columns)
        device = next((state.padding.counts.device for state in (self, other) if state.padding is not None), "cpu")
        self.padding = Padding.of(torch.cat([part.to(device) for part in parts]))
        self.limit = layout.limit
        if self.row_counts is not None and other.row_counts is not None:
            self.row_counts = self.row_counts.join(other.row_counts)


@dataclass(frozen=True)
class JoinLayout:
    """The rows of two caches, of ``own`` and ``others`` columns, in one of ``columns``; text ends at ``limit``."""

    own: int
    others: int
    columns: int
    limit: int | None


@dataclass(frozen=True)
class Block:
    """Tokens ``begin <= i < end`` of a call, attending to the R ring entries and to themselves.

    Each slot then takes the new token ``source`` int64 ``[B or 1, R]``, if it is ``fresh`` (bool).
    """

    begin: int
    end: int
    mask: Tensor  # bool [B or 1, 1, end - begin, R + end - begin]
    source: Tensor
    fresh: Tensor


class CallLayout:
    """Indices and masks that all layers share in one part of a call; each is built once, when first asked for."""

    def __init__(self, part: CallPart, state: CacheState, device: torch.device) -> None:
        self.settings, self.device = state.settings, device
        self.start, self.length, self.in_full = part.start, part.length, part.in_full
        self.end = self.start + self.length
        self.segments = [SegmentTensors(segment, device) for segment in part.segments]
        self.padding = state.padding.to(device) if state.padding is not None else None

    @property
    def is_prompt(self) -> bool:
        """Whether all heads attend to the whole part in full, with nothing cached before it."""
        return self.start == 0 and self.length > 1 and self.in_full

    @property
    def is_causal(self) -> bool:
        """Whether a plain causal mask, which needs no tensor, is right for the full heads."""
        return self.start == 0 and self.length > 1 and self.padding is None

    @cached_property
    def full_mask(self) -> Tensor | None:
        """What full heads see: bool ``[B or 1, 1, n, T]``, or None where a causal mask is enough."""
        if self.is_causal or (self.length == 1 and self.padding is None):
            return None
        if self.padding is None:
            real = torch.ones(1, self.end, dtype=torch.bool, device=self.device)
        else:
            real = self.padding.real(self.end)
        if self.length == 1:
            return real[:, None, None, :]
        columns = torch.arange(self.end, device=self.device)
        queries = columns[self.start :, None]
        # a padding query sees itself: a row of -inf alone would be NaN in some kernels
        return ((real[:, None, :] & (columns <= queries)) | (columns == queries))[:, None]

    # One token: written first, read after.

    @cached_property
    def ring_slot(self) -> int | Tensor:
        """Slot of the new token: one int, or int64 ``[B]`` where rows are padded differently."""
        sink, window = self.settings.sink, self.settings.window
        if self.padding is not None and self.padding.largest > self.padding.smallest:
            positions = (self.start - self.padding.counts).clamp(min=0)
            return torch.where(positions < sink, positions, sink + (positions - sink) % window)
        position = max(0, self.start - self._least_padding)
        return position if position < sink else sink + (position - sink) % window

    @cached_property
    def ring_view(self) -> int:
        """How many slots are in use in the row that uses most."""
        return min(self.settings.ring, max(1, self.end - self._least_padding))

    @cached_property
    def ring_mask(self) -> Tensor | None:
        """bool ``[B, 1, 1, ring_view]``, only while some row has empty slots."""
        if self.padding is None or self.end - self.padding.largest >= self.ring_view:
            return None
        newest = (self.start - self.padding.counts).clamp(min=0)[:, None]
        return (torch.arange(self.ring_view, device=self.device) <= newest)[:, None, None, :]

    @property
    def _least_padding(self) -> int:
        return self.padding.smallest if self.padding is not None else 0

    # Several tokens: read first (what was cached and the call's own tokens), written after.

    @cached_property
    def whole_write(self) -> tuple[Tensor, Tensor]:
        """``source`` and ``fresh`` (see :class:`Block`) of all tokens of the call at once."""
        return self._write(self.start, self.end)

    @cached_property
    def blocks(self) -> list[Block]:
        """The part in blocks; one if it is read in full: queries see all earlier tokens of their block."""
        step, blocks = self.length if self.in_full else BLOCK, []
        for begin in range(self.start, self.end, step):
            end = min(begin + step, self.end)
            span = (begin - self.start, end - self.start)
            blocks.append(Block(*span, self._block_mask(begin, end), *self._write(begin, end)))
        return blocks

    @cached_property
    def _counts(self) -> Tensor:
        """int64 ``[B or 1, 1]``: padding of each row."""
        if self.padding is None:
            return torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return self.padding.counts[:, None]

    def _block_mask(self, begin: int, end: int) -> Tensor:
        ring, sink, window = self.settings.ring, self.settings.sink, self.settings.window
        query = torch.arange(begin, end, device=self.device) - self._counts
        key = torch.cat([self._ring_positions(begin - self._counts), query], dim=1)[:, None, :]
        query = query[:, :, None]
        seen = (key < sink) | (key > query - window)
        if self.in_full:
            seen[:, :, ring:] = True
        seen &= (key >= 0) & (key <= query)
        # a padding query sees itself, as in full_mask
        seen[:, :, ring:] |= torch.eye(end - begin, dtype=torch.bool, device=self.device)
        return seen[:, None]

    def _write(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        after = self._ring_positions(end - self._counts)
        source = (after + self._counts - begin).clamp(0, end - begin - 1)
        return source, after >= (begin - self._counts).clamp(min=0)

    def _ring_positions(self, held: Tensor) -> Tensor:
        """int64 ``[B, R]``: the position in each slot once ``held`` ``[B, 1]`` tokens were cached; -1 if empty."""
        slot = torch.arange(self.settings.ring, device=self.device)
        newest = held - 1
        in_window = newest - (newest - slot) % self.settings.window
        position = torch.where(slot < self.settings.sink, slot, in_window)
        return torch.where(slot <= newest, position, -1)
