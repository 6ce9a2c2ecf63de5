"""H2O, heavy-hitter oracle: the largest sums of attention over the whole past (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkv.eviction.attention import attention_received, sum_rows
from rlkv.eviction.base import EvictionPolicy
from rlkv.eviction.registry import register

VARIANTS = ("paper", "rlkv_tables")


@register
@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """H2O (arXiv 2306.14048, section 4.2): half of the budget to recent entries, half to the heavy hitters.

    Score of an entry = the attention that it got from every query since it was written, summed over queries and over
    the query heads of its group: ``[B, H, N]``.  Each softmax runs over the entries that were still held (the past
    cannot be asked again), up to the query's own.  :meth:`scores` gives the sum over the queries of one call; the
    cache adds up the calls (``accumulates``).  The sums favour old entries; that is part of the method.

    Attributes:
        variant: "paper"; "rlkv_tables" for what the tables of RLKV (arXiv 2510.08525) were measured with, where both
            halves are rounded down: of an odd budget one entry less is kept.
    """

    buffer: int = 1
    observation: int = 1
    variant: str = "paper"

    name: ClassVar[str] = "h2o"
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.variant in VARIANTS, "variant", f"one of {', '.join(VARIANTS)}")

    def check_entries(self, entries: int) -> None:
        super().check_entries(entries)
        room = entries - entries // 2
        self.require(self.sink <= room, "sink", f"at most {room}: half of {entries} entries are the most recent ones")

    def entries(self, seen: Tensor, evictions: Tensor) -> Tensor:
        kept = super().entries(seen, evictions)
        return kept // 2 * 2 if self.variant == "rlkv_tables" else kept

    def capacity(self, seen: Tensor, evictions: Tensor) -> Tensor:
        return super().entries(seen, evictions) + self.buffer

    def recent(self, budget: Tensor) -> Tensor:
        return torch.clamp(budget // 2, min=self.observation)

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return sum_rows(attention_received(keys, queries, valid))
