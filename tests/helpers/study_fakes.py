"""Outcomes and rankings made by hand."""

from __future__ import annotations

import numpy as np
import torch

from rlkv.evaluation.measurements import Answer, Outcome, Ranking
from rlkv.gates.allocation import compression_order
from rlkv.gates.head_gates import HeadGates

SHAPE = (2, 3)


def outcome(
    correct: str, lengths: list[int] | None = None, key: str = "", modes: str = "incorrect"
) -> Outcome:
    """``correct`` has a 1 or 0 per problem; wrong ones fail by ``modes``; texts are 0, 1, 2, ..."""
    sizes = lengths or [4] * len(correct)
    answers = []
    for character, size in zip(correct, sizes, strict=True):
        mode = None if character == "1" else modes
        text = np.arange(size, dtype=np.int32)
        answers.append(Answer(float(character), mode, text, kv_bytes=60, kv_bytes_full=100))
    return Outcome(key or correct, tuple(answers), seconds=1.5)


def ranking(name: str, *alphas: list[float]) -> Ranking:
    """A ranking of six heads with a seed per list of gates."""
    gates = tuple(HeadGates(torch.tensor(alpha).view(SHAPE)) for alpha in alphas)
    orders = tuple(tuple(compression_order(each)) for each in gates)
    return Ranking(name, SHAPE, orders, gates, tuple(f"{name}-{i}.pt" for i in range(len(gates))))
