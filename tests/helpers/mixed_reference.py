"""The reference of attention in which some KV heads see everything and others locally.

Readable and slow: explicit masks, one head at a time, no cache.  The fast paths are tested against
it.
Shapes: B rows, T tokens, H KV heads, G query heads per KV head, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


def full_mask(real: torch.Tensor) -> torch.Tensor:
    """Return what a full head sees: bool ``[B, T, T]`` (query, key); ``real`` ``[B, T]``."""
    order = torch.arange(real.shape[1], device=real.device)
    return real[:, None, :] & (order[None, :] <= order[:, None])


def local_mask(
    real: torch.Tensor,
    sink: int | torch.Tensor,
    window: int,
    call_start: torch.Tensor | None = None,
    block: int = 1,
) -> torch.Tensor:
    """Return what a compressible head sees: bool ``[B, T, T]`` (query, key).

    Query i sees key j <= i if j is one of its row's first ``sink`` real tokens, if ``i - j <
    window``, or if ``j >= call_start[i]``.

    Args:
        real: bool ``[B, T]``, False for padding.
        sink: of all rows, or ``[B, 1]``.
        call_start: int64 ``[T]``, for each query the first token of the forward call that it was
            part of, if all heads read the tokens of one call in full; None: every token sees sinks
            and window only.
        block: tokens of a block, if windows are aligned: the whole blocks are seen (no padding).
    """
    sink = -(-sink // block) * block
    order = torch.arange(real.shape[1], device=real.device)
    rank = real.cumsum(-1) - 1
    window_starts = (order - window + 1).div(block, rounding_mode="floor") * block
    seen = (rank < sink)[:, None, :] | (order[None, :] >= window_starts[:, None])
    if call_start is not None:
        seen = seen | (order[None, :] >= call_start[:, None])
    return seen & full_mask(real)


def mixed_by_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    full_heads: torch.Tensor,
    mask_of_full: torch.Tensor,
    mask_of_local: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in float32 or wider, head by head.

    Args:
        query: ``[B, H * G, T, D]``; the query heads of one KV head are neighbours.
        key: ``[B, H, T, D]``; value: ``[B, H, T, D]``.
        full_heads: bool ``[H]``.
        mask_of_full: bool ``[B, T, T]`` (query, key) of the full heads; ``mask_of_local`` of the
            others.
        softcap: of the logits.
        s_aux: learned sinks ``[H * G]``.

    Returns:
        ``[B, T, H * G, D]`` in the dtype of the query; zeros where a query sees nothing (padding).
    """
    wide = torch.promote_types(torch.float32, query.dtype)
    group_size = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        kv_head = head // group_size
        mask = mask_of_full if full_heads[kv_head] else mask_of_local
        scores = query[:, head].to(wide) @ key[:, kv_head].to(wide).transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if s_aux is not None:
            sink = s_aux[head].to(wide).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        outputs.append(weights @ value[:, kv_head].to(wide))
    return torch.stack(outputs, dim=2).to(query.dtype)


_current: dict[str, Any] = {}


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """Attend under the stock mask, in chosen heads under the local one too."""
    mask = attention_mask
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    stock = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    heads = _current["full"].get(getattr(module, "layer_idx", None))
    local = stock
    if heads is None:  # a layer without gates
        heads = torch.ones(key.shape[1], dtype=torch.bool)
    else:
        assert len(heads) == key.shape[1], f"{len(heads)} heads are named"
        local = stock & _current["local"]
    scale = scaling or query.shape[-1] ** -0.5
    own = {name: kwargs.get(name) for name in ("softcap", "s_aux")}
    return mixed_by_head_attention(query, key, value, heads, stock, local, scale, **own), None


def _always_a_mask(**call: Any) -> torch.Tensor | None:
    return sdpa_mask(**call | {"allow_is_causal_skip": False})


AttentionInterface.register("rlkv_reference", _attention)
AttentionMaskInterface.register("rlkv_reference", _always_a_mask)


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    full: torch.Tensor | Mapping[int, torch.Tensor],
    sink: int | torch.Tensor,
    window: int,
    call_start: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    block: int = 1,
) -> torch.Tensor:
    """Logits ``[B, T, vocabulary]`` of one masked forward over ``ids`` ``[B, T]``, no cache.

    Arguments as in :func:`local_mask`; ``full``: bool ``[L, H]``, or ``[H]`` of the layers with
    gates by their numbers.
    """
    padded = {}
    if real is None or bool(real.all()):
        real = torch.ones_like(ids, dtype=torch.bool)
    else:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        padded = {"attention_mask": real.long(), "position_ids": positions}
    of_layers = full if isinstance(full, Mapping) else dict(enumerate(full))
    _current.update(full=of_layers, local=local_mask(real, sink, window, call_start, block))
    before = model.config._attn_implementation
    model.set_attn_implementation("rlkv_reference")
    try:
        return model(ids, **padded, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
        _current.clear()
