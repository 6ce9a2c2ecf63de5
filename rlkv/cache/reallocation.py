"""HeadReallocationCache: the full KV cache for the heads that need it, a small one for all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from rlkv.cache.evicting import EvictingStore, KeptTokens
from rlkv.cache.layer import ReallocationLayer
from rlkv.cache.plan import CacheSettings, CacheState, CallLayout, CallPart, JoinLayout
from rlkv.cache.stores import RingStore, Store, stack_rows
from rlkv.eviction.base import EvictionPolicy

GROWTH = 1.5


class GrowingLayer(DynamicLayer):
    """Keys and values ``[B, H, capacity, D]``, of which the first T are in use.

    Grows by half when full.
    """

    keys: Any
    values: Any

    def __init__(self, limit: int | None = None) -> None:
        """``limit``: the room taken ahead stops at this many tokens (more of them are still
        stored).
        """
        super().__init__()
        self.limit = limit
        self._store: tuple[Tensor, ...] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
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
        ahead = [
            layer.limit - layer.get_seq_length()
            for layer in (self, other)
            if layer.limit is not None
        ]
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

    A :class:`GrowingCache`, or transformers' own where some layer does not keep the whole past
    (sliding, linear).
    """
    # what transformers' own cache makes of each layer is the one description that all models share
    stock = DynamicCache(config=config.get_text_config(decoder=True))
    if any(type(layer) is not DynamicLayer for layer in stock.layers):
        return stock
    return GrowingCache(layers=[GrowingLayer(limit) for _ in stock.layers])


class HeadReallocationCache(Cache):
    """A transformers cache in which compressible heads hold a constant number of tokens.

    It needs the attention implementation ``rlkv_realloc`` (``rlkv.compress`` sets both).  With B
    rows, F full and C compressible heads over all layers, heads of D elements of e bytes, and T
    tokens (left padding counts) it holds ::

        nbytes      = 2 * B * D * e * (F * capacity + C * (S + W))
        full_nbytes = 2 * B * D * e * (F + C) * T

    where ``capacity`` is T with ``reserve=T``, and otherwise grows by a sixteenth, in multiples of
    16, up to the length at which ``generate`` must end.

    Full heads see everything before a token; compressible heads the first S real tokens of its row
    and the last W, itself included, and with ``prefill="full"`` all earlier tokens of the same
    call, which is compressed afterwards; ``"published"`` reads all but the last 50 tokens of each
    row so, as RLKV's evaluator does.

    *Protected prompt.*  With ``protect_prompt`` compressible heads also keep the whole prompt: row
    b, whose first call had P_b real tokens, keeps max(S, P_b) first tokens, and S in the formula
    above is the largest of these numbers in the batch.  Tokens of later calls (further turns) are
    kept as generated ones are.

    *Eviction.*  With a policy, compressible heads keep what it chooses instead: up to ``budget +
    buffer`` entries of each row (more for policies without a fixed budget).  ``nbytes`` then also
    counts the queries and scores that the policy needs.  In a call of several tokens,
    ``prefill="full"`` evicts at its end and ``"local"`` at the same tokens as calls of one token
    would (``"published"``: first so, then so).  Positions stay those of the text.

    Rows may be padded on the left, the same in every call.  Beams are reordered; ``crop`` is
    refused.

    Args:
        full: bool ``[num_layers, num_kv_heads]``, True for full heads (``HeadAllocation.full``).
        sink, window: S first and W last real tokens of each row that compressible heads keep.
        prefill: ``"full"``, ``"local"`` or ``"published"``.
        reserve: tokens for which full heads get memory up front, exactly; 0: grow with the text.
        eviction: the policy of the compressible heads; None: ``sink`` and ``window``.
        record: note the positions of cached tokens: ``kept`` lists what each eviction kept,
            ``held`` what is cached.
        stock_layers: makes transformers' own cache for the layers, by number, that are not changed
            (sliding windows).
        protect_prompt: compressible heads keep all tokens of the first call; a policy has an option
            of its own for it.

    Raises:
        ValueError: for a malformed allocation, sizes out of range or an unknown ``prefill``.
    """

    def __init__(
        self,
        full: Tensor,
        sink: int = 16,
        window: int = 64,
        prefill: str = "full",
        reserve: int = 0,
        eviction: EvictionPolicy | None = None,
        record: bool = False,
        stock_layers: Callable[[], dict[int, DynamicSlidingWindowLayer]] = dict,
        protect_prompt: bool = False,
    ) -> None:
        full = torch.as_tensor(full)
        if full.dtype != torch.bool or full.ndim != 2:
            raise ValueError(
                f"full must be bool [layers, KV heads], got {full.dtype} {list(full.shape)}"
            )
        if reserve < 0:
            raise ValueError(f"reserve is {reserve}: it must be 0 or more tokens")
        self.state = CacheState(
            CacheSettings(sink, window, prefill, eviction, protect_prompt), record=record
        )
        self.full = full.cpu()
        self.kept: list[KeptTokens] = []
        self._make_stock, self._stock = stock_layers, stock_layers()
        self._layers = {
            layer: ReallocationLayer(
                heads, self.state, partial(self._compressible_store, layer), reserve
            )
            for layer, heads in enumerate(self.full)
            if layer not in self._stock
        }
        every: dict[int, CacheLayerMixin] = {**self._stock, **self._layers}
        super().__init__(layers=[every[layer] for layer in sorted(every)])

    def _compressible_store(self, layer: int, heads: list[int]) -> Store:
        if self.settings.eviction is None:
            return RingStore(len(heads), self.state)
        return EvictingStore(heads, layer, self.state, self.settings.eviction, self.kept)

    @property
    def settings(self) -> CacheSettings:
        return self.state.settings

    def fill(self, key: Tensor, value: Tensor) -> None:
        """For measurements: store the states ``[B, H, T, D]`` of a prompt in every layer of an
        empty cache.
        """
        if self.settings.eviction is not None:
            raise ValueError(
                "fill() has no queries to give an eviction policy: let the model read a prompt "
                "instead"
            )
        self.state.begin_call(None, 0, key.shape[2], key.shape[0])
        plan = CallLayout(CallPart(0, key.shape[2], in_full=True), self.state, key.device)
        for layer in self._layers.values():
            layer.store(key[:, :, None], key, value, plan, 1.0)

    # memory

    def nbytes(self) -> int:
        """Bytes of KV held: all KV tensors as allocated, with the unused headroom of the growing
        buffers.
        """
        return self._stock_nbytes() + sum(
            tensor.nbytes for layer in self._allocated() for tensor in layer.tensors()
        )

    def used_nbytes(self) -> int:
        """Bytes of the entries in use: ``nbytes()`` less headroom and empty entries."""
        return self._stock_nbytes() + sum(layer.used_nbytes() for layer in self._allocated())

    def full_nbytes(self) -> int:
        """Bytes that the full cache would hold for the same tokens (as transformers' DynamicCache
        does).
        """
        return self._stock_nbytes() + sum(layer.full_nbytes() for layer in self._allocated())

    def _allocated(self) -> list[ReallocationLayer]:
        return [layer for layer in self._layers.values() if layer.is_initialized]

    def _stock_nbytes(self) -> int:
        """Bytes of the layers that are not changed: they are always held, so they count on both
        sides.
        """
        tensors = (
            tensor for layer in self._stock.values() for tensor in (layer.keys, layer.values)
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def held(self, row: int) -> Tensor:
        """Which tokens of a row each head holds: bool ``[layers, KV heads, real tokens of the
        row]``.

        Under an eviction policy it needs a cache made with ``record=True``.
        """
        padding = self.state.padding
        tokens = self.get_seq_length() - (int(padding.counts[row]) if padding is not None else 0)
        held = torch.zeros(*self.full.shape, tokens, dtype=torch.bool)
        for number, layer in self._layers.items():
            held[number] = layer.held(row, tokens)
        for number, stock in self._stock.items():
            assert stock.keys is not None
            held[number] = torch.arange(tokens) >= tokens - stock.keys.shape[2]
        return held

    # rows

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, int64 ``[B']``."""
        if self.state.sinks is not None:
            self.state.sinks = self.state.sinks.select(indices)
        for layer in self._layers.values():
            layer.select_rows(indices)
        for stock in self._stock.values():
            if stock.is_initialized:
                stock.batch_select_indices(indices.to(stock.device))
        if self.state.padding is not None:
            self.state.padding = self.state.padding.select(indices).nonzero
        if self.state.row_counts is not None:
            self.state.row_counts = self.state.row_counts.select(indices)

    @property
    def can_join(self) -> bool:
        """Whether rows of another cache can join: not where layers with a sliding window are left
        alone.
        """
        return not self._stock

    def join(self, other: HeadReallocationCache, columns: int) -> None:
        """Append the rows of ``other``, which has the same heads and settings and has read its
        prompts.

        All rows then end at the last of ``columns`` columns: columns of padding are added at the
        front, or taken off.
        """
        own, others = self.get_seq_length(), other.get_seq_length()
        ahead = [
            c.state.limit - c.get_seq_length() for c in (self, other) if c.state.limit is not None
        ]
        layout = JoinLayout(own, others, columns, columns + max(ahead) if ahead else None)
        rows = (self._allocated()[0].batch_size, other._allocated()[0].batch_size)
        for number, layer in self._layers.items():
            layer.join(other._layers[number], layout)
        self.state.join(other.state, rows, layout)

    def batch_repeat_interleave(self, repeats: int) -> None:
        layers = self._allocated()
        if layers:
            self.batch_select_indices(torch.arange(layers[0].batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused with ValueError for anything but 0: see :meth:`ReallocationLayer.crop`."""
        for layer in self._layers.values():
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, the padding and what was kept; memory stays."""
        self.state.padding = self.state.sinks = self.state.row_counts = self.state.planned = None
        self.kept.clear()
        for layer in self._layers.values():
            layer.reset()
        # transformers' own reset of a sliding layer keeps its length
        self._stock = self._make_stock()
        for number, stock in self._stock.items():
            self.layers[number] = stock
