"""Stores of a layer's KV, and the two simple ones: a growing buffer for full heads, a ring for compressible ones.

Shapes: B rows, H heads of this store, G query heads per KV head, n new tokens, T tokens cached, R = S + W ring entries,
D size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rlkv.cache.attend import attend, grown_capacity, resized
from rlkv.cache.plan import CacheState, CallLayout, RingWrite


class Store(ABC):
    """KV of some heads of a layer.

    Attributes:
        planes: what is held per entry, ``[B, H, entries, ...]``, by name: "keys", "values", ... (after ``allocate``).
    """

    def __init__(self, num_heads: int, state: CacheState) -> None:
        self.num_heads, self.state = num_heads, state
        self.planes: dict[str, Tensor] = {}

    @property
    def keys(self) -> Tensor:
        return self.planes["keys"]

    @property
    def values(self) -> Tensor:
        return self.planes["values"]

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one token of one head: its key and its value."""
        return (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        """Make buffers of ``entries`` for the batch, device and dtype of the first states ``[B, H, n, D]``."""
        for name, states in (("keys", key), ("values", value)):
            self.planes[name] = states.new_empty(states.shape[0], self.num_heads, entries, states.shape[-1])

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> Tensor:
        """Store the new states ``[B, H, n, D]`` and attend: query ``[B, H, G, n, D]`` -> its shape."""

    @abstractmethod
    def store(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> None:
        """Store the states of a whole prompt without attending to anything; arguments as of :meth:`attend`."""

    @abstractmethod
    def used_nbytes(self, tokens: int) -> int:
        """Bytes in use after ``tokens`` tokens: without headroom and empty entries."""

    @abstractmethod
    def held(self, row: int, tokens: int) -> Tensor:
        """Which of a row's ``tokens`` real tokens each head holds: bool ``[H, tokens]`` on the CPU."""

    def tensors(self) -> list[Tensor]:
        """All tensors that the store holds for the sake of the KV cache."""
        return list(self.planes.values())

    def select_rows(self, rows: Tensor) -> None:
        """Keep (or repeat, or reorder) the rows ``rows``, int64 ``[B']``."""
        self.planes = {name: plane.index_select(0, rows) for name, plane in self.planes.items()}

    def reset(self) -> None:  # noqa: B027
        """Forget all tokens; memory is kept for the next ones."""

    def reserve(self, capacity: int, used: int) -> None:
        """Buffers of ``capacity`` entries, of which the first ``used`` are kept."""
        for name in self.planes:  # one after the other: never both old and new of all
            self.planes[name] = resized(self.planes[name], capacity, used)


class FullStore(Store):
    """Everything, in buffers that grow; ``reserved`` tokens get memory at once, exactly (0: grow with the text)."""

    def __init__(self, num_heads: int, state: CacheState, reserved: int) -> None:
        super().__init__(num_heads, state)
        self.reserved = reserved

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value, self.reserved or grown_capacity(0, key.shape[2], self.state.limit))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> Tensor:
        self.store(query, key, value, plan, scale)
        keys, values = self.keys.narrow(2, 0, plan.end), self.values.narrow(2, 0, plan.end)
        return attend(query, keys, values, plan.full_mask, plan.is_causal, scale)

    def store(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> None:
        if plan.end > self.keys.shape[2]:
            self.reserve(grown_capacity(self.keys.shape[2], plan.end, self.state.limit), plan.start)
        self.keys.narrow(2, plan.start, plan.length).copy_(key)
        self.values.narrow(2, plan.start, plan.length).copy_(value)

    def used_nbytes(self, tokens: int) -> int:
        return self.num_heads * self.keys.shape[0] * tokens * self.entry_nbytes

    def held(self, row: int, tokens: int) -> Tensor:
        return torch.ones(self.num_heads, tokens, dtype=torch.bool)


class RingStore(Store):
    """The first S and the last W real tokens of each row, in a ring of S + W slots (:mod:`rlkv.cache.plan`)."""

    def allocate(self, key: Tensor, value: Tensor, entries: int = 0) -> None:
        super().allocate(key, value, self.state.settings.ring)
        for ring in self.planes.values():
            ring.zero_()  # an empty slot is masked, but 0 * NaN of stale memory would still be NaN

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> Tensor:
        if plan.length == 1:
            for ring, states in ((self.keys, key), (self.values, value)):
                _write_token(ring, states, plan.ring_slot)
            keys, values = self.keys.narrow(2, 0, plan.ring_view), self.values.narrow(2, 0, plan.ring_view)
            return attend(query, keys, values, plan.ring_mask, False, scale)
        parts = []
        for block in plan.blocks:
            span = slice(block.begin, block.end)
            keys = torch.cat([self.keys, key[:, :, span]], dim=2)
            values = torch.cat([self.values, value[:, :, span]], dim=2)
            parts.append(attend(query[:, :, :, span], keys, values, block.mask, False, scale))
            _write_tokens(self.keys, key[:, :, span], block.write)
            _write_tokens(self.values, value[:, :, span], block.write)
        return torch.cat(parts, dim=3)

    def store(self, query: Tensor, key: Tensor, value: Tensor, plan: CallLayout, scale: float) -> None:
        _write_tokens(self.keys, key, plan.whole_write)
        _write_tokens(self.values, value, plan.whole_write)

    def used_nbytes(self, tokens: int) -> int:
        padding = self.state.padding
        counts = padding.counts if padding is not None else torch.zeros(self.keys.shape[0])
        in_ring = int((tokens - counts).clamp(0, self.state.settings.ring).sum())
        return self.num_heads * in_ring * self.entry_nbytes

    def held(self, row: int, tokens: int) -> Tensor:
        position, settings = torch.arange(tokens), self.state.settings
        return ((position < settings.sink) | (position >= tokens - settings.window)).expand(self.num_heads, -1)


def _write_token(ring: Tensor, states: Tensor, slot: int | Tensor) -> None:
    if isinstance(slot, int):
        ring.narrow(2, slot, 1).copy_(states)
    else:
        ring.scatter_(2, slot[:, None, None, None].expand_as(states), states)


def _write_tokens(ring: Tensor, states: Tensor, write: RingWrite) -> None:
    index = write.source[:, None, :, None].expand(*ring.shape[:3], states.shape[3])
    ring.copy_(torch.where(write.fresh[:, None, :, None], states.gather(2, index), ring))
