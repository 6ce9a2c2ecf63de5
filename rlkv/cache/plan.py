"""Where the tokens of one forward call go in the cache, and what each of them may see.

Shapes: B rows, n tokens of this call, T tokens after it, S sinks, W window, R ring entries.
A row's *position* counts its real tokens from 0; left padding has negative positions.  Position p
lives in ring slot p if p < S, else in slot S + (p - S) mod W: the newest token overwrites the one
that leaves the window, and slot j < S + W of a row whose newest position is t is in use exactly if
j <= t.  With a protected prompt S is a number of each row, and R is the largest S + W.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.cache.schedule import (
    PREFILL_MODES,
    RowCounts,
    Segment,
    SegmentTensors,
    plan_segments,
    split_call,
)
from rlkv.eviction.base import EvictionPolicy
from rlkv.kernels.step import DecodeStep, switched_on


@dataclass(frozen=True)
class PerRow:
    """One number of each row: ``counts`` int64 ``[B]``, and the extremes as plain ints."""

    counts: Tensor
    smallest: int
    largest: int

    @classmethod
    def of(cls, counts: Tensor) -> PerRow:
        smallest, largest = (int(x) for x in torch.aminmax(counts))
        return cls(counts, smallest, largest)

    @cached_property
    def on_host(self) -> Tensor:
        """``counts`` on the CPU: a GPU is waited for once."""
        return self.counts.cpu()

    @property
    def differ(self) -> bool:
        """Whether not all rows have the same number."""
        return self.largest > self.smallest

    def select(self, rows: Tensor) -> PerRow:
        return PerRow.of(self.counts.index_select(0, rows.to(self.counts.device)))

    def to(self, device: torch.device) -> PerRow:
        return PerRow(self.counts.to(device), self.smallest, self.largest)

    def real(self, num_tokens: int) -> Tensor:
        """Of left padding, bool ``[B, num_tokens]``: which columns hold real tokens."""
        return torch.arange(num_tokens, device=self.counts.device) >= self.counts[:, None]

    @property
    def nonzero(self) -> PerRow | None:
        """None if all numbers are 0: of left padding, if no row is padded."""
        return self if self.largest else None


def read_padding(
    attention_mask: Tensor | None, known: PerRow | None, start: int, length: int
) -> PerRow | None:
    """The left padding that a 2D mask ``[B, start + length]`` describes, None if no row is padded.

    ``known`` is that of the cache if start > 0.

    Raises:
        ValueError: if padding lies anywhere but at the start of the rows, or changes between two
            calls.
    """
    end = start + length
    if attention_mask is None:
        return known if start else None
    if attention_mask.shape[-1] != end:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[-1]} columns but the cache will hold {end} "
            "tokens: pass one "
            "column for every token so far, cached and new"
        )
    padding = known if start else PerRow.of(end - attention_mask.sum(-1)).nonzero
    expected = True if padding is None else padding.real(end).to(attention_mask.device)
    if not (attention_mask == expected).all():
        raise ValueError(
            "attention_mask masks tokens that are not padding at the start of a row: this cache "
            "takes left padding "
            "only, the same in every call (set tokenizer.padding_side = 'left')"
        )
    return padding


BLOCK = 512  # queries of a local prompt that attend together: the cost is linear in the prompt


@dataclass(frozen=True)
class CacheSettings(LocalSizes):
    """What the compressible heads keep: ``sink`` first and ``window`` last real tokens of each row.

    ``protect_prompt``: of the first ones at least the prompt, that is, the tokens of the first
    call.  With ``eviction`` they keep what that policy chooses instead, and ``sink``, ``window``
    and ``protect_prompt`` have no effect.
    """

    sink: int = 16
    window: int = 64
    prefill: str = "full"
    eviction: EvictionPolicy | None = None
    protect_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill not in PREFILL_MODES:
            raise ValueError(
                f"unknown prefill {self.prefill!r}: choose one of {', '.join(PREFILL_MODES)}"
            )
        if self.eviction is not None and not isinstance(self.eviction, EvictionPolicy):
            raise ValueError(
                f"eviction is {self.eviction!r}, which is not a policy: pass an instance, such as "
                "rlkv.eviction.RKV(budget=256)"
            )
        if not isinstance(self.protect_prompt, bool):
            raise ValueError(f"protect_prompt is {self.protect_prompt!r}: it must be True or False")
        switched_on()  # refuses a misspelt value before a model is loaded

    def check_positions(self, positions: int) -> None:
        """Raise ``ValueError`` if the heads would keep more than a model of ``positions`` reads.

        Their entries are allocated from the start.
        """
        if self.eviction is None and max(self.sink, self.window) > positions:
            raise ValueError(
                f"sink is {self.sink} and window is {self.window}, but the model has {positions} "
                "positions: no head "
                "can keep more tokens than that"
            )

    def with_policy(self, policy: EvictionPolicy | None) -> CacheSettings:
        """These settings under ``policy``, which has a field of its own for protected prompts."""
        return replace(self, eviction=policy, protect_prompt=self.protect_prompt and policy is None)

    def sinks(self, prompts: Tensor) -> Tensor:
        """First tokens that a compressible head keeps of rows with ``prompts`` tokens in their
        first call.
        """
        return (
            prompts.clamp(min=self.sink)
            if self.protect_prompt
            else torch.full_like(prompts, self.sink)
        )


@dataclass(frozen=True)
class CallPart:
    """Tokens of a call that are read in one way (:func:`rlkv.cache.schedule.split_call`).

    ``start``: columns before them; ``segments``: how an eviction policy stores them, empty without
    one.
    """

    start: int
    length: int
    in_full: bool
    segments: list[Segment] = field(default_factory=list)


@dataclass
class CacheState:
    """What the layers of one cache share.

    ``limit`` is the length at which generation ends, if known; ``sinks`` how many first tokens of
    each row compressible heads keep, None where all keep ``settings.sink``; ``row_counts`` where
    the rows stand under an eviction policy; ``record`` whether the positions of cached tokens are
    noted; ``planned`` as of :class:`RowCounts`; ``decode_kernel`` whether the decode kernel takes
    the calls that it serves.
    """

    settings: CacheSettings
    limit: int | None = None
    padding: PerRow | None = None
    sinks: PerRow | None = None
    row_counts: RowCounts | None = None
    record: bool = False
    planned: Tensor | None = None
    decode_kernel: bool = field(default_factory=switched_on)

    def begin_call(self, mask: Tensor | None, start: int, length: int, rows: int) -> list[CallPart]:
        """Note the padding, cut the call into its parts, and plan how an eviction policy stores
        them.
        """
        self.padding = read_padding(mask, self.padding, start, length)
        policy = self.settings.eviction
        if self.settings.protect_prompt and policy is None and start == 0:
            padding = (
                torch.zeros(rows, dtype=torch.long) if self.padding is None else self.padding.counts
            )
            self.sinks = PerRow.of(self.settings.sinks(length - padding))
        parts = [CallPart(*part) for part in split_call(self.settings.prefill, start, length)]
        if policy is None:
            return parts
        counts = RowCounts.start(rows, self.planned) if self.row_counts is None else self.row_counts
        padded = self.padding.on_host if self.padding is not None else None
        protect = policy.protect_prompt and start == 0
        for part in parts:
            span = (part.start, part.length, part.in_full)
            part.segments.extend(plan_segments(policy, counts, padded, *span, protect=protect))
            counts = part.segments[-1].after
        self.row_counts = counts
        return parts

    @property
    def ring(self) -> int:
        """R: entries for which a compressible head has memory for each row."""
        return self.settings.window + (
            self.settings.sink if self.sinks is None else self.sinks.largest
        )

    def first_kept(self, rows: int) -> Tensor:
        """S of each of the ``rows`` rows: int64 ``[B]`` on the CPU."""
        return torch.full((rows,), self.settings.sink) if self.sinks is None else self.sinks.on_host

    def join(self, other: CacheState, rows: tuple[int, int], layout: JoinLayout) -> None:
        """Append the rows of ``other``; ``rows``: how many each has."""
        parts = []
        for state, count, columns in zip(
            (self, other), rows, (layout.own, layout.others), strict=True
        ):
            padding = (
                torch.zeros(count, dtype=torch.long)
                if state.padding is None
                else state.padding.counts
            )
            parts.append(padding + layout.columns - columns)
        device = next(
            (state.padding.counts.device for state in (self, other) if state.padding is not None),
            "cpu",
        )
        self.padding = PerRow.of(torch.cat([part.to(device) for part in parts])).nonzero
        self.limit = layout.limit
        if self.sinks is not None and other.sinks is not None:
            counts = [sinks.counts.to(device) for sinks in (self.sinks, other.sinks)]
            self.sinks = PerRow.of(torch.cat(counts))
        if self.row_counts is not None and other.row_counts is not None:
            self.row_counts = self.row_counts.join(other.row_counts)


@dataclass(frozen=True)
class JoinLayout:
    """The rows of two caches, of ``own`` and ``others`` columns, in one of ``columns``.

    Text ends at ``limit``.
    """

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
    """Indices and masks that all layers share in one part of a call.

    Each is built once, when first asked for.
    """

    def __init__(self, part: CallPart, state: CacheState, device: torch.device) -> None:
        self.window, self.ring, self.device = state.settings.window, state.ring, device
        self.start, self.length, self.in_full = part.start, part.length, part.in_full
        self.end = self.start + self.length
        self.segments = [SegmentTensors(segment, device) for segment in part.segments]
        self.padding = state.padding.to(device) if state.padding is not None else None
        self.sinks = state.sinks.to(device) if state.sinks is not None else None
        self.sink = state.settings.sink if state.sinks is None else state.sinks.largest

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
        """Slot of the new token: one int, or int64 ``[B]`` where it is not the same in all rows."""
        if any(rows is not None and rows.differ for rows in (self.padding, self.sinks)):
            positions, sinks = (self.start - self._counts[:, 0]).clamp(min=0), self._sinks[:, 0]
            return torch.where(
                positions < sinks, positions, sinks + (positions - sinks) % self.window
            )
        position = max(0, self.start - self._least_padding)
        return (
            position if position < self.sink else self.sink + (position - self.sink) % self.window
        )

    @cached_property
    def ring_view(self) -> int:
        """How many slots are read: none behind them is in use in any row."""
        return min(self.ring, max(1, self.end - self._least_padding))

    @cached_property
    def ring_mask(self) -> Tensor | None:
        """bool ``[B, 1, 1, ring_view]``, only where some row has empty slots."""
        most_padding = self.padding.largest if self.padding is not None else 0
        fewest_sinks = self.sinks.smallest if self.sinks is not None else self.sink
        if min(self.end - most_padding, fewest_sinks + self.window) >= self.ring_view:
            return None
        newest = (self.start - self._counts).clamp(min=0)
        slot = torch.arange(self.ring_view, device=self.device)
        return ((slot <= newest) & (slot < self._sinks + self.window))[:, None, None, :]

    @cached_property
    def decode_step(self) -> DecodeStep:
        """The same for the decode kernel, which computes slots and masks itself."""
        start = torch.full(
            (1,), self.start, device=self.device
        )  # a fill: a copy would wait for the device
        return DecodeStep(start, self._counts[:, 0], self._sinks[:, 0], self.window)

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
        """The part in blocks; one if it is read in full: queries see all earlier tokens of their
        block.
        """
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
            return torch.zeros_like(self._sinks)
        return self.padding.counts[:, None]

    @cached_property
    def _sinks(self) -> Tensor:
        """int64 ``[B or 1, 1]``: S of each row."""
        if self.sinks is None:
            return torch.full((1, 1), self.sink, device=self.device)
        return self.sinks.counts[:, None]

    def _block_mask(self, begin: int, end: int) -> Tensor:
        query = torch.arange(begin, end, device=self.device) - self._counts
        key = torch.cat([self._ring_positions(begin - self._counts), query], dim=1)[:, None, :]
        query = query[:, :, None]
        seen = (key < self._sinks[:, :, None]) | (key > query - self.window)
        if self.in_full:
            seen[:, :, self.ring :] = True
        seen = seen & (key >= 0) & (key <= query)
        # a padding query sees itself, as in full_mask
        seen[:, :, self.ring :] |= torch.eye(end - begin, dtype=torch.bool, device=self.device)
        return seen[:, None]

    def _write(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        after = self._ring_positions(end - self._counts)
        source = (after + self._counts - begin).clamp(0, end - begin - 1)
        return source, after >= (begin - self._counts).clamp(min=0)

    def _ring_positions(self, held: Tensor) -> Tensor:
        """int64 ``[B, R]``: the position in each slot once ``held`` ``[B, 1]`` tokens were cached.

        -1 if empty.
        """
        slot = torch.arange(self.ring, device=self.device)
        newest = held - 1
        in_window = newest - (newest - slot) % self.window
        position = torch.where(slot < self._sinks, slot, in_window)
        return torch.where((slot <= newest) & (slot < self._sinks + self.window), position, -1)
