"""Budgets at which methods hold the same bytes, so that their accuracies can be compared.

The target is a share of the bytes that the full cache holds at the end of every text, over texts of known lengths
(those of the full-cache run).  Observed queries and accumulated scores count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.eviction.base import EvictionPolicy

STEPS = 2**14  # ratios are multiples of 1/16384 of the text


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

    def with_ratio(step: int) -> EvictionPolicy:
        return replace(policy, budget=None, ratio=step / STEPS)

    def fits(step: int) -> bool:
        return kv_share(CacheSettings(eviction=with_ratio(step)), full, size, lengths) <= share

    found = _largest(fits, 0, STEPS)
    return None if found is None else with_ratio(found)


def match_budget(
    policy: EvictionPolicy, share: float, full: Tensor, size: EntrySize, lengths: list[tuple[int, int]]
) -> EvictionPolicy | None:
    """``policy`` with the largest fixed budget that holds at most ``share``; otherwise as :func:`match_ratio`.

    For a target in bytes, ``share = bytes / bytes of the full cache`` of the same texts.
    """
    least = policy.sink + max(policy.observation, 1)

    def fits(budget: int) -> bool:
        settings = CacheSettings(eviction=replace(policy, ratio=None, budget=budget))
        return kv_share(settings, full, size, lengths) <= share

    found = _largest(fits, least, max(least, *(tokens for _, tokens in lengths)))
    return None if found is None else replace(policy, ratio=None, budget=found)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from ``low`` to ``high`` that fits, by bisection; None if ``low`` does not."""
    if not fits(low):
        return None
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
