"""A whole model run through the reference attention: one forward, no cache, explicit masks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tests.helpers.mixed_reference import full_mask, local_mask, mixed_by_head_attention

_current: dict[str, Any] = {}


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any
) -> Any:
    full_heads = _current["full"][module.layer_idx]
    out = mixed_by_head_attention(
        query, key, value, full_heads, _current["all"], _current["local"], scaling
    )
    return out, None


AttentionInterface.register("rlkv_reference", _attention)
AttentionMaskInterface.register("rlkv_reference", lambda **kwargs: None)


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    full: torch.Tensor,
    sink: int,
    window: int,
    call_start: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits ``[B, T, vocabulary]`` of one masked forward over ``ids`` ``[B, T]``.

    Arguments as in the reference.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    _current.update(
        full=full, all=full_mask(real), local=local_mask(real, sink, window, call_start)
    )
    before = model.config._attn_implementation
    model.set_attn_implementation("rlkv_reference")
    try:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        return model(ids, position_ids=positions, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
        _current.clear()
