"""Confidence intervals and the exact paired test for accuracies."""

from __future__ import annotations

from scipy.stats import binomtest


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion (Wilson, JASA 22, 1927), sound at 0 and 1 and for small ``n``.

    Raises:
        ValueError: unless 0 <= successes <= n and n > 0.
    """
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided p value that two methods differ, by the problems that only one of them solves (exact McNemar test)."""
    changed = only_first + only_second
    return float(binomtest(only_first, changed).pvalue) if changed else 1.0
