"""Which setting of a grid to serve with: fewest bytes at the full cache's accuracy, or most
accurate within bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkv.evaluation.measurements import Sizes
from rlkv.evaluation.metrics import ROUNDING, Floats, paired_difference
from rlkv.evaluation.report import LEVEL, sign_of


@dataclass(frozen=True, eq=False)
class Candidate:
    """A setting; of each task its scores, float ``[problems]``, and its share of the full cache's
    bytes.
    """

    sizes: Sizes
    sparsity: float
    scores: dict[str, Floats]
    shares: dict[str, float]

    @property
    def share(self) -> float:
        """Mean over the tasks."""
        return float(np.mean(list(self.shares.values())))

    @property
    def accuracy(self) -> float:
        """Mean over the tasks."""
        return float(np.mean([scores.mean() for scores in self.scores.values()]))

    def part(self, half: int) -> Candidate:
        """The same on every second problem, from ``half`` (0 or 1) on."""
        return Candidate(self.sizes, self.sparsity, halve(self.scores, half), self.shares)

    def is_near(self, full: dict[str, Floats], margin: float) -> bool:
        """Whether on every task the loss is at most the margin and no paired test shows one."""
        for task, scores in self.scores.items():
            if full[task].mean() - scores.mean() > margin + ROUNDING:
                return False
            test = paired_difference(full[task], scores)
            if sign_of(test.difference, test.p_value) == "worse":
                return False
        return True


def halve(scores: dict[str, Floats], half: int) -> dict[str, Floats]:
    """Every second problem of each task."""
    return {task: of[half::2] for task, of in scores.items()}


def choose(
    candidates: list[Candidate], full: dict[str, Floats], margin: float, budget: float | None
) -> Candidate | None:
    """The setting with the fewest bytes that :meth:`Candidate.is_near`.

    With ``budget`` the most accurate within it.

    ``budget`` is a share of the full cache's bytes on every task.  None if no setting qualifies.
    """
    if budget is not None:
        within = [of for of in candidates if max(of.shares.values()) <= budget]
        return max(within, key=lambda of: (of.accuracy, -of.share), default=None)
    by_bytes = sorted(candidates, key=lambda of: (of.share, -of.accuracy))
    return next((of for of in by_bytes if of.is_near(full, margin)), None)


def recommend(
    candidates: list[Candidate], full: dict[str, Floats], margin: float, budget: float | None
) -> dict[str, Any] | None:
    """The choice with its accuracy and bytes on each task; None if no setting qualifies.

    ``alike``: with a budget, how many others within it no paired test separates from it on any
    task.  ``held_out``: accuracy of what the rule chooses on one half of the problems, measured on
    the other half, mean of both ways, next to the full cache's; None if one half leaves no choice.
    The accuracy of the choice itself, which was chosen on the same problems, is likely too high.
    """
    best = choose(candidates, full, margin, budget)
    if best is None:
        return None
    alike = None
    if budget is not None:
        others = [of for of in candidates if of is not best and max(of.shares.values()) <= budget]
        alike = sum(
            all(_same(best.scores[task], of.scores[task]) for task in full) for of in others
        )
    return {
        "sizes": best.sizes._asdict(),
        "name": str(best.sizes),
        "sparsity": best.sparsity,
        "accuracy": {task: float(scores.mean()) for task, scores in best.scores.items()},
        "full": {task: float(scores.mean()) for task, scores in full.items()},
        "share": best.shares,
        "alike": alike,
        "held_out": _held_out(candidates, full, margin, budget),
    }


def _same(first: Floats, second: Floats) -> bool:
    return paired_difference(first, second).p_value >= LEVEL


def _held_out(
    candidates: list[Candidate], full: dict[str, Floats], margin: float, budget: float | None
) -> dict[str, Any] | None:
    if min(len(scores) for scores in full.values()) < 2:
        return None
    found = []
    for half in (0, 1):
        chosen = choose([of.part(half) for of in candidates], halve(full, half), margin, budget)
        if chosen is None:
            return None
        other = next(
            of for of in candidates if (of.sizes, of.sparsity) == (chosen.sizes, chosen.sparsity)
        )
        means = [
            np.mean([of.mean() for of in halve(scores, 1 - half).values()])
            for scores in (other.scores, full)
        ]
        found.append((f"{chosen.sizes} @ {chosen.sparsity:g}", *map(float, means)))
    return {
        "chosen": [name for name, *_ in found],
        "accuracy": float(np.mean([accuracy for _, accuracy, _ in found])),
        "full": float(np.mean([accuracy for *_, accuracy in found])),
    }
