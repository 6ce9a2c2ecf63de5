"""The measured ground truth of a model's heads: what each costs alone, and in which order they can go.

Both take a ``score``: any function of an allocation whose result can be compared, larger is better (a tuple
compares lexicographically, so that a finer measure breaks the ties of a coarser one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation

Score = Callable[[HeadAllocation], Any]


@dataclass(frozen=True)
class Elimination:
    """One step: this head was made compressible, and the allocation then scored ``score``."""

    layer: int
    head: int
    score: Any


def without_head(full: Tensor, layer: int, head: int) -> HeadAllocation:
    """``full`` (bool ``[L, H]``) with one more compressible head."""
    reduced = full.clone()
    reduced[layer, head] = False
    return HeadAllocation(reduced)


def single_head_scores(
    score: Score, num_layers: int, num_kv_heads: int, on_call: Callable[[], None]
) -> list[list[Any]]:
    """The score with each head alone compressible, ``[L][H]``."""
    full = torch.ones(num_layers, num_kv_heads, dtype=torch.bool)
    table: list[list[Any]] = []
    for layer in range(num_layers):
        table.append([])
        for head in range(num_kv_heads):
            table[-1].append(score(without_head(full, layer, head)))
            on_call()
    return table


def num_scores(candidates: int, steps: int) -> int:
    """What :func:`backward_elimination` costs: ``candidates + (candidates - 1) + ...``, one term per step."""
    return sum(candidates - done for done in range(steps))


def backward_elimination(
    score: Score,
    num_layers: int,
    num_kv_heads: int,
    on_call: Callable[[], None],
    start: HeadAllocation | None = None,
    num_full: int = 0,
) -> list[Elimination]:
    """Make heads compressible one by one, each time the one whose loss leaves the best score.

    Ties go to the lower (layer, head).  By default all heads are eliminated, so that the order is total.

    Args:
        start: the allocation to begin with; None: every head is full.
        num_full: stop when this many heads are full.

    Costs :func:`num_scores` scores: ``n (n + 1) / 2`` for the total order of ``n`` heads.
    """
    full = torch.ones(num_layers, num_kv_heads, dtype=torch.bool) if start is None else start.full.clone()
    steps = []
    while int(full.sum()) > num_full:
        best: Elimination | None = None
        for layer, head in full.nonzero().tolist():
            result = score(without_head(full, layer, head))
            on_call()
            if best is None or result > best.score:
                best = Elimination(layer, head, result)
        assert best is not None
        full[best.layer, best.head] = False
        steps.append(best)
    return steps
