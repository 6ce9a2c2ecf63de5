"""Figures of a run over problems, each a pure function: pass@k, intervals, paired tests, repetition, lengths."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkv.evaluation.stats.intervals import sign_test, wilson_interval

RESAMPLES = 10_000
ROWS_AT_ONCE = 500  # resamples drawn together: bounds the memory
Floats = NDArray[np.float64]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is right, estimated without bias from ``samples`` of them.

    Source: Chen et al., arXiv 2107.03374, equation 1: 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples, got correct={correct}, samples={samples}, "
            f"k={k}"
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def problem_scores(correct: Sequence[Sequence[bool]], k: int = 1) -> Floats:
    """pass@k of every problem, float ``[problems]``, from the verdicts of its samples.

    With k = 1 it is the share of right samples, so that the mean over problems is pass@1 as the mean over samples.
    """
    return np.array([pass_at_k(len(verdicts), sum(verdicts), k) for verdicts in correct], dtype=np.float64)


FEW_CHANGED = (
    "Where only a few problems changed, all in one direction, the bootstrap interval of a difference is too narrow and "
    "can leave out 0: the verdict is the test's."
)


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` problems with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int


def bootstrap_mean(
    scores: Sequence[float] | Floats, seed: int = 0, resamples: int = RESAMPLES, confidence: float = 0.95
) -> Estimate:
    """Mean of ``scores`` (one per problem) and its percentile bootstrap interval over problems.

    Source: Efron, Annals of Statistics 7 (1979).  If all problems have one score the interval has no width: it says
    nothing of other problems, for which :func:`rlkv.evaluation.stats.intervals.wilson_interval` is the honest one.

    Raises:
        ValueError: without problems.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"an interval needs one score per problem, got an array of shape {values.shape}")
    rng = np.random.default_rng(seed)
    means = _resampled(
        lambda rows: values[rng.integers(0, values.size, (rows, values.size))].mean(axis=1, dtype=np.float64),
        resamples,
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(values.mean()), float(low), float(high), values.size)


def mean_with_interval(scores: Sequence[float] | Floats, seed: int = 0) -> Estimate:
    """Mean of a score in [0, 1] per problem: Wilson's interval where all are 0 or 1, else bootstrap over problems.

    Where all problems have one score in between, the bootstrap has no width; the interval is then that of
    :func:`unseen_interval`.

    Raises:
        ValueError: without problems.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.size and np.isin(values, (0.0, 1.0)).all():
        low, high = wilson_interval(int(values.sum()), values.size)
        return Estimate(float(values.mean()), low, high, values.size)
    estimate = bootstrap_mean(values, seed)
    if np.ptp(values) == 0:
        low, high = unseen_interval(float(values[0]), values.size, 0.0, 1.0)
        return Estimate(estimate.mean, low, high, values.size)
    return estimate


def unseen_interval(value: float, n: int, least: float, most: float) -> tuple[float, float]:
    """95% interval of a mean over problems, of which ``n`` were seen and all had ``value``.

    Other problems may have any value from ``least`` to ``most``.  Their share is at most Wilson's upper bound u of
    0 in ``n``, so that the mean lies between ``value`` moved by u towards either end.
    """
    share = wilson_interval(0, n)[1]
    return value + share * (least - value), value + share * (most - value)


@dataclass(frozen=True)
class PairedDifference:
    """How much the second run differs from the first over the same problems (second minus first).

    Attributes:
        difference, low, high: mean difference and its 95% interval over problems.
        p_value: two-sided, of the hypothesis that the runs are exchangeable on every problem.
        n, changed: problems, and those on which the runs differ.
    """

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    changed: int


def paired_difference(
    first: Sequence[float] | Floats, second: Sequence[float] | Floats, seed: int = 0, resamples: int = RESAMPLES
) -> PairedDifference:
    """Compare two runs by their scores in [0, 1] on the same problems, in the same order.

    The interval is a percentile bootstrap over problems.  That has no width where all differences are one number (no
    problem changed, or all by as much); the interval is then that of :func:`unseen_interval` for differences from -1
    to 1: equal runs on 20 problems give [-0.16, +0.16], on 200 [-0.019, +0.019].

    The p value is that of a sign-flip permutation test on the differences (Fisher 1935): all flips if there are at
    most ``resamples`` of them, else ``resamples`` random ones, the observed one counted.

    Raises:
        ValueError: if the runs differ in their number of problems, or have none.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a paired test needs the same problems in both runs, got {a.size} and {b.size}")
    estimate = bootstrap_mean(b - a, seed, resamples)
    if np.ptp(b - a) == 0:
        low, high = unseen_interval(float((b - a)[0]), a.size, -1.0, 1.0)
        estimate = Estimate(estimate.mean, low, high, estimate.n)
    changes = (b - a)[b != a]
    p_value = _flip_test(changes, seed, resamples)
    return PairedDifference(estimate.mean, estimate.low, estimate.high, p_value, a.size, changes.size)


def _flip_test(changes: Floats, seed: int, resamples: int) -> float:
    if not changes.size:
        return 1.0
    observed = abs(changes.sum()) * (1 - 1e-12)  # sums of equal flips may differ by rounding
    if changes.size < 63 and 2**changes.size <= resamples:
        flips = (np.arange(2**changes.size)[:, None] >> np.arange(changes.size)) & 1
        return float(np.mean(np.abs((1 - 2 * flips) @ changes) >= observed))
    rng = np.random.default_rng(seed)
    sums = _resampled(lambda rows: (1 - 2 * rng.integers(0, 2, (rows, changes.size))) @ changes, resamples)
    return float((1 + np.sum(np.abs(sums) >= observed)) / (1 + resamples))


def _resampled(draw: Callable[[int], Floats], resamples: int) -> Floats:
    sizes = [min(ROWS_AT_ONCE, resamples - done) for done in range(0, resamples, ROWS_AT_ONCE)]
    return np.concatenate([draw(size) for size in sizes])


def smallest_provable_difference(n: int, level: float = 0.05) -> float | None:
    """The smallest difference in accuracy over ``n`` problems that a sign test can call significant.

    It supposes the best case, that one run solves all that the other does and some more; None if no difference would
    do.  For the note under a table: with 30 problems it is 0.2.
    """
    return next((extra / n for extra in range(1, n + 1) if sign_test(extra, 0) < level), None)


def ngram_entropy(tokens: Sequence[Hashable], n: int) -> float:
    """Shannon entropy of the n-grams of one text, in bits; low where it repeats itself.  0 without n-grams.

    Source: RPC, arXiv 2505.13866, equation 1: H_n = -sum over distinct n-grams g of p(g) log2 p(g), p(g) the share of
    g among all n-grams of the text.  It is at most log2 of their number: compare texts of one length only.
    """
    counts = _ngrams(tokens, n)
    total = counts.total()
    return -sum(c / total * math.log2(c / total) for c in counts.values()) + 0.0  # not -0.0


def repetition_rate(tokens: Sequence[Hashable], n: int) -> float:
    """Share of the n-grams of one text that occurred in it before: 1 - distinct / all.  0 without n-grams."""
    counts = _ngrams(tokens, n)
    return 1 - len(counts) / counts.total() if counts else 0.0


def ngram_frequency(tokens: Sequence[Hashable], n: int) -> float:
    """How often the n-gram at a random position occurs in the text: sum c^2 / sum c over the counts c of n-grams.

    R-KV (arXiv 2505.24133, figure 2) shows an "average n-gram frequency" without a formula.  Its figures (167.6 for
    1-grams in texts of 2,833 tokens) cannot be all / distinct, which would leave 17 distinct tokens; this mean over
    positions is our reading, so compare its values with each other only.  0 without n-grams.
    """
    counts = _ngrams(tokens, n)
    return sum(c * c for c in counts.values()) / counts.total() if counts else 0.0


def sentence_redundancy(text: str) -> float:
    """Share of the sentences of a text that repeat an earlier one, up to case and white space; 0 without sentences.

    A sentence ends at ``.``, ``!`` or ``?`` before white space, or at the end of a line.
    """
    sentences = [" ".join(part.lower().split()) for part in _SENTENCE_END.split(text)]
    sentences = [sentence for sentence in sentences if any(c.isalnum() for c in sentence)]
    return 1 - len(set(sentences)) / len(sentences) if sentences else 0.0


def _ngrams(tokens: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    if n < 1:
        raise ValueError(f"n-grams need n of at least 1, got {n}")
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


@dataclass(frozen=True)
class CommonLengths:
    """Mean response lengths (tokens) over the ``n`` completions that are right in both runs; None if there is none."""

    first: float | None
    second: float | None
    n: int


def lengths_when_both_right(
    first: Sequence[bool], second: Sequence[bool], first_lengths: Sequence[int], second_lengths: Sequence[int]
) -> CommonLengths:
    """Response lengths of two runs where both are right: a method that solves only easy problems gains nothing by it.

    Source: RLKV, arXiv 2510.08525, average response length.  All four lists have one entry per completion, the same
    problems (and samples) in the same order.

    Raises:
        ValueError: if they differ in length.
    """
    sizes = {len(first), len(second), len(first_lengths), len(second_lengths)}
    if len(sizes) != 1:
        raise ValueError(f"lengths are compared over the same completions, got lists of {sorted(sizes)} entries")
    both = [i for i in range(len(first)) if first[i] and second[i]]
    if not both:
        return CommonLengths(None, None, 0)
    a, b = (sum(lengths[i] for i in both) / len(both) for lengths in (first_lengths, second_lengths))
    return CommonLengths(a, b, len(both))
