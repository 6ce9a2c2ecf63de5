"""Cases in which every pair of values of two factors occurs, instead of the whole product."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(factors: Mapping[str, Collection[Any]]) -> list[dict[str, Any]]:
    """Cover all pairs greedily; the same cases in every run."""
    draw = random.Random(0)

    def pairs(case: Sequence[int]) -> set:
        return set(combinations(enumerate(case), 2))

    values = [list(found) for found in factors.values()]
    sizes = [len(found) for found in values]
    missing = set()
    for (i, m), (j, n) in combinations(enumerate(sizes), 2):
        missing |= {((i, a), (j, b)) for a in range(m) for b in range(n)}
    cases = []
    while missing:
        (i, a), (j, b) = min(missing)
        some = []
        for _ in range(50):  # of random cases with a pair that is missing, the one with the most
            case = [draw.randrange(size) for size in sizes]
            case[i] = a
            case[j] = b
            some.append(case)
        best = max(some, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen = [values[i][place] for i, place in enumerate(best)]
        cases.append(dict(zip(factors, chosen, strict=True)))
    return cases
