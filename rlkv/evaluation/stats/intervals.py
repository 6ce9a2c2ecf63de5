"""Confidence intervals for accuracies."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion (95% by default), sound at 0 and 1 and for small ``n``.

    Source: Wilson, JASA 22 (1927): (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Raises:
        ValueError: unless 0 <= successes <= n and n > 0.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"an interval needs 0 <= successes <= n and n > 0, got successes={successes}, n={n}")
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # p itself lies inside: rounding would leave it out at 0 and 1
    return min(p, max(0.0, (centre - spread) / scale)), max(p, min(1.0, (centre + spread) / scale))


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided p value that two methods differ, from the problems that only one of them solves (exact McNemar test).

    Source: McNemar, Psychometrika 12 (1947), with the binomial distribution instead of its approximation.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2 * tail)
