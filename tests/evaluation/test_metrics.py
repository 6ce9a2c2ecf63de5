"""Figures of a run, against values computed by hand and by scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rlkv.evaluation.metrics import (
    RepetitionRule,
    bootstrap_mean,
    error_mode,
    mean_with_interval,
    near_lossless,
    ngram_entropy,
    ngram_frequency,
    paired_difference,
    pass_at_k,
    problem_scores,
    ratio_with_interval,
    repetition_rate,
    sentence_redundancy,
    sign_test,
    unseen_interval,
    wilson_interval,
)

Z_95 = stats.norm.ppf(0.975)
SPARSITIES = (0.2, 0.4, 0.6)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(k: int) -> None:
    verdicts = [True, False, False, True, False, False, False]
    subsets = list(itertools.combinations(verdicts, k))
    assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert problem_scores([verdicts, [True] * 7], k).tolist() == [pass_at_k(7, 2, k), 1.0]


# --- intervals


def test_wilson_against_known_values() -> None:
    # by hand from the formula with z = 1.96
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(97, 100) == pytest.approx((0.9155, 0.9897), abs=1e-4)


def test_equal_scores_have_an_interval_with_width() -> None:
    bound = Z_95**2 / (10 + Z_95**2)  # Wilson's upper bound of 0 in 10
    found = mean_with_interval([0.25] * 10)
    assert (found.low, found.high) == pytest.approx((0.25 * (1 - bound), 0.25 + 0.75 * bound))
    assert mean_with_interval([0.25, 0.5]) == bootstrap_mean([0.25, 0.5])
    thirds = mean_with_interval([0.5, 0.49999999999999994])  # one number, in two orders of a sum
    assert (thirds.low, thirds.high) == pytest.approx(unseen_interval(0.5, 2, least=0.0))
    right = mean_with_interval([1, 1])
    assert (right.low, right.high) == wilson_interval(2, 2)


def test_the_interval_of_a_ratio_agrees_with_scipy() -> None:
    rng = np.random.default_rng(1)
    wholes = rng.integers(1, 5, size=60)
    parts = rng.binomial(wholes, 0.6)

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return a.sum(axis) / b.sum(axis)

    want = stats.bootstrap((parts, wholes), ratio, paired=True, method="percentile", rng=rng)
    found = ratio_with_interval(parts.tolist(), wholes.tolist())
    assert found is not None
    assert found.mean == parts.sum() / wholes.sum()
    limits = (want.confidence_interval.low, want.confidence_interval.high)
    assert (found.low, found.high) == pytest.approx(limits, abs=0.01)


def test_ratios_without_spread() -> None:
    assert ratio_with_interval([0, 0], [0, 0]) is None
    found = ratio_with_interval([4, 2, 0], [4, 2, 0])
    assert found is not None
    assert (found.low, found.high) == unseen_interval(1.0, 2, least=0.0)
    # one text of each problem is right or wrong
    assert ratio_with_interval([1, 1, 0, 0], [1, 1, 1, 0]) == mean_with_interval([1.0, 1.0, 0.0])


# --- paired tests


def test_paired_difference_by_hand() -> None:
    # the second run solves 3 more and nothing less: of 8 sign flips 2 have a sum of +-3
    found = paired_difference([0, 0, 0, 1, 1], [1, 1, 1, 1, 1])
    assert found.difference == pytest.approx(0.6)
    assert (found.p_value, found.n, found.changed) == (0.25, 5, 3)
    assert 0 <= found.low <= 0.6 <= found.high <= 1
    mirrored = paired_difference([1, 1, 1, 1, 1], [0, 0, 0, 1, 1])
    assert (mirrored.difference, mirrored.p_value) == (pytest.approx(-0.6), 0.25)


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 6), (2, 7), (4, 4), (4, 13), (13, 4)])
def test_the_tests_of_verdicts_are_mcnemars(only_first: int, only_second: int) -> None:
    first = [1] * only_first + [0] * only_second + [1, 0, 1]
    second = [0] * only_first + [1] * only_second + [1, 0, 1]
    exact = stats.binomtest(only_first, only_first + only_second).pvalue
    # also where there are too many flips to try all: 2 ** 17
    assert paired_difference(first, second).p_value == pytest.approx(exact)
    assert sign_test(first, second) == (only_second, only_first, pytest.approx(exact))
    noisy = np.array(second) + np.linspace(-1e-16, 1e-16, len(second))
    assert paired_difference(first, noisy).changed == only_first + only_second
    assert sign_test(first, noisy)[:2] == (only_second, only_first)
    thirds = [np.mean([own, 1, 0]) for own in first], [np.mean([own, 1, 0]) for own in second]
    assert paired_difference(*thirds).p_value == pytest.approx(exact)


def test_gains_of_one_sample_in_three_are_equal() -> None:
    """However far the means of three samples were before: the last bits of thirds differ."""
    first = [0.0, 1 / 3, 2 / 3] * 10
    found = paired_difference(first, [score + 1 / 3 for score in first])
    assert found.difference == pytest.approx(1 / 3)
    assert found.low < 0.3 < 0.36 < found.high
    assert found.p_value < 1e-8


def test_flips_of_thirds_are_all_tried() -> None:
    changes = np.array([1, 1, 2, 3, -1, -2, 1, 3, 2, 1, 1])
    signs = np.array(list(itertools.product((1, -1), repeat=changes.size)))
    sums = np.abs(signs @ changes)
    exact = np.mean(sums >= abs(changes.sum()))
    before = np.array([1, 0, 1, 0, 2, 3, 2, 0, 1, 0, 2])  # samples of three that are right
    found = paired_difference(before / 3, (before + changes) / 3)
    assert found.p_value == pytest.approx(exact)


@pytest.mark.parametrize("n", [1, 200])
def test_few_problems_without_a_change_leave_room_for_one(n: int) -> None:
    bound = Z_95**2 / (n + Z_95**2)
    same = paired_difference([0.5] * n, [0.5] * n)
    assert (same.difference, same.p_value, same.changed) == (0, 1.0, 0)
    assert (same.low, same.high) == pytest.approx((-bound, bound))
    # all better by one: what was not seen may be worse by one
    better = paired_difference([0.0] * n, [1.0] * n)
    assert (better.low, better.high) == pytest.approx((1 - 2 * bound, 1.0))


def test_the_sign_test_counts_signs_only() -> None:
    first, second = [0.5, 0.5, 0.25, 0.0, 1.0, 0.75], [0.75, 1.0, 0.5, 0.25, 0.0, 0.75]
    # at most one of five: by hand
    assert sign_test(first, second) == (4, 1, pytest.approx(2 * (1 + 5) / 2**5))
    assert sign_test([1, 0], [1, 0]) == (0, 0, 1.0)


@pytest.mark.parametrize("test", [paired_difference, sign_test])
def test_other_problems_are_refused(test) -> None:
    with pytest.raises(ValueError, match="2 and 3"):
        test([0, 1], [0, 1, 1])


# --- the near-lossless threshold


def scores(*rights: int, n: int = 100) -> np.ndarray:
    """Return accuracies ``[sparsities, n]`` with the first so many problems right."""
    return np.stack([np.repeat([1.0, 0.0], [right, n - right]) for right in rights])


@pytest.mark.parametrize(
    ("rights", "margin", "want"),
    [
        ((100, 100, 100), 0.0, 0.6),
        ((98, 98, 97), 0.02, 0.4),  # exactly the margin is not more than the margin
        ((97, 100, 100), 0.02, 0.0),  # what comes after the first loss does not count
        ((90, 90, 89), 0.1, 0.4),  # 1 - 0.9 is not 0.1 in floating point
    ],
)
def test_threshold(rights: tuple[int, ...], margin: float, want: float) -> None:
    found = near_lossless(np.ones(100), scores(*rights), SPARSITIES, margin)
    assert found["sparsity"] == want
    assert found["low"] <= want <= found["high"]


def test_the_interval_of_a_threshold_is_that_of_resampled_problems() -> None:
    certain = near_lossless(np.ones(50), scores(50, 50, 0, n=50), SPARSITIES, 0.02)
    assert (certain["low"], certain["high"], certain["support"]) == (0.4, 0.4, 1.0)
    assert certain["not_excluded"] == wilson_interval(0, 50)[1]  # no width, but not certain
    # One of 100 problems is lost at 0.6: a resample without it or with it once or twice is
    # near-lossless at 2 points.  Poisson limit of the binomial: 0.9197.
    found = near_lossless(np.ones(100), scores(100, 100, 99), SPARSITIES, 0.02)
    exact = sum(np.exp(-1) / f for f in (1, 1, 2))
    assert found["support"] == pytest.approx(exact, abs=0.012)
    assert (found["sparsity"], found["low"], found["high"]) == (0.6, 0.4, 0.6)


# --- repetition and error modes


@pytest.mark.parametrize(
    ("measure", "text", "n", "expected"),
    [
        (ngram_entropy, "aabb", 1, 1.0),
        (ngram_entropy, "abab", 2, math.log2(3) - 2 / 3),  # ab twice, ba once
        (ngram_entropy, "ab", 3, 0.0),
        (repetition_rate, "abab", 1, 0.5),
        (repetition_rate, "", 1, 0.0),
        (ngram_frequency, "abab", 2, 5 / 3),  # counts 2 and 1: (4 + 1) / 3
        (ngram_frequency, "", 2, 0.0),
    ],
)
def test_ngrams_by_hand(measure, text: str, n: int, expected: float) -> None:
    assert measure(text, n) == pytest.approx(expected)


def test_sentence_redundancy_by_hand() -> None:
    assert sentence_redundancy("Wait, no. So it is 2.  wait, NO.") == pytest.approx(1 / 3)
    assert sentence_redundancy("a\na\n\na\nb") == pytest.approx(2 / 4)
    within = "x = 3.5 and y = 3.5. x = 3.5 and y = 3.5."  # a point within a number
    assert sentence_redundancy(within) == pytest.approx(1 / 2)
    assert sentence_redundancy("... ! ?") == sentence_redundancy("") == 0  # nothing said


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2] * 10, True),
        ([1, 2, 3] * 6 + [1, 2], False),
        ([1, 2] * 5 + list(range(10)), False),  # the first window is not checked
        (list(range(10)) + [1, 2] * 4, False),  # the second window is not full
        (list(range(5)) + [7] * 10 + list(range(5)), False),  # windows end at 10 and 20 only
    ],
)
def test_repetition_is_checked_at_every_full_window(ids: list[int], expected: bool) -> None:
    assert RepetitionRule(window=10, distinct=3)(ids) is expected


def test_the_papers_rule_is_the_default() -> None:
    assert RepetitionRule()([i % 39 for i in range(800)])
    assert not RepetitionRule()([i % 40 for i in range(800)])
    with pytest.raises(ValueError, match="--repetition 40 400"):
        RepetitionRule(40, 400)


def test_modes_in_their_order() -> None:
    row = {"correct": False, "repetitive": True, "finish_reason": "length"}
    assert error_mode(row) == "repetitive"
    assert error_mode(row | {"repetitive": False}) == "overlength"
    assert error_mode(row | {"repetitive": False, "finish_reason": "stop"}) == "incorrect"
    assert error_mode(row | {"correct": True}) is None
