"""The attention implementation ``rlkv_mixed`` (arXiv 2510.08525, equation of the mixed attention).

Layers without a gate, and all layers while the adapter is disabled, run the stock ``sdpa``
attention and mask, except where one token is decoded, and where logits are soft-capped or have
learned sinks, which ``sdpa`` ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from rlkv.attention.branches import full_attention, local_attention
from rlkv.attention.call import (
    OF_MASKED_SDPA,
    OF_SDPA,
    UNDERSTOOD,
    MixedCall,
    mixed_mask,
    refuse_variants,
)
from rlkv.attention.softmax import Softmax
from rlkv.models.loading import attention_of
from rlkv.utils.devices import leave_cudnn_out

# without "sdpa", "flash" or "flex_attention" in it: transformers looks for these
IMPLEMENTATION = "rlkv_mixed"
PLAIN = "rlkv_plain"  # the same without gates
GATE = "rlkv_gate"  # the attribute of an attention module that holds its gate


class Gate(NamedTuple):
    """The gate of one layer: alpha ``[num_kv_heads]``, float32 or wider, and the local sizes."""

    alpha_H: Tensor
    sink: int
    window: int


def mix(full: Tensor, local: Tensor, alpha_H: Tensor) -> Tensor:
    """Compute ``alpha * full + (1 - alpha) * local`` in float32 or wider.

    ``full`` and ``local`` are ``[B, H * G, Q, D]``, and the result has their shape and dtype.
    Exact at alpha 0 and 1; bf16 would round 0.999 to 1.
    """
    wide = torch.promote_types(torch.float32, torch.promote_types(full.dtype, alpha_H.dtype))
    grouped = (full.shape[0], alpha_H.shape[0], -1, *full.shape[2:])
    alpha = alpha_H.to(wide)[:, None, None, None]
    mixed = torch.lerp(local.reshape(grouped).to(wide), full.reshape(grouped).to(wide), alpha)
    return mixed.reshape(full.shape).to(full.dtype)


Branch = Callable[..., Tensor]


def _is_mask(alpha_H: Tensor, queries: int) -> bool:
    """Return whether one branch per head is enough, as every gate is 0 or 1, and cheaper."""
    # on a GPU, reading the gates would cost a synchronisation per layer and token
    if torch.is_grad_enabled() or alpha_H.device.type != "cpu":
        return False
    low, high = alpha_H.aminmax()
    if low == 1 or high == 0:
        return True
    # of one token, taking the heads apart copies more keys than its attention reads
    return queries > 1 and bool(((alpha_H == 0) | (alpha_H == 1)).all())


def each_head_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    full_H: Tensor,
    full: Branch,
    local: Branch,
) -> Tensor:
    """Compute the full branch for the heads ``full_H`` (bool ``[H]``), else the local one."""
    if full_H.all() or not full_H.any():
        return (full if full_H[0] else local)(query, key, value, softmax=softmax)
    query = query.unflatten(1, (len(full_H), -1))
    out = query.new_empty(*query.shape[:4], value.shape[-1])
    for branch, chosen_H in ((full, full_H), (local, ~full_H)):
        own = query[:, chosen_H].flatten(1, 2), key[:, chosen_H], value[:, chosen_H]
        states = branch(*own, softmax=softmax.of_heads(chosen_H, len(full_H)))
        out[:, chosen_H] = states.unflatten(1, (-1, query.shape[2]))
    return out.flatten(1, 2)


def mixed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Mix the two branches by the layer's gate: the attention function ``rlkv_mixed``.

    Args:
        query: ``[B, H * G, Q, D]``.
        key: ``[B, H, K, D]``, as ``value``.
        attention_mask: what :func:`~rlkv.attention.call.mixed_mask` made.

    Returns:
        ``([B, Q, H * G, D], None)``.

    Raises:
        ValueError: if a layer, gated or not, gets an argument that would be ignored, or a gated
            layer a call that would bypass its gate: a prepared 4D mask, packed sequences, or
            dropout.
    """
    holder = getattr(module, GATE, None)
    gate: Gate | None = holder.current() if holder is not None else None
    is_ours = isinstance(attention_mask, MixedCall)
    if gate is None:
        is_causal = is_ours and attention_mask.causal
        heeded = OF_SDPA if is_causal else OF_MASKED_SDPA
        refuse_variants(kwargs, "a model with head gates", also=heeded)
        return plain_attention(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
    refuse_variants(kwargs, "gated attention")
    if not is_ours:
        raise ValueError(
            "a gated model takes a 2D attention_mask [rows, tokens], not a prepared 4D one"
        )
    if not attention_mask.causal:
        raise ValueError(
            "a gated model takes plain causal attention: no packed sequences, no image or prefix "
            "masks"
        )
    if dropout:
        raise ValueError(
            f"gated attention has no dropout: set attention_dropout to 0 (it is {dropout})"
        )
    if key.shape[1] != len(gate.alpha_H):
        raise ValueError(
            f"layer {getattr(module, 'layer_idx', '')} has {key.shape[1]} KV heads, but gates for "
            f"{len(gate.alpha_H)}, as its config says: gates need a model with one number of KV "
            "heads in all layers"
        )
    softmax = Softmax.of_call(query, scaling, kwargs)
    full = partial(full_attention, call=attention_mask)
    local = partial(local_attention, call=attention_mask, sink=gate.sink, window=gate.window)
    if _is_mask(gate.alpha_H, query.shape[2]):
        out = each_head_once(query, key, value, softmax, gate.alpha_H == 1, full, local)
    else:
        of_full = full(query, key, value, softmax=softmax)
        out = mix(of_full, local(query, key, value, softmax=softmax), gate.alpha_H)
    return out.transpose(1, 2).contiguous(), None


def plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of layers without a gate, as ``sdpa``, faster for one query a row.

    Learned sinks and soft-capped logits, which ``sdpa`` ignores, are computed as ``eager`` does.

    Raises:
        ValueError: for what that does not have: dropout, a position bias, no causality.
    """
    softmax = Softmax.of_call(query, scaling, kwargs)
    if _is_one_causal_query(attention_mask, dropout, kwargs):
        out = full_attention(query, key, value, attention_mask, softmax)
        return out.transpose(1, 2).contiguous(), None
    mask = attention_mask.stock_mask() if isinstance(attention_mask, MixedCall) else attention_mask
    if mask is not None:
        mask = mask.to(query.device)  # it is made on that of the embeddings
    if softmax.is_plain:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    who = "attention with learned sinks or soft-capped logits"
    refuse_variants(kwargs, who, also=frozenset({"sliding_window"}))
    if dropout:
        raise ValueError(f"{who} has no dropout: set attention_dropout to 0 (it is {dropout})")
    causal = mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    out = softmax.attend(query, key, value, mask, causal)
    return out.transpose(1, 2).contiguous(), None


def _is_one_causal_query(mask: Any, dropout: float, arguments: dict[str, Any]) -> bool:
    """Return whether each row has one query that sees all its tokens.

    There sdpa would copy keys and values for each query head.
    """
    if not isinstance(mask, MixedCall) or not mask.causal or mask.q_length != 1 or dropout:
        return False
    return all(name in UNDERSTOOD or value is None for name, value in arguments.items())


@contextmanager
def fast_decoding(model: Any) -> Iterator[None]:
    """Decode faster inside, by ``rlkv_plain``, if the model has the attention ``sdpa``.

    Other models are left as they are.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    leave_cudnn_out(base.device)
    if base.config._attn_implementation != "sdpa":
        yield
        return
    before = attention_of(base)
    base.set_attn_implementation(PLAIN)
    try:
        yield
    finally:
        if base.config._attn_implementation == PLAIN:
            base.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, mixed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, mixed_mask)
AttentionInterface.register(PLAIN, plain_attention)
AttentionMaskInterface.register(PLAIN, mixed_mask)
