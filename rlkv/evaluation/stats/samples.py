"""Several samples of each problem: all of them right, the texts that ended by themselves, and the sign test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from rlkv.evaluation.stats.metrics import AT_ONCE, RESAMPLES, Estimate, Floats, mean_with_interval, unseen_interval


@dataclass(frozen=True)
class SignTest:
    """Problems on which the second run scores ``better`` and ``worse`` than the first; ties do not count.

    ``p_value``: two-sided, of the null hypothesis that both are equally likely (exact binomial test).
    """

    better: int
    worse: int
    p_value: float


def strict_scores(correct: Sequence[Sequence[bool]]) -> Floats:
    """1 for every problem whose samples are all right, else 0: float ``[problems]``."""
    return np.array([all(verdicts) for verdicts in correct], dtype=np.float64)


def sign_test(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> SignTest:
    """Compare two runs by the signs of the differences of their scores on the same problems, in the same order.

    It ignores the size of a difference.  For scores 0 and 1 it equals the flip test of
    :func:`rlkv.evaluation.stats.metrics.paired_difference` (McNemar).

    Raises:
        ValueError: if the runs differ in their number of problems.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a paired test needs the same problems in both runs, got {a.size} and {b.size}")
    better, worse = int((b > a).sum()), int((b < a).sum())
    p_value = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return SignTest(better, worse, p_value)


def ratio_with_interval(parts: Sequence[int], wholes: Sequence[int]) -> Estimate | None:
    """``sum(parts) / sum(wholes)``, both one per problem, with its 95% percentile bootstrap interval over problems.

    Such as the right ones among the terminated texts, whose number differs between problems.  Resamples without any
    are left out.  Where all problems have one ratio, the interval is that of
    :func:`rlkv.evaluation.stats.metrics.unseen_interval`.  Wholes of at most 1 make it the mean of 0s and 1s, with
    Wilson's interval.

    Returns:
        None if all ``wholes`` are 0; ``n`` counts the problems where it is not.
    """
    part_P, whole_P = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    counted = whole_P > 0
    n = int(counted.sum())
    if n == 0:
        return None
    if whole_P.max() <= 1:
        return mean_with_interval(part_P[counted])
    ratio = float(part_P.sum() / whole_P.sum())
    if np.ptp(part_P[counted] / whole_P[counted]) == 0:
        return Estimate(ratio, *unseen_interval(ratio, n, least=0.0), n)
    rng, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES // AT_ONCE):
        chosen_RP = rng.integers(whole_P.size, size=(AT_ONCE, whole_P.size))
        part_R, whole_R = part_P[chosen_RP].sum(1), whole_P[chosen_RP].sum(1)
        found.append(part_R[whole_R > 0] / whole_R[whole_R > 0])
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return Estimate(ratio, float(low), float(high), n)
