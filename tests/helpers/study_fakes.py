"""Outcomes and rankings made by hand."""

from __future__ import annotations

import numpy as np
import torch

from rlkv.evaluation.measurements import Outcome, Ranking
from rlkv.gates.allocation import compression_order
from rlkv.gates.head_gates import HeadGates

SHAPE = (2, 3)


def outcome(
    correct: str, lengths: list[int] | None = None, key: str = "", modes: str = "incorrect"
) -> Outcome:
    """``correct`` has a 1 or 0 per problem; wrong ones fail by ``modes``; texts are 0, 1, 2, ..."""
    right = np.array([float(character) for character in correct])
    sizes = lengths or [4] * len(correct)
    return Outcome(
        key or correct,
        right,
        tuple(None if character == "1" else modes for character in correct),
        tuple(np.arange(size, dtype=np.int32) for size in sizes),
        np.full(len(correct), 60, dtype=np.int64),
        np.full(len(correct), 100, dtype=np.int64),
        1.5,
    )


def ranking(name: str, *alphas: list[float]) -> Ranking:
    """A ranking of six heads with a seed per list of gates."""
    gates = tuple(HeadGates(torch.tensor(alpha).view(SHAPE)) for alpha in alphas)
    orders = tuple(tuple(compression_order(each)) for each in gates)
    return Ranking(name, SHAPE, orders, gates, tuple(f"{name}-{i}.pt" for i in range(len(gates))))
