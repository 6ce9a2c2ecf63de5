"""Metrics of a run: pass@k, intervals, paired tests, repetition of texts, error modes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, bootstrap, permutation_test

# how a compressed model fails where the full cache succeeds
MODES = ("repetitive", "overlength", "incorrect")
RESAMPLES = 10_000
AT_ONCE = 500  # resamples drawn together: bounds the memory
Floats = NDArray[np.float64]
NGRAMS = (1, 2, 3)
ROUNDING = 1e-9  # of means of 0s and 1s: a loss of exactly the margin is not more than the margin
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` problems with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two runs over the same ``n`` problems, second minus first.

    Attributes:
        low, high: 95% interval of the difference; p_value: two-sided, of no difference.
        changed: problems whose score differs.
    """

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    changed: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of ``k`` samples is right.

    Source: Chen et al., arXiv 2107.03374, equation 1: 1 - C(n-c, k) / C(n, k), for ``samples`` n
    of which ``correct`` c are right.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def problem_scores(correct: Sequence[Sequence[bool]], k: int = 1) -> Floats:
    """Return pass@k of every problem, float ``[problems]``, from the verdicts on its samples."""
    found = [pass_at_k(len(verdicts), sum(verdicts), k) for verdicts in correct]
    return np.array(found, dtype=np.float64)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a proportion (JASA 22, 1927).

    It is sound at 0 and 1 and for small ``n``.
    """
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def unseen_interval(value: float, n: int, least: float) -> tuple[float, float]:
    """Return the 95% interval of a mean over problems, of which ``n`` were seen with one ``value``.

    Other problems may have any value from ``least`` to 1.  Their share is at most Wilson's upper
    bound u of 0 in ``n``, so that the mean lies between ``value`` moved by u towards either end.
    """
    share = wilson_interval(0, n)[1]
    return value + share * (least - value), value + share * (1 - value)


def bootstrap_mean(scores: Sequence[float] | Floats) -> Estimate:
    """Return the mean of ``scores``, one per problem, with a 95% percentile bootstrap interval.

    If all problems have the same score the interval has no width.  It then says nothing about other
    problems.
    """
    values = np.asarray(scores, dtype=np.float64)
    mean = float(values.mean())
    if _is_one_value(values):
        return Estimate(mean, mean, mean, values.size)
    rng = np.random.default_rng(0)
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, batch=AT_ONCE, method="percentile", rng=rng
    )
    low, high = found.confidence_interval
    return Estimate(mean, float(low), float(high), values.size)


def mean_with_interval(scores: Sequence[float] | Floats) -> Estimate:
    """Return the mean of a score in [0, 1] per problem with its 95% interval.

    It is Wilson's where all scores are 0 or 1, else a bootstrap over problems.  Where all problems
    have the same score in between, the bootstrap has no width, and :func:`unseen_interval` is
    taken.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.size and np.isin(values, (0.0, 1.0)).all():
        low, high = wilson_interval(int(values.sum()), values.size)
        return Estimate(float(values.mean()), low, high, values.size)
    estimate = bootstrap_mean(values)
    if _is_one_value(values):
        low, high = unseen_interval(estimate.mean, values.size, least=0.0)
        return Estimate(estimate.mean, low, high, values.size)
    return estimate


def paired_difference(
    first: Sequence[float] | Floats, second: Sequence[float] | Floats
) -> PairedDifference:
    """Compare two runs by their scores in [0, 1] on the same problems, in the same order.

    The interval is a percentile bootstrap over problems.  It has no width where all differences are
    one number (no problem changed, or all by as much); the interval is then that of
    :func:`unseen_interval` for differences from -1 to 1: equal runs on 20 problems give [-0.16,
    +0.16], on 200 [-0.019, +0.019].

    The p value is that of a sign-flip permutation test on the differences (Fisher 1935).  It is
    exact where all changes are as large, as those of scores 0 and 1 are (:func:`sign_test`), and
    where there are at most :data:`RESAMPLES` flips; else so many random ones are drawn, the
    observed one counted.

    Raises:
        ValueError: if the runs differ in their number of problems.
    """
    differences = _differences(first, second)
    found = bootstrap_mean(differences)
    low, high = found.low, found.high
    if _is_one_value(differences):
        low, high = unseen_interval(found.mean, found.n, least=-1.0)
    changes = differences[differences != 0]  # flips of the others change nothing
    p_value = 1.0  # of one change: both of its signs are as far from 0
    # means over samples and seeds differ in their last bit: 2/3 - 1/3 is not 1/3
    if changes.size and _is_one_value(np.abs(changes)):
        p_value = float(binomtest(int((changes > 0).sum()), changes.size).pvalue)
    elif changes.size > 1:
        test = permutation_test(
            (changes,),
            lambda x, axis: np.round(x.sum(axis), 9),
            permutation_type="samples",
            n_resamples=RESAMPLES,
            batch=AT_ONCE,
            rng=np.random.default_rng(0),
        )
        p_value = float(test.pvalue)
    return PairedDifference(found.mean, low, high, p_value, found.n, changes.size)


def _differences(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> Floats:
    """Return second minus first for each problem."""
    a = np.asarray(first, dtype=np.float64)
    b = np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(
            f"a paired test needs the same problems in both runs, got {a.size} and {b.size}"
        )
    differences = b - a
    return np.where(np.abs(differences) < 1e-9, 0.0, differences)


def _is_one_value(values: Floats) -> bool:
    return bool(np.ptp(values) < 1e-9)


def smallest_provable_difference(n: int) -> float | None:
    """Return the smallest difference in accuracy over ``n`` problems with p < 0.05 in a sign test.

    In the best case one run solves all that the other does and 6 more: 2 * 0.5^6 = 0.031, 2 * 0.5^5
    = 0.0625.  None if there are fewer problems; 0.2 for 30.
    """
    return 6 / n if n >= 6 else None


def ngram_entropy(tokens: Sequence[Hashable], n: int) -> float:
    """Return the Shannon entropy of the n-grams of one text, in bits; 0 without n-grams.

    It is low where the text repeats itself.

    Source: RPC, arXiv 2505.13866, equation 1: H_n = -sum over distinct n-grams g of p(g) log2 p(g),
    p(g) the share of g among all n-grams of the text.  It is at most log2 of their number: compare
    texts of one length only.
    """
    counts = _ngrams(tokens, n)
    total = counts.total()
    return -sum(c / total * math.log2(c / total) for c in counts.values()) + 0.0  # not -0.0


def repetition_rate(tokens: Sequence[Hashable], n: int) -> float:
    """Return the share of the n-grams of one text that occurred in it before; 0 without n-grams."""
    counts = _ngrams(tokens, n)
    return 1 - len(counts) / counts.total() if counts else 0.0


def ngram_frequency(tokens: Sequence[Hashable], n: int) -> float:
    """Return how often the n-gram at a random position occurs in the text.

    That is sum c^2 / sum c over the counts c of n-grams: our reading of the "average n-gram
    frequency" of R-KV (arXiv 2505.24133, figure 2, without a formula).
    """
    counts = _ngrams(tokens, n)
    return sum(c * c for c in counts.values()) / counts.total() if counts else 0.0


def _ngrams(tokens: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def sentence_redundancy(text: str) -> float:
    """Return the share of the sentences of a text that repeat an earlier one; 0 without sentences.

    Case and white space do not count.  A sentence ends at ``.``, ``!`` or ``?`` before white space,
    or at the end of a line.
    """
    sentences = [" ".join(part.lower().split()) for part in _SENTENCE_END.split(text)]
    sentences = [sentence for sentence in sentences if any(c.isalnum() for c in sentence)]
    return 1 - len(set(sentences)) / len(sentences) if sentences else 0.0


@dataclass(frozen=True)
class RepetitionRule:
    """Call a text repetitive if ``window`` tokens in a row hold fewer than ``distinct`` ones.

    Checked at every full ``window`` of the output but the first, as in RLKV's evaluator (arXiv
    2510.08525: 400 tokens, 40 distinct ones), whose first check is at 800 tokens.

    Raises:
        ValueError: unless 1 <= distinct <= window; every text would be repetitive, or none.
    """

    window: int = 400
    distinct: int = 40

    def __post_init__(self) -> None:
        if not 1 <= self.distinct <= self.window:
            raise ValueError(
                f"--repetition {self.window} {self.distinct}: a window of {self.window} tokens "
                f"never holds {self.distinct} distinct ones: give WINDOW DISTINCT, such as 400 40"
            )

    def __call__(self, token_ids: list[int]) -> bool:
        """Return whether some check fails."""
        ends = range(self.window, len(token_ids) + 1, self.window)
        return any(self.ends(token_ids[:end]) for end in ends)

    def ends(self, token_ids: list[int]) -> bool:
        """Return whether there is a check after these tokens, and it fails."""
        due = len(token_ids) > self.window and len(token_ids) % self.window == 0
        return due and len(set(token_ids[-self.window :])) < self.distinct


def error_mode(row: dict[str, Any]) -> str | None:
    """Return the first of ``MODES`` that fits a row of a run, None for a right answer."""
    if row["correct"]:
        return None
    if row["repetitive"]:
        return "repetitive"
    return "overlength" if row["finish_reason"] == "length" else "incorrect"


def sign_test(
    first: Sequence[float] | Floats, second: Sequence[float] | Floats
) -> tuple[int, int, float]:
    """Compare two runs by the signs of the differences of their scores on the same problems.

    It ignores the size of a difference.  For scores 0 and 1 it equals the flip test of
    :func:`paired_difference` (McNemar).

    Returns:
        The problems on which the second run is better, those on which it is worse, and the
        two-sided p value that both are equally likely (exact binomial test).

    Raises:
        ValueError: if the runs differ in their number of problems.
    """
    differences = _differences(first, second)
    better = int((differences > 0).sum())
    worse = int((differences < 0).sum())
    p_value = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return better, worse, p_value


def ratio_with_interval(parts: Sequence[int], wholes: Sequence[int]) -> Estimate | None:
    """Return ``sum(parts) / sum(wholes)``, both one per problem, with its 95% bootstrap interval.

    An example are the right ones among the terminated texts, whose number differs between problems.
    Resamples without any are left out.  Where all problems have one ratio, the interval is that of
    :func:`unseen_interval`.  Wholes of at most 1 make it the mean of 0s and 1s, with Wilson's
    interval.

    Returns:
        None if all ``wholes`` are 0; ``n`` counts the problems where it is not.
    """
    part_P = np.asarray(parts, dtype=np.float64)
    whole_P = np.asarray(wholes, dtype=np.float64)
    counted = whole_P > 0
    n = int(counted.sum())
    if n == 0:
        return None
    if whole_P.max() <= 1:
        return mean_with_interval(part_P[counted])
    ratio = float(part_P.sum() / whole_P.sum())
    if np.ptp(part_P[counted] / whole_P[counted]) == 0:
        low, high = unseen_interval(ratio, n, least=0.0)
        return Estimate(ratio, low, high, n)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES // AT_ONCE):
        chosen_RP = rng.integers(whole_P.size, size=(AT_ONCE, whole_P.size))
        part_R = part_P[chosen_RP].sum(1)
        whole_R = whole_P[chosen_RP].sum(1)
        found.append(part_R[whole_R > 0] / whole_R[whole_R > 0])
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return Estimate(ratio, float(low), float(high), n)


def near_lossless(
    full: Floats, scores: Floats, sparsities: Sequence[float], margin: float
) -> dict[str, Any]:
    """Find the largest sparsity up to which no measured one loses more than ``margin``, else 0.

    Args:
        full: accuracy of the full cache on each problem, ``[problems]``.
        scores: accuracy of the method, ``[sparsities, problems]``; ``sparsities`` ascend.

    Returns:
        ``sparsity``; ``low`` and ``high``, its 95% interval by bootstrap over problems, the same
        for both runs; ``support``, the share of resamples with the same threshold, near 1 where
        methods tie, however few the problems; ``not_excluded``, the largest loss in accuracy that
        ``n`` problems do not exclude at the sparsities up to this one: Wilson's upper bound (95%)
        of the share of problems that got worse, gains not counted, None where the sparsity is 0.
    """
    values = np.array([0.0, *sparsities])
    losses = full - scores
    steps = int(_steps(losses.mean(axis=1)[:, None], margin)[0])
    found = values[steps]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES // AT_ONCE):
        rows = rng.integers(0, full.size, (AT_ONCE, full.size))
        drawn.append(values[_steps(losses[:, rows].mean(axis=2), margin)])
    thresholds = np.concatenate(drawn)
    # inverted_cdf: an end of the interval is a measured sparsity too
    low, high = np.quantile(thresholds, [0.025, 0.975], method="inverted_cdf")
    worse = int((losses[:steps] > ROUNDING).sum(axis=1).max(initial=0))
    return {
        "sparsity": float(found),
        "low": float(low),
        "high": float(high),
        "support": float(np.mean(thresholds == found)),
        "not_excluded": wilson_interval(worse, full.size)[1] if steps else None,
        "margin": margin,
        "n": full.size,
    }


def _steps(losses: Floats, margin: float) -> NDArray[np.int64]:
    """Count the sparsities from the first one on that lose at most the margin: int ``[R]``.

    losses: ``[sparsities, R]``.
    """
    return np.cumprod(losses <= margin + ROUNDING, axis=0).sum(axis=0)
