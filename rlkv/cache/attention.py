"""The attention implementation ``rlkv_realloc`` for transformers: one attention call per group of heads.

The cache's ``update`` returns the new states with the cache's layer, the attention module hands them on unread, and the
mask function passes the 2D padding mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from rlkv.attention.call import OF_MASKED_SDPA, Unread, refuse_variants
from rlkv.cache.layer import NewStates
from rlkv.cache.plan import CacheState, CallLayout, CallPart

IMPLEMENTATION = "rlkv_realloc"  # no "sdpa", "flash" or "flex_attention" in it: transformers looks for these


@dataclass(eq=False)
class CachedCall(Unread):
    """One forward call, as the mask function sees it; its layers share the layouts of its parts on each device."""

    attention_mask: Tensor | None
    start: int
    length: int
    rows: int
    what: ClassVar[str] = "attention mask"
    _plans: dict[torch.device, list[CallLayout]] = field(default_factory=dict)
    _parts: list[CallPart] = field(default_factory=list)

    def plan(self, state: CacheState, device: torch.device) -> list[CallLayout]:
        """The parts on ``device``; the first layer of the call notes padding and counts in ``state``."""
        if not self._parts:
            self._parts = state.begin_call(self.attention_mask, self.start, self.length, self.rows)
        if device not in self._plans:
            self._plans[device] = [CallLayout(part, state, device) for part in self._parts]
        return self._plans[device]


def realloc_mask(**call: Any) -> Any:
    """The mask function: keeps the 2D mask ``[B, T]``; masks of sliding-window layers are made as for sdpa."""
    if call["mask_function"] is not causal_mask_function:
        return sdpa_mask(**call)
    return CachedCall(call["attention_mask"], int(call["q_offset"]), call["q_length"], call["batch_size"])


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
    """The attention function: query ``[B, H * G, n, D]`` -> ``([B, n, H * G, D], None)``.

    Raises:
        ValueError: if a layer, changed or not, gets an argument that would be ignored, or if the call would bypass the
            allocation: no cache or another cache, a 4D mask, or dropout.
    """
    if isinstance(key, NewStates):
        refuse_variants(kwargs, IMPLEMENTATION)
    elif kwargs.get("sliding_window") is not None and not isinstance(attention_mask, CachedCall):
        # a layer that is not changed: the cache gave its own states, the mask function its own mask
        refuse_variants(kwargs, IMPLEMENTATION, also=OF_MASKED_SDPA)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    else:
        raise ValueError(
            f"{IMPLEMENTATION} needs a HeadReallocationCache as past_key_values: call the model under "
            "rlkv.compress(...), which provides it"
        )
    if not isinstance(attention_mask, CachedCall):
        raise ValueError(
            f"{IMPLEMENTATION} serves causal decoders and takes a 2D attention_mask [rows, tokens]: this call has "
            "another mask (prepared in 4D, sliding, chunked, packed or with images)"
        )
    if dropout:
        raise ValueError(f"{IMPLEMENTATION} is for inference: call model.eval() first")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    plan = attention_mask.plan(key.layer.state, query.device)
    if key.layer.length != attention_mask.start:
        raise ValueError(
            f"layer {getattr(module, 'layer_idx', '')} attends to keys and values of another layer, which are in the "
            f"cache already: {IMPLEMENTATION} needs a model in which every layer has its own"
        )
    return key.layer.attend_and_store(query, key.states, value.states, plan, scale), None


AttentionInterface.register(IMPLEMENTATION, realloc_attention)
AttentionMaskInterface.register(IMPLEMENTATION, realloc_mask)
