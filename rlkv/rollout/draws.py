"""Sampling by one number in [0, 1) per (seed, rollout, row, token): the same on any number of processes and resumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def row_draws(seed: int, rollout: int, rows: Sequence[int], tokens: int) -> Tensor:
    """Numbers in [0, 1), float64 ``[len(rows), tokens]``, one Philox stream per (seed, rollout, row)."""
    streams = [np.random.Generator(np.random.Philox(key=[seed, (rollout << 32) | row])) for row in rows]
    return torch.from_numpy(np.stack([stream.random(tokens) for stream in streams]))


def draw_tokens(logits_RV: Tensor, draw_R: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """One token per row by inverting the cumulative distribution: int64 ``[R]``.

    In the order of transformers: temperature, then ``top_k`` (0: all), then ``top_p``.
    """
    probs = torch.softmax(logits_RV.double() / temperature, dim=-1)
    token_RV = None
    if top_k or top_p < 1:
        probs, token_RV = probs.sort(dim=-1, descending=True)
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= top_p * probs.sum(-1, keepdim=True), 0)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # below the total, so that a token of positive probability is found
    wanted = torch.minimum(draw_R.to(total)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, wanted, right=True)
    return index[:, 0] if token_RV is None else token_RV.gather(1, index)[:, 0]


def token_logprobs(logits_RV: Tensor, token_R: Tensor, temperature: float) -> Tensor:
    """``log softmax(logits / temperature)`` of the tokens, before top-k and top-p, as in the loss: float32 ``[R]``."""
    logprobs = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return logprobs.gather(1, token_R[:, None])[:, 0]
