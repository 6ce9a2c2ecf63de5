"""A cache for speculation: every head keeps all tokens, and drafts read few of them in some.

Shapes: B rows, n new tokens, S sinks, W window, T columns.  A row's tokens lie in columns one after
the other, so tokens are taken back by counting fewer of them: the next ones overwrite them.  Each
row has a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlkv.attention.softmax import Softmax
from rlkv.cache.plan import CacheState, CallLayout, CallPart, PerRow
from rlkv.cache.reallocation import HeadReallocationCache
from rlkv.cache.stores import FullStore, Store, attend


@dataclass
class KeptState(CacheState):
    """State that the layers of a :class:`LosslessCache` share.

    Attributes:
        lengths: columns of each row, padding included; None: all rows have as many.
        drafting: whether compressible heads read little.
    """

    lengths: PerRow | None = None
    drafting: bool = False
    decode_kernel: bool = False  # it knows rings only

    def layout(self, part: CallPart, device: torch.device) -> KeptLayout:
        return KeptLayout(part, self, device)


class KeptLayout(CallLayout):
    """Indices and masks of a call whose rows may begin at different columns."""

    def __init__(self, part: CallPart, state: KeptState, device: torch.device) -> None:
        super().__init__(part, state, device)
        self.drafting = state.drafting
        first = torch.full((1,), self.start, device=device)
        if state.lengths is not None and state.lengths.differ:
            first = state.lengths.counts.to(device)
        # of the new tokens: int64 [B or 1, n]
        self.columns = first[:, None] + torch.arange(self.length, device=device)

    def write(self, buffer: Tensor, states: Tensor) -> None:
        if len(self.columns) == 1:
            super().write(buffer, states)
            return
        # no row has tokens there yet, and shorter ones read them: masked, but 0 * NaN is NaN
        buffer.narrow(2, self.start, self.length).zero_()
        buffer.scatter_(2, self.columns[:, None, :, None].expand_as(states), states)

    @cached_property
    def full_mask(self) -> Tensor | None:
        if len(self.columns) == 1:
            return super().full_mask
        column = torch.arange(self.end, device=self.device)
        seen = (column >= self._counts[:, :, None]) & (column <= self.columns[:, :, None])
        return seen[:, None]

    @cached_property
    def drafts_read(self) -> tuple[Tensor, Tensor]:
        """Return what a draft's token sees in compressible heads: S first and W last tokens.

        Returns:
            Columns int64 ``[B or 1, S + W]``, and which of them count: bool ``[B or 1, 1, 1, S +
            W]``.
        """
        position = self.columns - self._counts
        sinks = torch.arange(self.sink, device=self.device)
        window = position + torch.arange(1 - self.window, 1, device=self.device)
        # a sink within the window is read as one of the window
        is_sink = (sinks < self._sinks) & (sinks <= position - self.window)
        read = torch.cat([sinks.expand(len(window), -1), window], dim=1)
        counts = torch.cat([is_sink, window >= 0], dim=1)
        return (read + self._counts).clamp(0, self.end - 1), counts[:, None, None, :]


class KeptStore(FullStore):
    """Everything of compressible heads, of which drafts read sinks and window."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        assert isinstance(layout, KeptLayout)
        if not layout.drafting:
            return super().attend(query, key, value, layout, softmax)
        self.store(query, key, value, layout, softmax.scale)
        columns, mask = layout.drafts_read

        def read(states: Tensor) -> Tensor:
            shape = (*states.shape[:2], -1, states.shape[3])
            return states.gather(2, columns[:, None, :, None].expand(shape))

        return attend(query, read(self.keys), read(self.values), mask, False, softmax)


class LosslessCache(HeadReallocationCache):
    """A transformers cache that keeps every token in every head, as much as the full cache.

    Arguments as of :class:`HeadReallocationCache`: ``sink``, ``window`` and ``protect_prompt`` say
    what compressible heads read in calls of one token inside :meth:`drafting`; all other calls read
    everything.
    """

    state: KeptState
    state_type = KeptState

    def _make_store(self, layer: int, heads: list[int], is_full: bool) -> Store:
        if is_full:
            return super()._make_store(layer, heads, is_full)
        return KeptStore(len(heads), self.state)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Let compressible heads read sinks and window only."""
        self.state.drafting = True
        try:
            yield
        finally:
            self.state.drafting = False

    def set_lengths(self, lengths: Tensor) -> None:
        """Count the first ``lengths`` int64 ``[B]`` columns of each row, padding included.

        The next tokens overwrite what lies behind them.
        """
        self.state.lengths = PerRow.of(lengths)
        for layer in self._layers.values():
            layer.length = self.state.lengths.largest
