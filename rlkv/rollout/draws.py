"""Sampling by one number in [0, 1) per (seed, rollout, row, token): the same on any number of processes and resumes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

AT_ONCE = 1024  # most likely tokens that are looked at before all are sorted


def row_draws(seed: int, rollout: int, rows: Sequence[int], tokens: int) -> Tensor:
    """Numbers in [0, 1), float64 ``[len(rows), tokens]``, one Philox stream per (seed, rollout, row)."""
    streams = [np.random.Generator(np.random.Philox(key=[seed, (rollout << 32) | row])) for row in rows]
    return torch.from_numpy(np.stack([stream.random(tokens) for stream in streams]))


def draw_tokens(logits_RV: Tensor, draw_R: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """One token per row by inverting the cumulative distribution: int64 ``[R]``.

    In the order of transformers: temperature, then ``top_k`` (0: all), then ``top_p``.
    """
    logits, token_RV = logits_RV.double() / temperature, None
    if top_k or top_p < 1:
        total_R1 = logits.logsumexp(-1, keepdim=True)
        token_RV = _likely_tokens(logits_RV, (logits, total_R1), top_p, top_k)
        probs = (logits.gather(1, token_RV) - total_R1).exp()
        if top_k:
            probs[:, top_k:] = 0
        before = probs.cumsum(-1) - probs
        everything = probs.sum(-1, keepdim=True) if top_k else 1.0
        probs = probs.masked_fill(before >= top_p * everything, 0)
    else:
        probs = torch.softmax(logits, dim=-1)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # below the total, so that a token of positive probability is found
    wanted = torch.minimum(draw_R.to(total)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, wanted, right=True)
    return index[:, 0] if token_RV is None else token_RV.gather(1, index)[:, 0]


def _likely_tokens(logits_RV: Tensor, scaled: tuple[Tensor, Tensor], top_p: float, top_k: int) -> Tensor:
    """Tokens that hold all which ``top_k`` and ``top_p`` keep, the most likely first, of equal ones the first.

    ``scaled``: logits in float64 and their log-sum-exp.  The whole vocabulary is sorted only if the ``AT_ONCE`` most
    likely tokens are not enough, or end among equal ones: which of these a GPU picks depends on the batch.
    """
    if logits_RV.shape[1] > AT_ONCE:
        found, token_RK = logits_RV.topk(AT_ONCE, dim=-1)
        surely_RK = found > found[:, -1:]
        if top_k:
            enough_R = surely_RK.sum(-1) >= top_k
        else:
            logits, total_R1 = scaled
            inside_RK = (logits.gather(1, token_RK) - total_R1).exp().masked_fill(~surely_RK, 0)
            enough_R = inside_RK.sum(-1) >= top_p
        if bool(enough_R.all()):
            token_RK = token_RK.sort(dim=-1).values
            order = logits_RV.gather(1, token_RK).sort(dim=-1, descending=True, stable=True).indices
            return token_RK.gather(1, order)
    return logits_RV.sort(dim=-1, descending=True, stable=True).indices


def token_logprobs(logits_RV: Tensor, token_R: Tensor, temperature: float) -> Tensor:
    """``log softmax(logits / temperature)`` of the tokens, before top-k and top-p, as in the loss: float32 ``[R]``."""
    logprobs = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return logprobs.gather(1, token_R[:, None])[:, 0]
