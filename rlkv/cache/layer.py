"""One layer of the cache: full heads in one store, compressible heads in another.

Shapes: B rows, H KV heads, G query heads per KV head, n new tokens, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlkv.attention.call import (
    OF_MASKED_SDPA,
    OF_SDPA,
    StockMask,
    Unread,
    is_plain_causal,
    refuse_variants,
)
from rlkv.attention.mixed import plain_attention
from rlkv.attention.softmax import Softmax
from rlkv.cache.plan import CacheState, CallLayout, JoinLayout
from rlkv.cache.stores import FullStore, RingStore, Store, attend
from rlkv.kernels.step import serves

# without "sdpa", "flash" or "flex_attention" in it: transformers looks for these
IMPLEMENTATION = "rlkv_realloc"
# attribute of the attention modules with full attention that stay as they are
UNCHANGED = "rlkv_unchanged"


@dataclass(frozen=True, eq=False)
class NewStates(Unread):
    """New states, which :meth:`ReallocationLayer.update` returns instead of a tensor."""

    layer: ReallocationLayer
    states: Tensor  # [B, H, n, D], the new tokens only
    what: ClassVar[str] = "keys and values that the cache returns"
    rule: ClassVar[str] = (
        "a cache of compress(...) is continued only inside it, with the attention that it sets; "
        "if this call is inside, "
    )


class ReallocationLayer(CacheLayerMixin):
    """KV of one layer.

    The attention function, which knows the padding, stores the states that ``update`` hands on.

    Args:
        full_heads: bool ``[H]``.
        make_store: makes the store of some heads: of full ones, or of compressible ones.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        full_heads: Tensor,
        state: CacheState,
        make_store: Callable[[list[int], bool], Store],
    ) -> None:
        super().__init__()
        self.state = state
        self.num_heads = full_heads.numel()
        full = full_heads.nonzero().flatten()
        others = (~full_heads).nonzero().flatten()
        self.order = torch.cat([full, others])  # of heads in the stores
        self.counts = [count for count in (len(full), len(others)) if count]
        self.restore = self.order.argsort()
        # as the decode kernel counts heads: full ones from 0 up, the others from -1 down
        places = torch.cat([torch.arange(len(full)), -1 - torch.arange(len(others))])
        self.places = places[self.restore].int()
        self.stores: list[Store] = []
        if len(full):
            self.stores.append(make_store(full.tolist(), True))
        if len(others):
            self.stores.append(make_store(others.tolist(), False))
        self.length = 0
        self.in_call = False  # stays True if a call ends in an error
        self.by_kernel = False  # whether the decode kernel took the last call

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch, device and dtype of the first states ``[B, H, n, D]``."""
        found = key_states.shape[1]
        if found != self.num_heads:
            raise ValueError(
                f"the allocation has {self.num_heads} KV heads a layer but the model has {found} "
                "in one with a full cache: the allocation must be of this model, and all of its "
                "layers must have as many KV heads as its config says"
            )
        self.batch_size = key_states.shape[0]
        self.device = key_states.device
        self.dtype = key_states.dtype
        # Llama 3.2 Vision asks every layer for the number of its keys, to find those of images
        self.keys = self.values = key_states.new_empty(0)
        self.order = self.order.to(self.device)
        self.heads = self.order.split(self.counts)  # of each store
        self.restore = self.restore.to(self.device)
        self.places = self.places.to(self.device)
        for store in self.stores:
            store.allocate(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the new states, for ``rlkv_realloc`` to store and attend to."""
        return NewStates(self, key_states), NewStates(self, value_states)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget all tokens; memory is kept for the next ones."""
        self.length = 0
        self.in_call = False
        for store in self.stores:
            store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError(
                "HeadReallocationCache cannot crop: compressible heads have given up the tokens "
                "that a shorter past needs; start a new cache instead (assisted generation is not "
                "possible for the same reason)"
            )

    def offload(self) -> None:
        raise ValueError(
            "HeadReallocationCache does not offload: use the default cache implementation"
        )

    def select_rows(self, rows: Tensor) -> None:
        """Keep (or repeat, or reorder) the rows ``rows`` int64 ``[B']`` of the batch."""
        if self.is_initialized:
            rows = rows.to(self.device)
            for store in self.stores:
                store.select_rows(rows)
            self.batch_size = len(rows)

    def join(self, other: ReallocationLayer, layout: JoinLayout) -> None:
        """Append the rows of ``other``, a layer of the same heads."""
        for store, others in zip(self.stores, other.stores, strict=True):
            store.join(others, layout)
        self.batch_size += other.batch_size
        self.length = layout.columns

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the KV cache holds."""
        return [tensor for store in self.stores for tensor in store.tensors()]

    def used_nbytes(self) -> int:
        """Return the bytes of the entries in use."""
        return sum(store.used_nbytes(self.length) for store in self.stores)

    def full_nbytes(self) -> int:
        """Return the bytes that the full cache would hold for the same tokens."""
        return self.num_heads * self.batch_size * self.length * self.stores[0].entry_nbytes

    def held(self, row: int, tokens: int) -> Tensor:
        """Return which of a row's ``tokens`` real tokens are held: bool ``[H, tokens]``, CPU."""
        parts = [store.held(row, tokens) for store in self.stores]
        return torch.cat(parts).index_select(0, self.restore.cpu())

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` if the cache has another number of rows."""
        if self.is_initialized and rows != self.batch_size:
            raise ValueError(
                f"the cache holds {self.batch_size} rows but the call has {rows}: use a new cache"
            )

    def attend_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, parts: list[CallLayout], softmax: Softmax
    ) -> Tensor:
        """Cache the n new tokens and attend, part by part.

        Args:
            query: ``[B, H * G, n, D]``.
            key: ``[B, H, n, D]``, as ``value``.

        Returns:
            ``[B, n, H * G, D]``.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        # inference only: a graph through the buffers would never be freed
        query = query.detach().unflatten(1, (self.num_heads, -1))
        key = key.detach()
        value = value.detach()
        self.by_kernel = (
            len(parts) == 1 and softmax.is_plain and self._kernel_serves(query, key, value)
        )
        if self.by_kernel:
            return self._decode(query, key, value, parts[0], softmax.scale)
        outputs = []
        begin = 0
        for layout in parts:
            span = slice(begin, begin + layout.length)
            states = query[:, :, :, span], key[:, :, span], value[:, :, span]
            outputs.append(self._attend_part(*states, layout, softmax))
            begin = span.stop
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
        return out.flatten(1, 2).transpose(1, 2).contiguous()

    def _attend_part(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, softmax: Softmax
    ) -> Tensor:
        """Query ``[B, H, G, n, D]`` -> its shape."""
        if layout.is_prompt:
            out = attend(query, key, value, layout.full_mask, layout.is_causal, softmax)
            self.store(query, key, value, layout, softmax.scale)
            return out
        outputs = []
        shared_out = self._shared_out(query, key, value)
        for heads, (store, q, k, v) in zip(self.heads, shared_out, strict=True):
            own = softmax.of_heads(heads, self.num_heads)
            outputs.append(store.attend(q, k, v, layout, own))
        self.length = layout.end
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=1).index_select(1, self.restore)

    def _kernel_serves(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        if not self.state.decode_kernel or key.dtype != self.dtype:
            return False
        is_plain = all(isinstance(store, FullStore | RingStore) for store in self.stores)
        return is_plain and serves(query, key, value)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> Tensor:
        """Decode a token in one launch: query ``[B, H, G, 1, D]`` -> ``[B, 1, H * G, D]``."""
        from rlkv.kernels.decode import decode

        full = ring = None
        for store in self.stores:
            assert isinstance(store, FullStore | RingStore)
            store.make_room(layout)
            if isinstance(store, FullStore):
                full = (store.keys, store.values)
            else:
                ring = (store.keys, store.values)
        states = (query[:, :, :, 0], key[:, :, 0], value[:, :, 0])
        out = decode(*states, full, ring, self.places, layout.decode_step, scale)
        self.length = layout.end
        return out.flatten(1, 2)[:, None]

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, layout: CallLayout, scale: float
    ) -> None:
        """Cache the states of a prompt, query ``[B, H, G, n, D]``, without attending."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        for store, q, k, v in self._shared_out(query, key, value):
            store.store(q, k, v, layout, scale)
        self.length = layout.end

    def _shared_out(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Store, Tensor, Tensor, Tensor]]:
        """Each store with the heads, of states ``[B, H, ...]``, that are in it."""
        if len(self.stores) == 1:
            yield self.stores[0], query, key, value
            return
        # one gather of each, not one for every store
        parts = []
        for states in (query, key, value):
            parts.append(states.index_select(1, self.order).split(self.counts, 1))
        yield from zip(self.stores, *parts, strict=True)


class LinearReallocationLayer(ReallocationLayer, LinearAttentionLayer):  # type: ignore[misc]
    """KV of an attention, and the states of the linear layer next to it, which are always kept.

    Args:
        number_of_states: of the linear layer.
    """

    def __init__(
        self,
        full_heads: Tensor,
        state: CacheState,
        make_store: Callable[[list[int], bool], Store],
        number_of_states: int,
    ) -> None:
        ReallocationLayer.__init__(self, full_heads, state, make_store)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(  # type: ignore[override]
        self, *keys_and_values: Tensor, **states: Any
    ) -> None:
        """Allocate for keys and values, given by position, or for linear states, by name."""
        if keys_and_values:
            ReallocationLayer.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        ReallocationLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def select_rows(self, rows: Tensor) -> None:
        ReallocationLayer.select_rows(self, rows)
        LinearAttentionLayer.reorder_cache(self, cast(torch.LongTensor, rows))


@dataclass(eq=False)
class CachedCall(StockMask):
    """One forward call, as the mask function sees it.

    Its layers share the layouts of its parts on each device.
    """

    attention_mask: Tensor | None
    start: int
    length: int
    rows: int
    make_stock_mask: Callable[..., Tensor | None]
    _made: dict[Any, Any] = field(default_factory=dict)

    def plan(self, state: CacheState, device: torch.device) -> list[CallLayout]:
        """Return the layouts on ``device``; the first layer's call is noted in ``state``."""
        call = (self.attention_mask, self.start, self.length, self.rows)
        parts = self.once("parts", lambda: state.begin_call(*call))
        return self.once(device, lambda: [state.layout(part, device) for part in parts])


def realloc_mask(**call: Any) -> Any:
    """Keep the 2D mask ``[B, T]``: the mask function of ``rlkv_realloc``.

    Masks of sliding-window layers are made as for sdpa.
    """
    if not is_plain_causal(call):
        return sdpa_mask(**call)
    return CachedCall(
        call["attention_mask"],
        int(call["q_offset"]),
        call["q_length"],
        call["batch_size"],
        partial(sdpa_mask, **call),
    )


def realloc_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the cache: query ``[B, H * G, n, D]`` -> ``([B, n, H * G, D], None)``.

    Raises:
        ValueError: if a layer, changed or not, gets an argument that would be ignored, or if the
            call would bypass the allocation: no cache or another cache, a 4D mask, or dropout.
    """
    if isinstance(key, NewStates):
        refuse_variants(kwargs, IMPLEMENTATION)
    elif isinstance(key, Tensor) and (
        getattr(module, UNCHANGED, False) or not isinstance(attention_mask, CachedCall)
    ):
        # a layer that is not changed: the cache gave its own states, the mask function its own mask
        if isinstance(attention_mask, CachedCall):
            refuse_variants(kwargs, IMPLEMENTATION, also=OF_SDPA)
            attention_mask = attention_mask.stock_mask()
        else:
            refuse_variants(kwargs, IMPLEMENTATION, also=OF_MASKED_SDPA)
        return plain_attention(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
    else:
        raise ValueError(
            f"{IMPLEMENTATION} needs a HeadReallocationCache as past_key_values: call the model "
            "under rlkv.compress(...), which provides it"
        )
    if not isinstance(attention_mask, CachedCall):
        raise ValueError(
            f"{IMPLEMENTATION} serves causal decoders and takes a 2D attention_mask [rows, "
            "tokens]: this call has another mask (prepared in 4D, sliding, chunked, packed or with "
            "images)"
        )
    if dropout:
        raise ValueError(f"{IMPLEMENTATION} is for inference: call model.eval() first")
    softmax = Softmax.of_call(query, scaling, kwargs)
    policy = key.layer.state.settings.eviction
    if policy is not None and policy.uses_queries and not softmax.is_plain:
        raise ValueError(
            f"{policy.name} scores tokens by their attention without learned sinks and soft-capped "
            "logits, which this model has: use sink and window, or a policy that does not look at "
            "queries, such as random"
        )
    key.layer.check_rows(query.shape[0])
    if key.layer.in_call:
        raise ValueError(
            "an earlier call on this cache ended in an error, which left some of its tokens in "
            "it: start a new cache"
        )
    parts = attention_mask.plan(key.layer.state, query.device)
    if key.layer.length != attention_mask.start:
        raise ValueError(
            f"layer {getattr(module, 'layer_idx', '')} holds {key.layer.length} tokens where the "
            f"call begins at {attention_mask.start}: start a new cache if an earlier call ended in "
            f"an error; {IMPLEMENTATION} does not serve layers that share keys and values"
        )
    key.layer.in_call = True
    out = key.layer.attend_and_store(query, key.states, value.states, parts, softmax)
    key.layer.in_call = False
    return out, None


AttentionInterface.register(IMPLEMENTATION, realloc_attention)
AttentionMaskInterface.register(IMPLEMENTATION, realloc_mask)
