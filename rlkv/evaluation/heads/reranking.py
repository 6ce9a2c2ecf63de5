"""Heads in the order in which they can go, measured among those that the gates keep: a closing step after training.

A gate says how much of a head is needed while the others are open too, not what is lost when the head goes.  At the
sparsity where the gates stop being certain, the candidates are made compressible one by one, each time the one whose
loss leaves the best score (:func:`rlkv.evaluation.heads.elimination.backward_elimination`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rlkv.evaluation.heads.elimination import Elimination, Score, backward_elimination, num_scores
from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.head_gates import HeadGates


@dataclass(frozen=True)
class Span:
    """The part of the order that is measured: heads that go between the sparsities ``low`` and ``high``.

    Every head that is full at ``low`` is a candidate.

    Raises:
        ValueError: if the sparsities are not in [0, 1], or no head lies between them.
    """

    gates: HeadGates
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(
                f"between the sparsities {self.low:g} and {self.high:g} no head of {self.gates.alpha.numel()} becomes "
                "compressible: lower the first or raise the second"
            )

    @property
    def num_candidates(self) -> int:
        return num_full_heads(self.low, self.gates.alpha.numel())

    @property
    def num_steps(self) -> int:
        return self.num_candidates - num_full_heads(self.high, self.gates.alpha.numel())

    @property
    def cost(self) -> int:
        """Scores that :func:`rerank` takes."""
        return num_scores(self.num_candidates, self.num_steps)


def with_order(gates: HeadGates, order: Sequence[tuple[int, int]]) -> HeadGates:
    """``gates`` with the same numbers handed out so that ``compression_order`` is ``order`` (all heads, each once).

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha, rank = torch.empty_like(gates.alpha), torch.empty_like(gates.mean_alpha)
    last = max(1, len(order) - 1)
    for place, (head, value) in enumerate(zip(order, gates.alpha.flatten().sort().values, strict=True)):
        alpha[head], rank[head] = value, place / last
    return replace(gates, alpha=alpha, mean_alpha=rank)


def rerank(span: Span, score: Score, on_call: Callable[[], None]) -> tuple[HeadGates, list[Elimination]]:
    """Gates whose order is measured within ``span`` and theirs elsewhere, and the steps of the measurement."""
    gates = span.gates
    order = compression_order(gates)
    start = HeadAllocation.from_gates(gates, span.low)
    num_full = span.num_candidates - span.num_steps
    steps = backward_elimination(score, gates.num_layers, gates.num_kv_heads, on_call, start, num_full)
    measured = [(step.layer, step.head) for step in steps]
    before = order[: len(order) - span.num_candidates]
    after = [head for head in order[len(before) :] if head not in measured]
    return with_order(gates, [*before, *measured, *after]), steps
