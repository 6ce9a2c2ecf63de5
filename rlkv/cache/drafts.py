"""Drafts of a text whose keys and values the full model has written: the attention ``rlkv_draft``.

Lossless speculation drafts a token with compressed heads and has it verified by the full model,
which writes all keys and values.  The draft's query at t reads the full model's keys before t, in
compressible heads those of sinks and window, and its own key at t.  No position needs another one's
draft, so one pass reads many.  Shapes: H KV heads, G query heads per KV head, Q tokens that are
drafted, K tokens up to the last of them, D size of a head; one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlkv.attention import LocalSizes
from rlkv.attention.branches import dense_attention
from rlkv.attention.call import MixedCall, Unread, mixed_mask, refuse_variants
from rlkv.attention.mixed import each_head_once, plain_attention
from rlkv.attention.softmax import Softmax
from rlkv.models.loading import attention_of
from rlkv.utils.devices import leave_cudnn_out

# without "sdpa", "flash" or "flex_attention" in it: transformers looks for these
IMPLEMENTATION = "rlkv_draft"
_WHO = "the attention of drafts"


@dataclass(frozen=True, eq=False)
class DraftStates(Unread):
    """States of drafted tokens, which :meth:`DraftLayer.update` returns instead of a tensor."""

    layer: DraftLayer
    states: Tensor  # [1, H, Q, D]
    what: ClassVar[str] = "keys and values that the cache returns"


class DraftLayer(DynamicLayer):
    """One layer of a draft; it stores nothing.

    Args:
        verified: the layer of the full model's cache, with at least K tokens.
        start: position of the first drafted token.
        full_heads: bool ``[H]``; None: a layer without gates, which reads what its mask says.
        sizes: what compressible heads read.
    """

    def __init__(
        self, verified: DynamicLayer, start: int, full_heads: Tensor | None, sizes: LocalSizes
    ) -> None:
        super().__init__()
        self.verified = verified
        self.start = start
        self.full_heads = full_heads
        self.sizes = sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the drafted tokens' states, for ``rlkv_draft`` to attend to."""
        return DraftStates(self, key_states), DraftStates(self, value_states)

    def get_seq_length(self) -> int:
        return self.start

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, softmax: Softmax
    ) -> Tensor:
        """Attend from query ``[1, H * G, Q, D]``, and return its shape.

        Args:
            key: the draft's own ``[1, H, Q, D]``, as ``value``.
            mask: bool ``[1, 1, Q, K]``, or the call that it belongs to where there are gates.
        """
        end = self.start + query.shape[2]
        assert self.verified.keys is not None
        assert self.verified.values is not None
        keys = torch.cat([self.verified.keys[:, :, :end], key], dim=2)
        values = torch.cat([self.verified.values[:, :, :end], value], dim=2)
        if self.full_heads is None:
            return dense_attention(query, keys, values, own_key_last(mask), softmax)
        full = partial(self._read, call=mask, sink=end, window=1)
        local = partial(self._read, call=mask, sink=self.sizes.sink, window=self.sizes.window)
        return each_head_once(query, keys, values, softmax, self.full_heads, full, local)

    def _read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: MixedCall,
        sink: int,
        window: int,
        softmax: Softmax,
    ) -> Tensor:
        device = query.device

        def make() -> tuple[Tensor, Tensor]:
            # no query of the call sees a token between the sinks and the first one's window
            oldest = max(0, self.start - window + 1)
            sinks = torch.arange(min(sink, oldest), device=device)
            seen = torch.cat([sinks, torch.arange(oldest, key.shape[2], device=device)])
            mask = own_key_last(call.dense_local_mask(sink, window, device))
            return seen, mask[..., seen]

        seen, mask = call.once(("draft", sink, window, device), make)
        return dense_attention(query, key[:, :, seen], value[:, :, seen], mask, softmax)


def own_key_last(mask: Tensor) -> Tensor:
    """Let every query see its own draft in place of the verified token at its position.

    Args:
        mask: bool ``[1, 1, Q, K]``, of verified tokens; the last Q are those that are drafted.

    Returns:
        Bool ``[1, 1, Q, K + Q]``; the last Q keys are the draft's own.
    """
    queries = mask.shape[2]
    own = torch.eye(queries, dtype=torch.bool, device=mask.device).expand_as(mask[..., -queries:])
    earlier = mask.clone()
    earlier[..., -queries:] &= ~own
    return torch.cat([earlier, own], dim=3)


def draft_cache(
    verified: Cache, start: int, full: Tensor, heads: Sequence[int], sizes: LocalSizes
) -> Cache:
    """Make the cache of one pass of drafts, which leaves ``verified`` as it is.

    Args:
        verified: of the full model, a ``DynamicLayer`` for each layer, without padding, that holds
            the tokens before ``start`` and all that are drafted.
        start: position of the first drafted token.
        full: bool ``[layers, KV heads]``, True for full heads.
        heads: how many heads with gates each layer has, 0 where it has none.
        sizes: what compressible heads read, the draft's own key included.
    """
    layers: list[Any] = []
    of_full = cast(list[DynamicLayer], verified.layers)
    for layer, row, number in zip(of_full, full, heads, strict=True):
        own = row[:number] if number else None
        layers.append(DraftLayer(layer, start, own, sizes))
    return Cache(layers=layers)


def draft_mask(**call: Any) -> Any:
    """Describe the call: the mask function of ``rlkv_draft``.

    Sliding-window and chunked layers get their usual mask, always as a tensor.
    """
    if call.get("local_size") is not None:
        return sdpa_mask(**{**call, "allow_is_causal_skip": False})
    return mixed_mask(**call)


def draft_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in a draft, or, with another cache, as the full model does.

    Args:
        query: ``[B, H * G, Q, D]``.
        key: tensor ``[B, H, K, D]``, or :class:`DraftStates`; as ``value``.

    Returns:
        ``([B, Q, H * G, D], None)``.

    Raises:
        ValueError: if a draft gets an argument that would be ignored, or a mask that is not plain
            causal.
    """
    if not isinstance(key, DraftStates):
        return plain_attention(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
    has_gates = key.layer.full_heads is not None
    refuse_variants(kwargs, _WHO, also=frozenset() if has_gates else frozenset({"sliding_window"}))
    is_plain = isinstance(attention_mask, MixedCall) and attention_mask.causal
    if has_gates and not is_plain:
        raise ValueError(
            f"{_WHO} takes plain causal attention: no packed sequences, no prepared, image or "
            "prefix masks"
        )
    softmax = Softmax.of_call(query, scaling, kwargs)
    out = key.layer.attend(query, key.states, value.states, attention_mask, softmax)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def drafting(model: Any) -> Iterator[None]:
    """Run ``model`` with ``rlkv_draft`` inside.

    Raises:
        ValueError: if its attention cannot be exchanged.
    """
    leave_cudnn_out(model.device)
    before = attention_of(model)
    model.set_attn_implementation(IMPLEMENTATION)  # only warns if it cannot
    try:
        if model.base_model.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"{type(model).__name__} does not let its attention be exchanged: drafts need a "
                "model that uses transformers' attention interface"
            )
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, draft_attention)
AttentionMaskInterface.register(IMPLEMENTATION, draft_mask)
