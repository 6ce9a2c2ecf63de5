"""The full KV cache for decoding: a buffer with room to grow, where transformers' own copies it at every token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from rlkv.cache.stores import stack_rows

GROWTH = 1.5


class GrowingLayer(DynamicLayer):
    """Keys and values ``[B, H, capacity, D]``, of which the first T are in use; grows by half when full."""

    keys: Any
    values: Any

    def __init__(self, limit: int | None = None) -> None:
        """``limit``: the room taken ahead stops at this many tokens (more of them are still stored)."""
        super().__init__()
        self.limit = limit
        self._store: tuple[Tensor, ...] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self._store is None or end > self._store[0].shape[2]:
            self._store = self._grown(end, key_states, value_states)
        for store, new in zip(self._store, (key_states, value_states), strict=True):
            store[:, :, start:end] = new
        self.keys, self.values = (store[:, :, :end] for store in self._store)
        return self.keys, self.values

    def _grown(self, end: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        capacity = self._capacity(end)
        key, value = (new.new_empty(*new.shape[:2], capacity, new.shape[3]) for new in like)
        used = self.get_seq_length()
        if used:
            key[:, :, :used], value[:, :, :used] = self.keys, self.values
        return key, value

    def _capacity(self, needed: int) -> int:
        capacity = int(needed * GROWTH)
        return capacity if self.limit is None else max(needed, min(capacity, self.limit))

    def join(self, other: GrowingLayer, columns: int) -> None:
        ahead = [layer.limit - layer.get_seq_length() for layer in (self, other) if layer.limit is not None]
        self.limit = columns + max(ahead) if ahead else None
        capacity = self._capacity(columns)
        pairs = ((self.keys, other.keys), (self.values, other.values))
        self._store = tuple(stack_rows(list(pair), columns, capacity) for pair in pairs)
        self.keys, self.values = (store[:, :, :columns] for store in self._store)

    # any change of the rows drops the buffer, which is allocated again at the next token

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._store = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._store = None

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._store = None


class GrowingCache(Cache):
    """A cache of :class:`GrowingLayer`, in which rows of another such cache can join."""

    layers: Any
    can_join = True

    def join(self, other: GrowingCache, columns: int) -> None:
        """Append the rows of ``other``; all rows then end at the last of ``columns`` columns."""
        for layer, joining in zip(self.layers, other.layers, strict=True):
            layer.join(joining, columns)


def full_cache(config: Any, limit: int | None = None) -> Cache:
    """An empty full cache for the model of ``config``, with room for ``limit`` tokens at most.

    A :class:`GrowingCache`, or transformers' own where some layer does not keep the whole past (sliding, linear).
    """
    # what transformers' own cache makes of each layer is the one description that all models share
    stock = DynamicCache(config=config.get_text_config(decoder=True))
    if any(type(layer) is not DynamicLayer for layer in stock.layers):
        return stock
    return GrowingCache(layers=[GrowingLayer(limit) for _ in stock.layers])
