"""Log-probabilities of completions, row by row without padding on the left: pure functions that need no trl."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (input_ids, attention_mask, labels) -> log-probabilities [rows, tokens - 1]; labels are -100 where none is wanted
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def shift_left(ids_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Every row's left padding moved behind its tokens: ``(ids, offset)``, offset int64 ``[N]``."""
    offset_N = mask_NT.int().argmax(-1)
    width = ids_NT.shape[1]
    index = (torch.arange(width, device=ids_NT.device) + offset_N[:, None]) % width
    return ids_NT.gather(1, index), offset_N


def completion_logprobs(score: Score, ids_NT: Tensor, mask_NT: Tensor, num_completion: int, max_rows: int) -> Tensor:
    """Log-probabilities of the last ``num_completion`` columns, 0 for padding: ``[N, num_completion]``.

    Without padding on the left plain causal attention needs no mask, which would cost ~64 MB per row at 8k tokens.

    Args:
        ids_NT, mask_NT: prompts padded on the left, completions on the right.
        max_rows: rows of one call of ``score``; rows of similar length share a call.
    """
    shifted, offset_N = shift_left(ids_NT, mask_NT)
    length_N = mask_NT.sum(-1)
    completion_start = ids_NT.shape[1] - num_completion - offset_N  # first column of the completion after the shift
    logprobs = torch.zeros(len(ids_NT), num_completion, device=ids_NT.device)
    for rows in length_N.argsort(descending=True).split(max_rows):
        column = torch.arange(int(length_N[rows].max()), device=ids_NT.device)
        real = column < length_N[rows, None]
        ids = torch.where(real, shifted[rows, : len(column)], shifted.new_zeros(()))
        wanted = real & (column >= completion_start[rows, None])
        found = score(ids, real.to(mask_NT.dtype), ids.masked_fill(~wanted, -100))
        # entry k of a score belongs to column k + 1 of the shifted row
        target = column[1:] - completion_start[rows, None]
        keep = wanted[:, 1:]
        place = (rows[:, None].expand_as(target)[keep], target[keep])
        logprobs = logprobs.index_put(place, found.to(logprobs.dtype)[keep])
    return logprobs
