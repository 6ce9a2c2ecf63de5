"""The two simple stores of a layer: a growing buffer for full heads, a ring of S + W entries for compressible ones.

Shapes: B rows, H heads of this store, G query heads per KV head, n new tokens, T tokens cached, R = S + W ring entries,
D size of a head.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rlkv.cache.attend import attend, grown_capacity, resized
from rlkv.cache.plan import CacheState, CallLayout, RingWrite


class Store(Protocol):
    """KV of some heads of a layer.  ``keys``, ``values``: the tensors that hold it, once ``allocate`` was called."""

    @property
    def keys(self) -> torch.Tensor: ...

    @property
    def values(self) -> torch.Tensor: ...

    def allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Make buffers for the batch, device and dtype of the first states ``[B, H, n, D]``."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> torch.Tensor:
        """Store the new states ``[B, H, n, D]`` and attend: query ``[B, H, G, n, D]`` -> its shape."""

    def store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> None:
        """Store the states of a whole prompt without attending to anything; arguments as of :meth:`attend`."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the store holds for the sake of the KV cache."""

    def used_nbytes(self, tokens: int) -> int:
        """Bytes in use after ``tokens`` tokens: without headroom and empty entries."""

    def held(self, row: int, tokens: int) -> torch.Tensor:
        """Which of a row's ``tokens`` real tokens each head holds: bool ``[H, tokens]`` on the CPU."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep (or repeat, or reorder) the rows ``rows``, int64 ``[B']``."""

    def reset(self) -> None:
        """Forget all tokens; memory is kept for the next ones."""


def entry_nbytes(store: Store) -> int:
    """Bytes of one token of one head: its key and its value."""
    return (store.keys.shape[3] + store.values.shape[3]) * store.keys.element_size()


class FullStore:
    """Everything, in buffers that grow; ``reserve`` tokens get memory at once, exactly (0: grow with the text)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, num_heads: int, state: CacheState, reserve: int) -> None:
        self.num_heads, self.state, self.reserve = num_heads, state, reserve

    def allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        b, _, n, d = key.shape
        capacity = self.reserve or grown_capacity(0, n, self.state.limit)
        self.keys = key.new_empty(b, self.num_heads, capacity, d)
        self.values = value.new_empty(b, self.num_heads, capacity, value.shape[-1])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> torch.Tensor:
        self.store(query, key, value, plan, scale)
        keys, values = self.keys.narrow(2, 0, plan.end), self.values.narrow(2, 0, plan.end)
        return attend(query, keys, values, plan.full_mask, plan.is_causal, scale)

    def store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> None:
        if plan.end > self.keys.shape[2]:
            capacity = grown_capacity(self.keys.shape[2], plan.end, self.state.limit)
            self.keys = resized(self.keys, capacity, plan.start)  # one after the other: never old and new of both
            self.values = resized(self.values, capacity, plan.start)
        self.keys.narrow(2, plan.start, plan.length).copy_(key)
        self.values.narrow(2, plan.start, plan.length).copy_(value)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values]

    def used_nbytes(self, tokens: int) -> int:
        return self.num_heads * self.keys.shape[0] * tokens * entry_nbytes(self)

    def held(self, row: int, tokens: int) -> torch.Tensor:
        return torch.ones(self.num_heads, tokens, dtype=torch.bool)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def reset(self) -> None: ...


class RingStore:
    """The first S and the last W real tokens of each row, in a ring of S + W slots (:mod:`rlkv.cache.plan`)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, num_heads: int, state: CacheState) -> None:
        self.num_heads, self.state = num_heads, state

    def allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        shape = (key.shape[0], self.num_heads, self.state.settings.ring)
        # zeros: an empty slot is masked, but 0 * NaN of stale memory would still be NaN
        self.keys = key.new_zeros(*shape, key.shape[-1])
        self.values = value.new_zeros(*shape, value.shape[-1])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> torch.Tensor:
        if plan.length == 1:
            self._write_token(self.keys, key, plan.ring_slot)
            self._write_token(self.values, value, plan.ring_slot)
            keys, values = self.keys.narrow(2, 0, plan.ring_view), self.values.narrow(2, 0, plan.ring_view)
            return attend(query, keys, values, plan.ring_mask, False, scale)
        parts = []
        for block in plan.blocks:
            span = slice(block.begin, block.end)
            keys = torch.cat([self.keys, key[:, :, span]], dim=2)
            values = torch.cat([self.values, value[:, :, span]], dim=2)
            parts.append(attend(query[:, :, :, span], keys, values, block.mask, False, scale))
            self._write_tokens(self.keys, key[:, :, span], block.write)
            self._write_tokens(self.values, value[:, :, span], block.write)
        return torch.cat(parts, dim=3)

    def store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallLayout, scale: float
    ) -> None:
        self._write_tokens(self.keys, key, plan.whole_write)
        self._write_tokens(self.values, value, plan.whole_write)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values]

    def used_nbytes(self, tokens: int) -> int:
        padding = self.state.padding
        counts = padding.counts if padding is not None else torch.zeros(self.keys.shape[0])
        in_ring = int((tokens - counts).clamp(0, self.state.settings.ring).sum())
        return self.num_heads * in_ring * entry_nbytes(self)

    def held(self, row: int, tokens: int) -> torch.Tensor:
        position, settings = torch.arange(tokens), self.state.settings
        return ((position < settings.sink) | (position >= tokens - settings.window)).expand(self.num_heads, -1)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def reset(self) -> None: ...

    @staticmethod
    def _write_token(ring: torch.Tensor, states: torch.Tensor, slot: int | torch.Tensor) -> None:
        if isinstance(slot, int):
            ring.narrow(2, slot, 1).copy_(states)
        else:
            ring.scatter_(2, slot[:, None, None, None].expand_as(states), states)

    @staticmethod
    def _write_tokens(ring: torch.Tensor, states: torch.Tensor, write: RingWrite) -> None:
        index = write.source[:, None, :, None].expand(*ring.shape[:3], states.shape[3])
        ring.copy_(torch.where(write.fresh[:, None, :, None], states.gather(2, index), ring))
