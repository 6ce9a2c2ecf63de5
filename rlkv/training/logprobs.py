"""Log-probabilities of completions: rows moved to the left edge, trimmed, and run in groups of similar length.

trl hands over ``[left padding | prompt | completion | right padding]``.  Without padding on the left plain causal
attention needs no mask, which would cost ~64 MB a row at 8k tokens, and short rows no longer pay for long ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (input_ids, attention_mask, labels) -> (log_probs, entropy), each [rows, tokens - 1]
Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def shift_left(ids_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Every row's left padding moved behind its tokens: ``(ids, offset)``, offset int64 ``[N]``."""
    offset_N = mask_NT.int().argmax(-1)
    width = ids_NT.shape[1]
    index = (torch.arange(width, device=ids_NT.device) + offset_N[:, None]) % width
    return ids_NT.gather(1, index), offset_N


def completion_logprobs(
    score: Score, ids_NT: Tensor, mask_NT: Tensor, num_completion: int, max_rows: int
) -> tuple[Tensor, Tensor]:
    """``(log-probabilities, entropies)`` of the last ``num_completion`` columns, each ``[N, num_completion]``.

    Args:
        score: runs the model; labels are -100 where nothing is wanted.
        ids_NT, mask_NT: prompts padded on the left, completions on the right.
        max_rows: rows of one call of ``score``; rows of similar length share a call.

    Padding reads 0.
    """
    shifted, offset_N = shift_left(ids_NT, mask_NT)
    length_N = mask_NT.sum(-1)
    width = ids_NT.shape[1]
    completion_start = width - num_completion - offset_N  # column of the first completion token after the shift
    logprobs = torch.zeros(len(ids_NT), num_completion, device=ids_NT.device)
    entropies = torch.zeros_like(logprobs)
    order = length_N.argsort(descending=True)
    for rows in order.split(max_rows):
        longest = int(length_N[rows].max())
        column = torch.arange(longest, device=ids_NT.device)
        real = column < length_N[rows, None]
        ids = torch.where(real, shifted[rows, :longest], shifted.new_zeros(()))
        wanted = real & (column >= completion_start[rows, None])
        found = score(ids, real.to(mask_NT.dtype), ids.masked_fill(~wanted, -100))
        # entry k of a score belongs to column k + 1 of the shifted row, k + 1 + offset of the given one
        source = column[1:].expand(len(rows), -1)
        target = source - completion_start[rows, None]
        keep = wanted[:, 1:]
        place = (rows[:, None].expand_as(target)[keep], target[keep])
        logprobs = logprobs.index_put(place, found[0].to(logprobs.dtype)[keep])
        entropies = entropies.index_put(place, found[1].detach().to(entropies.dtype)[keep])
    return logprobs, entropies
