"""Stores of a layer's KV: a growing buffer for full heads, a ring for compressible ones.

Shapes: B rows, H heads of the store, G query heads per KV head, n new tokens, R ring entries, D
size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.attention.branches import grouped_attention, one_query_attention
from rlkv.attention.softmax import Softmax
from rlkv.cache.plan import CacheState, CallLayout, JoinLayout

# A buffer grows by 1/16 of its entries, rounded up to a multiple of 16: little headroom, and
# copying 16 entries a token (on average) costs little compared with reading all of them in each
# step.
GROWTH = GRANULE = 16


def grown_capacity(capacity: int, needed: int, limit: int | None) -> int:
    """Return the entries of the next buffer, up to ``limit`` unless it must hold more.

    Args:
        capacity: entries of the buffer so far.
        needed: entries that it must hold.
        limit: the length at which generation ends, if known.
    """
    wanted = max(needed, capacity + capacity // GROWTH)
    rounded = -(-wanted // GRANULE) * GRANULE
    # a text beyond the limit is one that goes on after its generation
    return rounded if limit is None or needed > limit else min(rounded, limit)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    softmax: Softmax,
) -> Tensor:
    """Compute attention: query ``[B, H, G, n, D]``, keys and values ``[B, H, N, D]``."""
    if query.shape[3] == 1:
        out = one_query_attention(query.flatten(1, 2), keys, values, mask, softmax)
    else:
        out = grouped_attention(query.flatten(1, 2), keys, values, mask, causal, softmax)
    return out.reshape(*query.shape[:4], values.shape[3])


def stack_rows(parts: list[Tensor], columns: int, capacity: int) -> Tensor:
    """Copy the rows of buffers ``[B, H, T, ...]`` into one in which all end at ``columns``.

    Longer parts lose entries at their front, which must be padding of every row; what is added is
    0.

    Returns:
        ``[sum of B, H, capacity, ...]``.
    """
    first = parts[0]
    rows = sum(len(part) for part in parts)
    out = first.new_zeros(rows, first.shape[1], capacity, *first.shape[3:])
    row = 0
    for part in parts:
        kept = part[:, :, max(0, part.shape[2] - columns) :]
        out[row : row + len(part), :, columns - kept.shape[2] : columns] = kept
        row += len(part)
    return out


class Store(ABC):
    """KV of some heads of a layer.

    Attributes:
        planes: what is held per entry, ``[B, H, entries, ...]``, by name.
    """

    def __init__(self, num_heads: int, state: CacheState) -> None:
        self.num_heads = num_heads
        self.state = state
        self.planes: dict[str, Tensor] = {}

    @property
    def keys(self) -> Tensor:
        return self.planes["keys"]

    @property
    def values(self) -> Tensor:
        return self.planes["values"]

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one token of one head: its key and its value, whose dtypes may differ."""
        return sum(states.shape[3] * states.element_size() for states in (self.keys, self.values))

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        """Make buffers of ``entries`` for batch, device and dtype of states ``[B, H, n, D]``."""
        for name, states in (("keys", key), ("values", value)):
            shape = (states.shape[0], self.num_heads, entries, states.shape[3])
            self.planes[name] = states.new_empty(shape)

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        """Store new states ``[B, H, n, D]`` and attend: query ``[B, H, G, n, D]`` -> its shape."""

    @abstractmethod
    def store(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> None:
        """Store the states of a whole prompt without attending; arguments as of :meth:`attend`."""

    @abstractmethod
    def used_nbytes(self, tokens: int) -> int:
        """Return the bytes in use after ``tokens`` tokens: without headroom and empty entries."""

    @abstractmethod
    def held(self, row: int, tokens: int) -> Tensor:
        """Return which of a row's ``tokens`` real tokens are held: bool ``[H, tokens]``, CPU."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the store holds."""
        return list(self.planes.values())

    def select_rows(self, rows: Tensor) -> None:
        """Keep (or repeat, or reorder) the rows ``rows``, int64 ``[B']``."""
        for name, plane in self.planes.items():
            self.planes[name] = plane.index_select(0, rows)

    @abstractmethod
    def join(self, other: Any, layout: JoinLayout) -> None:
        """Append the rows of ``other``, a store of the same kind and heads."""

    def reset(self) -> None:  # noqa: B027
        """Forget all tokens; memory is kept for the next ones."""

    def reserve(self, capacity: int, used: int) -> None:
        """Make buffers of ``capacity`` entries, of which the first ``used`` are kept.

        Where memory ends, all stay as they were.
        """
        new = {}
        for name, old in self.planes.items():
            new[name] = old.new_empty(*old.shape[:2], capacity, *old.shape[3:])
            new[name].narrow(2, 0, used).copy_(old.narrow(2, 0, used))
        self.planes.update(new)


class FullStore(Store):
    """Everything, in buffers that grow, up to the state's ``limit``."""

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value, grown_capacity(0, key.shape[2], self.state.limit))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        self.store(query, key, value, layout, softmax.scale)
        keys = self.keys.narrow(2, 0, layout.end)
        values = self.values.narrow(2, 0, layout.end)
        return attend(query, keys, values, layout.full_mask, layout.is_causal, softmax)

    def make_room(self, layout: CallLayout) -> None:
        capacity = self.keys.shape[2]
        if layout.end > capacity:
            self.reserve(grown_capacity(capacity, layout.end, self.state.limit), layout.start)

    def look_ahead(self, used: int, tokens: int) -> int:
        """Make room for ``tokens`` more than the ``used`` ones, or as many as may come.

        Returns the entries that there are then.
        """
        wanted = used + tokens
        if self.state.limit is not None:
            wanted = min(wanted, self.state.limit)
        if wanted > self.keys.shape[2]:
            self.reserve(wanted, used)
        return self.keys.shape[2]

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> None:
        self.make_room(layout)
        layout.write(self.keys, key)
        layout.write(self.values, value)

    def join(self, other: FullStore, layout: JoinLayout) -> None:
        capacity = grown_capacity(0, layout.columns, layout.limit)
        for name, plane in self.planes.items():
            parts = [plane[:, :, : layout.own], other.planes[name][:, :, : layout.others]]
            self.planes[name] = stack_rows(parts, layout.columns, capacity)

    def used_nbytes(self, tokens: int) -> int:
        return self.num_heads * self.keys.shape[0] * tokens * self.entry_nbytes

    def held(self, row: int, tokens: int) -> Tensor:
        return torch.ones(self.num_heads, tokens, dtype=torch.bool)


class RingStore(Store):
    """The first S and last W real tokens of each row, in R slots (:mod:`rlkv.cache.plan`)."""

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value, self.state.ring)
        for ring in self.planes.values():
            ring.zero_()  # an empty slot is masked, but 0 * NaN of stale memory would still be NaN

    def make_room(self, layout: CallLayout) -> None:
        self._resize(layout.ring)  # may differ for the first prompt after a reset

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        self.make_room(layout)
        if layout.length == 1:
            _write_token(self.keys, key, layout.ring_slot)
            _write_token(self.values, value, layout.ring_slot)
            keys = self.keys.narrow(2, 0, layout.ring_view)
            values = self.values.narrow(2, 0, layout.ring_view)
            return attend(query, keys, values, layout.ring_mask, False, softmax)
        parts = []
        for block in layout.blocks:
            span = slice(block.begin, block.end)
            keys = torch.cat([self.keys, key[:, :, span]], dim=2)
            values = torch.cat([self.values, value[:, :, span]], dim=2)
            parts.append(attend(query[:, :, :, span], keys, values, block.mask, False, softmax))
            _write_tokens(self.keys, key[:, :, span], block.source, block.fresh)
            _write_tokens(self.values, value[:, :, span], block.source, block.fresh)
        return torch.cat(parts, dim=3)

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> None:
        self.make_room(layout)
        _write_tokens(self.keys, key, *layout.whole_write)
        _write_tokens(self.values, value, *layout.whole_write)

    def select_rows(self, rows: Tensor) -> None:
        # the rows that stay may need fewer slots: the state's sinks are theirs already
        self.planes = {name: plane[:, :, : self.state.ring] for name, plane in self.planes.items()}
        super().select_rows(rows)

    def join(self, other: RingStore, layout: JoinLayout) -> None:
        # slots follow from a token's position in its row, which padding does not change
        slots = max(self.state.ring, other.state.ring)
        self._resize(slots)
        other._resize(slots)
        for name, ring in self.planes.items():
            self.planes[name] = torch.cat([ring, other.planes[name]])

    def used_nbytes(self, tokens: int) -> int:
        padding = self.state.padding
        most = self.state.first_kept(self.keys.shape[0]) + self.state.settings.window
        real = torch.full_like(most, tokens) if padding is None else tokens - padding.on_host
        return self.num_heads * int(torch.minimum(real, most).sum()) * self.entry_nbytes

    def held(self, row: int, tokens: int) -> Tensor:
        position = torch.arange(tokens)
        sink = self.state.first_kept(self.keys.shape[0])[row]
        kept = (position < sink) | (position >= tokens - self.state.settings.window)
        return kept.expand(self.num_heads, -1)

    def _resize(self, slots: int) -> None:
        """Make the ring ``slots`` long, the new ones 0."""
        for name, ring in self.planes.items():
            if ring.shape[2] != slots:
                self.planes[name] = F.pad(ring, (0, 0, 0, slots - ring.shape[2]))


def _write_token(ring: Tensor, states: Tensor, slot: int | Tensor) -> None:
    if isinstance(slot, int):
        ring.narrow(2, slot, 1).copy_(states)
    else:
        ring.scatter_(2, slot[:, None, None, None].expand_as(states), states)


def _write_tokens(ring: Tensor, states: Tensor, source: Tensor, fresh: Tensor) -> None:
    index = source[:, None, :, None].expand(*ring.shape[:3], states.shape[3])
    ring.copy_(torch.where(fresh[:, None, :, None], states.gather(2, index), ring))
