"""The plan of one forward call: where its tokens go in the cache, and what each may see.

Shapes: B rows, n tokens of this call, T tokens after it, S sinks, W window, R ring entries.
A row's *position* counts its real tokens from 0; left padding has negative positions.  Position p
lives in ring slot p if p < S, else in slot S + (p - S) mod W: the newest token overwrites the one
that leaves the window, and slot j < S + W of a row whose newest position is t is in use exactly if
j <= t.  With a protected prompt S is a number of each row, and R is the largest S + W.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

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
from rlkv.kernels.step import DecodeStep
from rlkv.utils.runtime import KERNEL, check_switches, switched_on

# which heads a policy evicts from
COMPRESSIBLE = "compressible"
FULL_HEADS = "full"
EVICT_FROM = (COMPRESSIBLE, FULL_HEADS)
BLOCK = 512  # queries of a local prompt that attend together: the cost is linear in the prompt


@dataclass(frozen=True)
class PerRow:
    """One number of each row: ``counts`` int64 ``[B]``, and the extremes as plain ints."""

    counts: Tensor
    smallest: int
    largest: int

    @classmethod
    def of(cls, counts: Tensor) -> PerRow:
        smallest, largest = torch.aminmax(counts)
        return cls(counts, int(smallest), int(largest))

    @cached_property
    def on_host(self) -> Tensor:
        """``counts`` on the CPU: a GPU is waited for once."""
        return self.counts.cpu()

    @property
    def differ(self) -> bool:
        """Return whether not all rows have the same number."""
        return self.largest > self.smallest

    def select(self, rows: Tensor) -> PerRow:
        return PerRow.of(self.counts.index_select(0, rows.to(self.counts.device)))

    def to(self, device: torch.device) -> PerRow:
        return PerRow(self.counts.to(device), self.smallest, self.largest)

    def real(self, num_tokens: int) -> Tensor:
        """Return which columns left padding leaves to real tokens: bool ``[B, num_tokens]``."""
        return torch.arange(num_tokens, device=self.counts.device) >= self.counts[:, None]

    @property
    def nonzero(self) -> PerRow | None:
        """None if all numbers are 0: no row is padded."""
        return self if self.largest else None


def read_padding(
    attention_mask: Tensor | None, known: PerRow | None, start: int, length: int
) -> PerRow | None:
    """Read the left padding from a 2D mask ``[B, start + length]``; None if no row is padded.

    Args:
        known: the padding of the cache, which holds for start > 0.

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
            "tokens: pass one column for every token so far, cached and new"
        )
    padding = known if start else PerRow.of(end - attention_mask.sum(-1)).nonzero
    expected = True if padding is None else padding.real(end).to(attention_mask.device)
    if not (attention_mask == expected).all():
        raise ValueError(
            "attention_mask masks tokens that are not padding at the start of a row: this cache "
            "takes left padding only, the same in every call (set tokenizer.padding_side = 'left')"
        )
    return padding


@dataclass(frozen=True)
class CacheSettings(LocalSizes):
    """Settings of compressible heads: they keep ``sink`` first and ``window`` last real tokens.

    Attributes:
        prefill: how a prompt is read: ``full``, ``local`` or ``published``.
        eviction: with a policy they keep what it chooses instead, and ``sink``, ``window`` and
            ``protect_prompt`` have no effect.
        protect_prompt: keep of the first tokens at least the prompt, those of the first call.
        evict_from: ``compressible``, or ``full``: the policy is that of the full heads, and
            compressible ones keep sinks and a window (two budgets).
    """

    sink: int = 16
    window: int = 64
    prefill: str = "full"
    eviction: EvictionPolicy | None = None
    protect_prompt: bool = False
    evict_from: str = COMPRESSIBLE

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
        if self.evict_from not in EVICT_FROM:
            raise ValueError(
                f"unknown evict_from {self.evict_from!r}: choose one of {', '.join(EVICT_FROM)}"
            )
        if self.evict_from == FULL_HEADS and self.eviction is None:
            raise ValueError(
                "evict_from='full' says where a policy evicts, and there is none: pass eviction, "
                "such as rlkv.eviction.RandomEviction(ratio=0.5)"
            )
        check_switches()

    def policy_of(self, is_full: bool) -> EvictionPolicy | None:
        """Return the policy that evicts from the full heads, or from the compressible ones."""
        return self.eviction if is_full == (self.evict_from == FULL_HEADS) else None

    def evicts_nothing(self, full: Tensor) -> bool:
        """Return whether all heads keep everything under an allocation, bool ``[L, H]``."""
        return bool(full.all()) and self.policy_of(True) is None

    def check_heads(self, num_full: int) -> None:
        """Raise ``ValueError`` if a policy of the full heads has none to evict from."""
        if self.evict_from == FULL_HEADS and num_full == 0:
            raise ValueError(
                "the policy is to evict from the full heads, but none is full: use a lower "
                "sparsity, or let it evict from the compressible heads"
            )

    def check_positions(self, positions: int) -> None:
        """Raise ``ValueError`` if the heads would keep more than a model of ``positions`` reads.

        Their entries are allocated from the start.
        """
        if self.policy_of(False) is None and max(self.sink, self.window) > positions:
            raise ValueError(
                f"sink is {self.sink} and window is {self.window}, but the model has {positions} "
                "positions: no head can keep more tokens than that"
            )

    def with_policy(
        self, policy: EvictionPolicy | None, evict_from: str = COMPRESSIBLE
    ) -> CacheSettings:
        """Return these settings with ``policy``, which has its own field for protected prompts."""
        changed = replace(self, eviction=policy, evict_from=evict_from)
        has_window = changed.policy_of(False) is None
        return replace(changed, protect_prompt=self.protect_prompt and has_window)

    def sinks(self, prompts: Tensor) -> Tensor:
        """Return S of rows whose first calls have ``prompts`` int64 ``[B]`` tokens."""
        if self.protect_prompt:
            return prompts.clamp(min=self.sink)
        return torch.full_like(prompts, self.sink)


@dataclass(frozen=True)
class CallPart:
    """Tokens of a call that are read in one way (:func:`rlkv.cache.schedule.split_call`).

    Attributes:
        start: columns before them.
        in_full: whether they see each other in all heads.
        segments: how an eviction policy stores them, empty without one.
    """

    start: int
    length: int
    in_full: bool
    segments: list[Segment] = field(default_factory=list)


@dataclass
class CacheState:
    """State that the layers of one cache share.

    Attributes:
        limit: the length at which generation ends, if known.
        padding: left padding of each row; None: none.
        sinks: S of each row; None: all rows keep ``settings.sink``.
        row_counts: where the rows stand under an eviction policy.
        record: whether the positions of cached tokens are noted.
        planned: lengths of texts that fix budgets (:class:`~rlkv.cache.schedule.RowCounts`).
        decode_kernel: whether the decode kernel takes the calls that it serves.
        decode_step: what these calls share instead of numbers of their own, while a graph of one is
            recorded (:mod:`rlkv.rollout.graphed`).
    """

    settings: CacheSettings
    limit: int | None = None
    padding: PerRow | None = None
    sinks: PerRow | None = None
    row_counts: RowCounts | None = None
    record: bool = False
    planned: Tensor | None = None
    decode_kernel: bool = field(default_factory=partial(switched_on, KERNEL))
    decode_step: DecodeStep | None = None

    def begin_call(self, mask: Tensor | None, start: int, length: int, rows: int) -> list[CallPart]:
        """Note the padding, cut the call into its parts, and plan how a policy stores them."""
        self.padding = read_padding(mask, self.padding, start, length)
        policy = self.settings.eviction
        spans = split_call(self.settings.prefill, start, length)
        if self.settings.protect_prompt and start == 0:
            self.sinks = PerRow.of(self.settings.sinks(length - self.padding_counts(rows)))
        if policy is None:
            return [CallPart(*span) for span in spans]
        counts = RowCounts.start(rows, self.planned) if self.row_counts is None else self.row_counts
        padding = None if self.padding is None else self.padding.on_host
        protect = policy.protect_prompt and start == 0
        parts = []
        for span in spans:
            segments = plan_segments(policy, counts, padding, *span, protect=protect)
            parts.append(CallPart(*span, segments))
            counts = segments[-1].after
        self.row_counts = counts
        return parts

    def layout(self, part: CallPart, device: torch.device) -> CallLayout:
        """Make what the layers on ``device`` share in a part of a call."""
        return CallLayout(part, self, device)

    def padding_counts(self, rows: int) -> Tensor:
        """Return the left padding of each of the ``rows`` rows: int64 ``[B]``."""
        if self.padding is None:
            return torch.zeros(rows, dtype=torch.long)
        return self.padding.counts

    @property
    def ring(self) -> int:
        """R: entries for which a compressible head has memory for each row."""
        sink = self.settings.sink if self.sinks is None else self.sinks.largest
        return sink + self.settings.window

    def first_kept(self, rows: int) -> Tensor:
        """Return S of each of the ``rows`` rows: int64 ``[B]`` on the CPU."""
        return torch.full((rows,), self.settings.sink) if self.sinks is None else self.sinks.on_host

    def join(self, other: CacheState, rows: tuple[int, int], layout: JoinLayout) -> None:
        """Append the rows of ``other``; ``rows``: how many each has."""
        own = self.padding_counts(rows[0]) + layout.columns - layout.own
        others = other.padding_counts(rows[1]) + layout.columns - layout.others
        # counts that no mask gave are on the CPU
        device = own.device if others.device.type == "cpu" else others.device
        self.padding = PerRow.of(torch.cat([own.to(device), others.to(device)])).nonzero
        self.limit = layout.limit
        if self.sinks is not None and other.sinks is not None:
            sinks = [self.sinks.counts.to(device), other.sinks.counts.to(device)]
            self.sinks = PerRow.of(torch.cat(sinks))
        if self.row_counts is not None and other.row_counts is not None:
            self.row_counts = self.row_counts.join(other.row_counts)


@dataclass(frozen=True)
class JoinLayout:
    """The rows of two caches, of ``own`` and ``others`` columns, in one of ``columns``.

    Attributes:
        limit: the length at which generation ends, if known.
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
        self.device = device
        self.window = state.settings.window
        self.ring = state.ring
        self.start = part.start
        self.length = part.length
        self.end = part.start + part.length
        self.in_full = part.in_full
        self.segments = [SegmentTensors(segment, device) for segment in part.segments]
        self.padding = None if state.padding is None else state.padding.to(device)
        self.sinks = None if state.sinks is None else state.sinks.to(device)
        self.sink = state.settings.sink if state.sinks is None else state.sinks.largest
        if state.decode_step is not None:
            self.decode_step = state.decode_step

    @property
    def is_prompt(self) -> bool:
        """Return whether all heads attend to the whole part, with nothing cached before it."""
        return self.start == 0 and self.length > 1 and self.in_full

    @property
    def is_causal(self) -> bool:
        """Return whether a plain causal mask, without a tensor, is right for full heads."""
        return self.start == 0 and self.length > 1 and self.padding is None

    @cached_property
    def full_mask(self) -> Tensor | None:
        """Mask of the full heads: bool ``[B or 1, 1, n, T]``; None: a causal one is enough."""
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

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Write the states of the call's tokens into the columns of ``buffer`` that are theirs."""
        buffer.narrow(2, self.start, self.length).copy_(states)

    # One token: written first, read after.

    @cached_property
    def ring_slot(self) -> int | Tensor:
        """Slot of the new token: one int, or int64 ``[B]`` where it is not the same in all rows."""
        if any(rows is not None and rows.differ for rows in (self.padding, self.sinks)):
            positions = (self.start - self._counts[:, 0]).clamp(min=0)
            sinks = self._sinks[:, 0]
            in_window = sinks + (positions - sinks) % self.window
            return torch.where(positions < sinks, positions, in_window)
        position = max(0, self.start - self._least_padding)
        if position < self.sink:
            return position
        return self.sink + (position - self.sink) % self.window

    @cached_property
    def ring_view(self) -> int:
        """Number of slots that are read: none behind them is in use in any row."""
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
        """The numbers from which the decode kernel computes slots and masks itself."""
        # a fill: a copy would wait for the device
        start = torch.full((1,), self.start, device=self.device)
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
        """The part in blocks, whose queries see the earlier tokens; one block if read in full."""
        step = self.length if self.in_full else BLOCK
        blocks = []
        for begin in range(self.start, self.end, step):
            end = min(begin + step, self.end)
            source, fresh = self._write(begin, end)
            mask = self._block_mask(begin, end)
            blocks.append(Block(begin - self.start, end - self.start, mask, source, fresh))
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
        """Return the position in each slot after ``held`` ``[B, 1]`` tokens; -1: empty."""
        slot = torch.arange(self.ring, device=self.device)
        newest = held - 1
        in_window = newest - (newest - slot) % self.window
        position = torch.where(slot < self._sinks, slot, in_window)
        return torch.where((slot <= newest) & (slot < self._sinks + self.window), position, -1)
