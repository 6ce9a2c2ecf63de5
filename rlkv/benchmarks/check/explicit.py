"""Attention written out, with explicit masks."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_UP_TO = (
    1024  # tokens for which the reference is float64; beyond it float32, which all GPUs are fast at
)


def visible_keys(real_T: Tensor, sink: int, window: int) -> Tensor:
    """What each query of a row sees:

    ``real_T`` bool ``[T]`` (False: padding) -> bool ``[T, T]`` (query, key).

    Of the keys up to its own the first ``sink`` real ones and the last ``window``; a padding query
    sees itself.
    """
    order = torch.arange(len(real_T), device=real_T.device)
    rank = real_T.cumsum(0) - 1
    distance = order[:, None] - order
    kept = (distance < window) | (rank < sink)
    return (kept & (distance >= 0) & real_T) | (distance == 0)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, weight: Tensor
) -> list[Tensor]:
    """Output and the gradients of ``(output * weight).sum()`` for query, key and value, in float32
    or float64.

    Shapes: query, weight ``[G, T, D]``; key, value ``[T, D]``; visible bool ``[T, T]``.
    """
    wide = torch.float64 if len(key) <= EXACT_UP_TO else torch.float32
    query, key, value = (
        states.detach().to(wide).requires_grad_() for states in (query, key, value)
    )
    scores = query @ key.T * query.shape[-1] ** -0.5
    out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    gradients = torch.autograd.grad((out * weight.to(wide)).sum(), (query, key, value))
    return [out.detach(), *gradients]


def exact_token(query: Tensor, key: Tensor, value: Tensor, sink: int, window: int) -> Tensor:
    """Outputs float64 ``[2, H, G, D]`` for the newest of T tokens: of heads that see all, and sinks
    and window alone.

    Shapes: query ``[H, G, D]``; key, value ``[H, T, D]``.
    """
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    position = torch.arange(key.shape[1], device=key.device)
    dropped = (position >= sink) & (position < len(position) - window)
    return torch.stack([scores, scores.masked_fill(dropped, -torch.inf)]).softmax(-1) @ value
