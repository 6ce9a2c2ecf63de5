"""Caches for transformers: the full cache for heads that need it, a small one for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from rlkv.cache.evicting import EvictingStore, KeptTokens
from rlkv.cache.layer import LinearReallocationLayer, ReallocationLayer
from rlkv.cache.plan import (
    COMPRESSIBLE,
    CacheSettings,
    CacheState,
    CallLayout,
    CallPart,
    JoinLayout,
)
from rlkv.cache.stores import FullStore, RingStore, Store, grown_capacity, stack_rows
from rlkv.eviction.base import EvictionPolicy
from rlkv.models.layout import own_layers


class GrowingLayer(DynamicLayer):
    """Keys and values in buffers ``[B, H, capacity, D]``, of which the first T are in use.

    Args:
        limit: the length at which generation ends, if known: no room is taken beyond it.

    Attributes:
        place: int64 ``[1]`` on the device, where the next token goes while a CUDA graph of a step
            is recorded: attention then gets the whole buffers.
    """

    keys: Any
    values: Any

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.place: Tensor | None = None
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.place is not None:
            for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
                buffer.index_copy_(2, self.place, new)
            return self._buffers[0], self._buffers[1]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self._buffers or end > self._buffers[0].shape[2]:
            self._grow(end, key_states, value_states)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.set_length(end)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return super().get_seq_length() if self.place is None else self.place

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.place is None:
            return super().get_mask_sizes(query_length)
        return self._buffers[0].shape[2], 0

    def set_length(self, length: int) -> None:
        """Count ``length`` tokens of the buffers as in use."""
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def look_ahead(self, tokens: int) -> int:
        """Make room for ``tokens`` more, or as many as may come: the tokens that fit in then."""
        used = self.get_seq_length()
        wanted = used + tokens
        if self.limit is not None:
            wanted = min(wanted, self.limit)
        if not self._buffers or wanted > self._buffers[0].shape[2]:
            self._grow(wanted, self.keys, self.values)
            self.set_length(used)
        return self._buffers[0].shape[2]

    def _grow(self, needed: int, *like: Tensor) -> None:
        used = self.get_seq_length()
        capacity = grown_capacity(used, needed, self.limit)
        self._buffers = [new.new_empty(*new.shape[:2], capacity, new.shape[3]) for new in like]
        for buffer in self._buffers:
            buffer[:, :, used:] = 0  # a recorded step reads all of it, under a mask
        if used:
            self._buffers[0][:, :, :used] = self.keys
            self._buffers[1][:, :, :used] = self.values

    def join(self, other: GrowingLayer, columns: int) -> None:
        """Append the rows of ``other``; all rows then end at the last of ``columns`` columns."""
        ends = [(layer.limit, layer.get_seq_length()) for layer in (self, other)]
        self.limit = _joined_limit(columns, ends)
        capacity = grown_capacity(0, columns, self.limit)
        pairs = [[self.keys, other.keys], [self.values, other.values]]
        self._buffers = [stack_rows(pair, columns, capacity) for pair in pairs]
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self._buffers)

    # A change of the rows makes new tensors: the buffers, which hold the old ones, are dropped.

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = []

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._buffers = []

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._buffers = []


def _joined_limit(columns: int, ends: list[tuple[int | None, int]]) -> int | None:
    """Return the length at which joined rows end, given the limit and the length of each cache."""
    remaining = [limit - length for limit, length in ends if limit is not None]
    return columns + max(remaining) if remaining else None


class GrowingCache(Cache):
    """A cache of :class:`GrowingLayer`, in which rows of another such cache can join."""

    layers: Any
    can_join = True

    def join(self, other: GrowingCache, columns: int) -> None:
        """Append the rows of ``other``; all rows then end at the last of ``columns`` columns."""
        for layer, joining in zip(self.layers, other.layers, strict=True):
            layer.join(joining, columns)


def full_cache(config: Any, limit: int | None = None) -> Cache:
    """Make an empty full cache for the model of ``config``, with room for ``limit`` tokens at most.

    A :class:`GrowingCache`, or transformers' own where some layer does not keep the whole past
    (sliding, linear).
    """
    layers = own_layers(config)
    if any(type(layer) is not DynamicLayer for layer in layers):
        return DynamicCache(config=config.get_text_config(decoder=True))
    return GrowingCache(layers=[GrowingLayer(limit) for _ in layers])


def cached_states(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer of transformers' own cache: keys and values, linear states.

    Of a :class:`ReallocationLayer` only the linear states.
    """
    states: list[Any] = []
    if isinstance(layer, CacheLayerMixin):
        states = [layer.keys, layer.values]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


class HeadReallocationCache(Cache):
    """A transformers cache in which compressible heads hold a constant number of tokens.

    It needs the attention implementation ``rlkv_realloc`` (``rlkv.compress`` sets both).  With B
    rows, F full and C compressible heads over all layers, heads of D elements of e bytes, and T
    tokens (left padding counts) it holds ::

        nbytes      = 2 * B * D * e * (F * capacity + C * (S + W))
        full_nbytes = 2 * B * D * e * (F + C) * T

    where ``capacity`` grows by a sixteenth, in multiples of 16, up to the length at which
    ``generate`` must end (``state.limit``).

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
        sink: S, first real tokens of each row that compressible heads keep.
        window: W, last ones.
        prefill: ``"full"``, ``"local"`` or ``"published"``.
        eviction: the policy of the compressible heads; None: ``sink`` and ``window``.
        record: note the positions of cached tokens: ``kept`` lists what each eviction kept,
            ``held`` what is cached.
        stock_layers: makes transformers' own cache for the layers, by number, that are not changed
            (sliding windows, linear layers), and for those with a linear layer next to their
            attention, of which the linear states are taken over.
        heads: how many of the heads of ``full`` each layer has; None: all.
        protect_prompt: compressible heads keep all tokens of the first call; a policy has an option
            of its own for it.
        evict_from: ``"full"``: the policy is that of the full heads.

    Raises:
        ValueError: for a malformed allocation, sizes out of range or an unknown ``prefill``.
    """

    state_type: ClassVar[type[CacheState]] = CacheState

    def __init__(
        self,
        full: Tensor,
        sink: int = 16,
        window: int = 64,
        prefill: str = "full",
        eviction: EvictionPolicy | None = None,
        record: bool = False,
        stock_layers: Callable[[], dict[int, Any]] = dict,
        protect_prompt: bool = False,
        heads: Sequence[int] | None = None,
        evict_from: str = COMPRESSIBLE,
    ) -> None:
        full = torch.as_tensor(full)
        if full.dtype != torch.bool or full.ndim != 2:
            raise ValueError(
                f"full must be bool [layers, KV heads], got {full.dtype} {list(full.shape)}"
            )
        settings = CacheSettings(sink, window, prefill, eviction, protect_prompt, evict_from)
        self.state = self.state_type(settings, record=record)
        self.full = full.cpu()
        self.kept: list[KeptTokens] = []
        self._make_stock = stock_layers
        self._stock = stock_layers()
        self._layers: dict[int, ReallocationLayer] = {}
        layers: list[Any] = []
        for number, row in enumerate(self.full):
            own = row if heads is None else row[: heads[number]]
            arguments = (own, self.state, partial(self._make_store, number))
            stock = self._stock.get(number)
            if stock is None and not len(own):
                break  # from here on, layers read the keys and values of earlier ones
            if stock is None:
                self._layers[number] = ReallocationLayer(*arguments)
            elif type(stock) is LinearAttentionAndFullAttentionLayer:
                self._layers[number] = LinearReallocationLayer(*arguments, stock.number_of_states)
                del self._stock[number]
            layers.append(self._layers.get(number, stock))
        super().__init__(layers=layers)
        # id of the module whose call has begun, where layers could not tell that it failed
        self.reader: int | None = None

    def begin_call(self, module: Any, tokens: Tensor | None) -> None:
        """Check a call before any layer reads it.

        Args:
            module: that was called.
            tokens: ids or embeddings ``[B, n, ...]``, if the call has them.

        Raises:
            ValueError: for other rows than before, no tokens, or a call after one that failed in a
                model with other layers, whose states do not say what they have read.
        """
        if self.reader == id(module):
            raise ValueError(
                "an earlier call on this cache ended in an error, and layers without full "
                "attention may have read its tokens: start a new cache"
            )
        if tokens is not None:
            if tokens.shape[1] == 0:
                raise ValueError(
                    "the call has no new tokens: give generate(...) the whole text so far with its "
                    "attention_mask, and the model at least one token"
                )
            first = next(iter(self._layers.values()))  # all layers have as many
            first.check_rows(tokens.shape[0])
            is_writable = torch.is_inference_mode_enabled() or not first.is_initialized
            if not is_writable and first.stores[0].keys.is_inference():
                raise ValueError(
                    "this cache was begun under torch.inference_mode(), and can be written only "
                    "there: go on under it, or begin a new cache under torch.no_grad()"
                )
        if self.reader is None and not self.can_join:
            self.reader = id(module)

    def end_call(self, module: Any) -> None:
        """Note that the call of ``module`` has ended without an error."""
        if self.reader == id(module):
            self.reader = None

    def _make_store(self, layer: int, heads: list[int], is_full: bool) -> Store:
        policy = self.settings.policy_of(is_full)
        if policy is not None:
            return EvictingStore(heads, layer, self.state, policy, self.kept)
        if is_full:
            return FullStore(len(heads), self.state)
        return RingStore(len(heads), self.state)

    @property
    def settings(self) -> CacheSettings:
        return self.state.settings

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Store the states ``[B, H, T, D]`` of a prompt in every layer of an empty cache.

        For measurements, which need no model.
        """
        if self.settings.eviction is not None:
            raise ValueError(
                "fill() has no queries to give an eviction policy: let the model read a prompt "
                "instead"
            )
        self.state.begin_call(None, 0, key.shape[2], key.shape[0])
        layout = CallLayout(CallPart(0, key.shape[2], in_full=True), self.state, key.device)
        for layer in self._layers.values():
            layer.store(key[:, :, None], key, value, layout, 1.0)

    # memory

    def nbytes(self) -> int:
        """Return the bytes of all KV tensors as allocated, unused headroom included."""
        own = sum(tensor.nbytes for layer in self._allocated() for tensor in layer.tensors())
        return own + self.unchanged_nbytes()

    def used_nbytes(self) -> int:
        """Return the bytes of the entries in use: without headroom and empty entries."""
        return sum(layer.used_nbytes() for layer in self._allocated()) + self.unchanged_nbytes()

    def full_nbytes(self) -> int:
        """Return the bytes that transformers' DynamicCache would hold for the same tokens."""
        return sum(layer.full_nbytes() for layer in self._allocated()) + self.unchanged_nbytes()

    def unchanged_nbytes(self) -> int:
        """Return the bytes that both caches hold: of sliding windows and linear states."""
        return sum(state.nbytes for layer in self.layers for state in cached_states(layer))

    def _allocated(self) -> list[ReallocationLayer]:
        return [layer for layer in self._layers.values() if layer.is_initialized]

    def held(self, row: int) -> Tensor:
        """Return which tokens of a row each head holds: bool ``[layers, KV heads, tokens]``.

        Padding does not count.  Under an eviction policy it needs a cache made with
        ``record=True``.
        """
        padding = self.state.padding
        tokens = self.get_seq_length() - (int(padding.counts[row]) if padding is not None else 0)
        held = torch.zeros(*self.full.shape, tokens, dtype=torch.bool)
        for number, layer in self._layers.items():
            if layer.is_initialized:
                held[number, : layer.num_heads] = layer.held(row, tokens)
        for number, stock in self._stock.items():
            if not isinstance(stock, CacheLayerMixin) or stock.keys is None:
                continue  # a linear layer, or one of images, holds no tokens
            held[number] = torch.arange(tokens) >= tokens - stock.keys.shape[2]
        return held

    # rows

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, int64 ``[B']``."""
        state = self.state
        if state.sinks is not None:  # first: rings are cut to what the rows that stay need
            state.sinks = state.sinks.select(indices)
        for layer in self._layers.values():
            layer.select_rows(indices)
        for stock in self._stock.values():
            if cached_states(stock):
                # selects any rows; layers with states next to keys and values have no other way
                stock.reorder_cache(indices)
        if state.padding is not None:
            state.padding = state.padding.select(indices).nonzero
        if state.row_counts is not None:
            state.row_counts = state.row_counts.select(indices)

    @property
    def can_join(self) -> bool:
        """Return whether rows of another cache can join: no layer has states of other kinds."""
        return all(type(layer) is ReallocationLayer for layer in self.layers)

    def join(self, other: HeadReallocationCache, columns: int) -> None:
        """Append the rows of ``other``, which has read its prompts.

        It has the same heads and settings.  All rows then end at the last of ``columns`` columns:
        columns of padding are added at the front, or taken off.
        """
        ends = [(cache.state.limit, cache.get_seq_length()) for cache in (self, other)]
        limit = _joined_limit(columns, ends)
        layout = JoinLayout(own=ends[0][1], others=ends[1][1], columns=columns, limit=limit)
        rows = (self._allocated()[0].batch_size, other._allocated()[0].batch_size)
        for number, layer in self._layers.items():
            layer.join(other._layers[number], layout)
        self.state.join(other.state, rows, layout)

    def batch_repeat_interleave(self, repeats: int) -> None:
        layers = self._allocated()
        if layers:
            self.batch_select_indices(torch.arange(layers[0].batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse anything but 0 with ValueError: see :meth:`ReallocationLayer.crop`."""
        for layer in self._layers.values():
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, the padding and what was kept; memory stays."""
        self.state.padding = self.state.sinks = self.state.row_counts = self.state.planned = None
        self.reader = None
        self.kept.clear()
        for layer in self._layers.values():
            layer.reset()
        # transformers' own reset of a sliding layer keeps its length
        fresh = self._make_stock()
        for number in self._stock:
            self._stock[number] = self.layers[number] = fresh[number]
