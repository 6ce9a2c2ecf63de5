"""One layer of the cache: a growing buffer for its full heads, a ring of S + W entries for the others.

Shapes: B rows, H KV heads (F full, C compressible), G query heads per KV head, n new tokens, T tokens cached,
R = S + W ring entries, D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from rlkv.cache.plan import CacheState, CallPlan, RingWrite

# A full buffer grows by 1/16 of its entries, rounded up to a multiple of 16: little headroom, and copying 16 entries a
# token (on average) is nothing beside reading all of them in each step.
GROWTH = 16
GRANULE = 16


class NewStates(NamedTuple):
    """What :meth:`ReallocationLayer.update` hands to the attention function instead of one tensor."""

    layer: ReallocationLayer
    states: torch.Tensor  # [B, H, n, D], the new tokens only


def grown_capacity(capacity: int, needed: int, limit: int | None) -> int:
    """Entries of the next full buffer: a sixteenth more than now, at least ``needed``, a multiple of 16.

    ``limit`` (the length at which generation ends, if known) cuts the headroom off, never the needed entries.
    """
    wanted = max(needed, capacity + capacity // GROWTH)
    rounded = -(-wanted // GRANULE) * GRANULE
    return max(needed, min(rounded, limit)) if limit is not None else rounded


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of one group of heads: query ``[B, H, G, n, D]``, keys and values ``[B, H, N, D]`` -> query's shape."""
    b, h, g, n, d = query.shape
    if n == 1:
        # the G queries of a KV head as G rows of one product: its keys are read once, not G times
        out = F.scaled_dot_product_attention(query.reshape(b, h, g, d), keys, values, attn_mask=mask, scale=scale)
    else:
        if mask is not None and query.is_cuda and g > 1:  # masked GQA has no fused kernel there
            keys, values = keys.repeat_interleave(g, dim=1), values.repeat_interleave(g, dim=1)
        out = F.scaled_dot_product_attention(
            query.flatten(1, 2), keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=g > 1
        )
    return out.reshape(b, h, g, n, values.shape[-1])


class ReallocationLayer(CacheLayerMixin):
    """KV of one layer; ``full_heads`` is bool ``[H]``.

    ``update`` only hands the new states on: the attention function, which alone knows the padding, calls
    :meth:`attend_and_store`.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, full_heads: torch.Tensor, state: CacheState, reserve: int = 0) -> None:
        super().__init__()
        self.state, self.reserve = state, reserve
        self.num_heads = full_heads.numel()
        self.full_index = full_heads.nonzero().flatten()
        self.ring_index = (~full_heads).nonzero().flatten()
        self.restore = torch.cat([self.full_index, self.ring_index]).argsort()
        self.num_full, self.num_ring = len(self.full_index), len(self.ring_index)
        self.length = self.capacity = 0
        self.full_keys: torch.Tensor
        self.full_values: torch.Tensor
        self.ring_keys: torch.Tensor
        self.ring_values: torch.Tensor

    # transformers' interface

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the batch, device and dtype of the first states ``[B, H, n, D]``.

        Raises:
            ValueError: if the model has another number of KV heads than the allocation.
        """
        b, h, n, d = key_states.shape
        if h != self.num_heads:
            raise ValueError(f"the allocation has {self.num_heads} KV heads a layer but the model has {h}")
        self.device, self.dtype, self.batch_size = key_states.device, key_states.dtype, b
        self.full_index, self.ring_index, self.restore = (
            index.to(self.device) for index in (self.full_index, self.ring_index, self.restore)
        )
        self.capacity = self.reserve or grown_capacity(0, n, self.state.limit)
        self.full_keys = key_states.new_empty(b, self.num_full, self.capacity, d)
        self.full_values = value_states.new_empty(b, self.num_full, self.capacity, value_states.shape[-1])
        # zeros: an empty slot is masked, but 0 * NaN of stale memory would still be NaN
        self.ring_keys = key_states.new_zeros(b, self.num_ring, self.state.settings.ring, d)
        self.ring_values = value_states.new_zeros(b, self.num_ring, self.state.settings.ring, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The new states, for the attention function ``rlkv_realloc`` to store and attend to."""
        return NewStates(self, key_states), NewStates(self, value_states)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def entry_nbytes(self) -> int:
        """Bytes of one token of one head: its key and its value."""
        return (self.full_keys.shape[3] + self.full_values.shape[3]) * self.full_keys.element_size()

    def reset(self) -> None:
        """Forget all tokens; memory is kept for the next ones."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a compressible head has overwritten what a shorter past would need."""
        if tokens_to_remove != 0:
            raise ValueError(
                "HeadReallocationCache cannot crop: compressible heads have given up the tokens that a shorter past "
                "needs; start a new cache instead (assisted generation is not possible for the same reason)"
            )

    def offload(self) -> None:
        raise ValueError("HeadReallocationCache does not offload: use the default cache implementation")

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep (or repeat, or reorder) the rows ``rows`` int64 ``[B']`` of the batch."""
        if self.is_initialized:
            rows = rows.to(self.device)
            for name in ("full_keys", "full_values", "ring_keys", "ring_values"):
                setattr(self, name, getattr(self, name).index_select(0, rows))
            self.batch_size = len(rows)

    # storing and attending

    def attend_and_store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallPlan, scale: float
    ) -> torch.Tensor:
        """Cache the n new tokens and attend: query ``[B, H * G, n, D]`` -> ``[B, n, H * G, D]``.

        Raises:
            ValueError: if the batch is another than the cached one.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        elif key.shape[0] != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} rows but the call has {key.shape[0]}: use a new cache")
        key, value = key.detach(), value.detach()  # inference only: a graph through the buffers would never be freed
        query = query.unflatten(1, (self.num_heads, -1))
        if plan.is_prompt:
            out = attend(query, key, value, plan.full_mask, plan.is_causal, scale)
            self.store(key, value, plan)
        elif self.num_ring == 0:
            out = self._attend_full(query, key, value, plan, scale)
        elif self.num_full == 0:
            out = self._attend_ring(query, key, value, plan, scale)
        else:
            full = self._attend_full(query.index_select(1, self.full_index), key, value, plan, scale)
            ring = self._attend_ring(query.index_select(1, self.ring_index), key, value, plan, scale)
            out = torch.cat([full, ring], dim=1).index_select(1, self.restore)
        self.length = plan.end
        return out.flatten(1, 2).transpose(1, 2).contiguous()

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: CallPlan) -> None:
        """Cache the states ``[B, H, n, D]`` of the call without attending to anything."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._append_full(key, value, plan)
        if self.num_ring:
            self._write_tokens(self.ring_keys, self._pick(key, self.ring_index), plan.whole_write)
            self._write_tokens(self.ring_values, self._pick(value, self.ring_index), plan.whole_write)
        self.length = plan.end

    def _attend_full(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallPlan, scale: float
    ) -> torch.Tensor:
        self._append_full(key, value, plan)
        keys, values = self.full_keys.narrow(2, 0, plan.end), self.full_values.narrow(2, 0, plan.end)
        return attend(query, keys, values, plan.full_mask, plan.is_causal, scale)

    def _attend_ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CallPlan, scale: float
    ) -> torch.Tensor:
        key, value = self._pick(key, self.ring_index), self._pick(value, self.ring_index)
        if plan.length == 1:
            self._write_token(self.ring_keys, key, plan.ring_slot)
            self._write_token(self.ring_values, value, plan.ring_slot)
            keys, values = self.ring_keys.narrow(2, 0, plan.ring_view), self.ring_values.narrow(2, 0, plan.ring_view)
            return attend(query, keys, values, plan.ring_mask, False, scale)
        parts = []
        for block in plan.blocks:
            span = slice(block.begin, block.end)
            keys = torch.cat([self.ring_keys, key[:, :, span]], dim=2)
            values = torch.cat([self.ring_values, value[:, :, span]], dim=2)
            parts.append(attend(query[:, :, :, span], keys, values, block.mask, False, scale))
            self._write_tokens(self.ring_keys, key[:, :, span], block.write)
            self._write_tokens(self.ring_values, value[:, :, span], block.write)
        return torch.cat(parts, dim=3)

    def _pick(self, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return states if len(index) == self.num_heads else states.index_select(1, index)

    def _append_full(self, key: torch.Tensor, value: torch.Tensor, plan: CallPlan) -> None:
        if self.num_full == 0:
            return
        if plan.end > self.capacity:
            self._grow(plan.end)
        self.full_keys.narrow(2, plan.start, plan.length).copy_(self._pick(key, self.full_index))
        self.full_values.narrow(2, plan.start, plan.length).copy_(self._pick(value, self.full_index))

    def _grow(self, needed: int) -> None:
        self.capacity = grown_capacity(self.capacity, needed, self.state.limit)
        for name in ("full_keys", "full_values"):  # one after the other: never both old and new of both
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], self.capacity, old.shape[3])
            new.narrow(2, 0, self.length).copy_(old.narrow(2, 0, self.length))
            setattr(self, name, new)

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
