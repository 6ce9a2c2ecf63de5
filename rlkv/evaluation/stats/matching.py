"""Budgets that make methods hold the same bytes: the comparison that a table of accuracies needs.

The target is a share of the bytes that the full cache holds at the end of every text, counted over a set of texts whose
lengths are known (those of the full-cache run).  Observed queries and accumulated scores count.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.eviction.base import EvictionPolicy

STEPS = 14  # halvings of the interval of ratios: to 1/16384 of the text


def kv_share(settings: CacheSettings, full: Tensor, size: EntrySize, lengths: list[tuple[int, int]]) -> float:
    """Bytes in use / bytes of the full cache, both summed over texts of (prompt, all) cached tokens."""
    prompts, tokens = (torch.tensor(column) for column in zip(*lengths, strict=True))
    held, whole = kv_nbytes(settings, full, size, prompts, tokens)
    return float(held.sum() / whole.sum())


def match_ratio(
    policy: EvictionPolicy, share: float, full: Tensor, size: EntrySize, lengths: list[tuple[int, int]]
) -> EvictionPolicy | None:
    """``policy`` with the largest ratio (of the text so far, in place of its budget) that holds at most ``share``.

    None if even a ratio of 0 (``extra`` entries, and the prompt if it is protected) holds more.

    Args:
        full: bool ``[layers, KV heads]``, the full heads of the allocation.
        lengths: (prompt, all) cached tokens of each text.
    """

    def holds(ratio: float) -> float:
        return kv_share(CacheSettings(eviction=_with_ratio(policy, ratio)), full, size, lengths)

    if holds(0.0) > share:
        return None
    low, high = 0.0, 1.0
    if holds(high) <= share:
        return _with_ratio(policy, high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) <= share else (low, middle)
    return _with_ratio(policy, low)


def match_budget(
    policy: EvictionPolicy, share: float, full: Tensor, size: EntrySize, lengths: list[tuple[int, int]]
) -> EvictionPolicy | None:
    """``policy`` with the largest fixed budget that holds at most ``share``; as :func:`match_ratio` for the rest.

    A target in bytes is ``share = bytes / bytes of the full cache`` for the texts in mind.
    """
    low = policy.sink + max(policy.observation, 1)

    def with_budget(budget: int) -> EvictionPolicy:
        return replace(policy, ratio=None, budget=budget)

    def holds(budget: int) -> float:
        return kv_share(CacheSettings(eviction=with_budget(budget)), full, size, lengths)

    if holds(low) > share:
        return None
    high = max(low, *(tokens for _, tokens in lengths))
    if holds(high) <= share:
        return with_budget(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) <= share else (low, middle)
    return with_budget(low)


def _with_ratio(policy: EvictionPolicy, ratio: float) -> EvictionPolicy:
    return replace(policy, budget=None, ratio=ratio)


def match_compressible(
    settings: CacheSettings,
    share: float,
    order: list[tuple[int, int]],
    shape: tuple[int, int],
    size: EntrySize,
    lengths: list[tuple[int, int]],
) -> Tensor | None:
    """Full heads, bool ``[layers, KV heads]``, when heads are compressed in ``order`` until at most ``share`` is held.

    None if compressing all heads is not enough.
    """
    full = torch.ones(shape, dtype=torch.bool)
    for layer, head in order:
        if kv_share(settings, full, size, lengths) <= share:
            return full
        full[layer, head] = False
    return full if kv_share(settings, full, size, lengths) <= share else None
