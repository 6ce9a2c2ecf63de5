"""Figures of a run, against values computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rlkv.evaluation.metrics import (
    bootstrap_mean,
    mean_with_interval,
    ngram_entropy,
    ngram_frequency,
    paired_difference,
    pass_at_k,
    problem_scores,
    repetition_rate,
    sentence_redundancy,
    smallest_provable_difference,
    wilson_interval,
)

Z_95 = stats.norm.ppf(0.975)


# by hand: 1 - C(2,2)/C(4,2) = 1 - 1/6; 1 - C(3,2)/C(4,2) = 1 - 3/6
@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [
        (4, 2, 2, 5 / 6),
        (4, 1, 2, 1 / 2),
        (4, 1, 1, 1 / 4),
        (4, 0, 3, 0),
        (4, 4, 1, 1),
        (3, 2, 2, 1),
        (64, 1, 64, 1),
    ],
)
def test_pass_at_k_by_hand(samples: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(k: int) -> None:
    verdicts = [True, False, False, True, False, False, False]
    subsets = list(itertools.combinations(verdicts, k))
    assert pass_at_k(7, 2, k) == pytest.approx(
        sum(any(subset) for subset in subsets) / len(subsets)
    )


def test_pass_at_1_is_the_mean_over_samples() -> None:
    verdicts = [[True, False], [True, True], [False, False]]
    assert problem_scores(verdicts).tolist() == [0.5, 1.0, 0.0]
    assert problem_scores(verdicts).mean() == np.mean(verdicts)
    assert problem_scores(verdicts, k=2).tolist() == [1.0, 1.0, 0.0]


def test_bootstrap_of_a_binary_score_agrees_with_the_binomial_distribution() -> None:
    found = bootstrap_mean([1.0] * 30 + [0.0] * 20, seed=1)
    low, high = (
        stats.binom.ppf([0.025, 0.975], 50, 0.6) / 50
    )  # what resampling draws from, without its noise
    assert (found.mean, found.n) == (pytest.approx(0.6), 50)
    # 10,000 resamples: a quantile may be one step of 1/50 off
    assert found.low == pytest.approx(low, abs=0.0201)
    assert found.high == pytest.approx(high, abs=0.0201)


def test_bootstrap_is_seeded_and_covers_its_mean() -> None:
    scores = [0.0, 0.25, 1.0, 0.5]
    assert bootstrap_mean(scores, seed=3) == bootstrap_mean(scores, seed=3)
    assert bootstrap_mean(scores, seed=3).low <= 0.4375 <= bootstrap_mean(scores, seed=3).high
    assert bootstrap_mean([1.0, 1.0]) == bootstrap_mean([1.0, 1.0], seed=9)


@pytest.mark.parametrize("scores", [[], [[0.0, 1.0]]])
def test_bootstrap_refuses_anything_but_a_list_of_scores(scores: list) -> None:
    with pytest.raises(ValueError, match="interval"):
        bootstrap_mean(scores)


def test_paired_difference_by_hand() -> None:
    # the second run solves 3 more and nothing less: of 8 sign flips 2 have a sum of +-3
    found = paired_difference([0, 0, 0, 1, 1], [1, 1, 1, 1, 1])
    assert found.difference == pytest.approx(0.6)
    assert (found.p_value, found.n, found.changed) == (0.25, 5, 3)
    assert 0 <= found.low <= 0.6 <= found.high <= 1
    mirrored = paired_difference([1, 1, 1, 1, 1], [0, 0, 0, 1, 1])
    assert (mirrored.difference, mirrored.p_value) == (pytest.approx(-0.6), 0.25)


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 6), (2, 7), (4, 4), (1, 12)])
def test_the_flip_test_of_verdicts_is_the_sign_test(only_first: int, only_second: int) -> None:
    first = [1] * only_first + [0] * only_second + [1, 0, 1]
    second = [0] * only_first + [1] * only_second + [1, 0, 1]
    exact = stats.binomtest(only_first, only_first + only_second).pvalue  # McNemar
    assert paired_difference(first, second).p_value == pytest.approx(exact)


def test_random_flips_come_near_all_flips() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 5, 40) / 4, rng.integers(0, 5, 40) / 4
    sampled = [paired_difference(first, second, seed).p_value for seed in range(3)]
    spread = 4 * math.sqrt(
        sampled[0] * (1 - sampled[0]) / 10_000
    )  # four standard errors of a share of 10,000
    assert max(sampled) - min(sampled) < 2 * spread
    assert paired_difference(first, second, 1) == paired_difference(first, second, 1)


def test_equal_runs_do_not_differ() -> None:
    found = paired_difference([0.5, 1.0], [0.5, 1.0])
    assert (found.difference, found.p_value, found.changed) == (0, 1.0, 0)


@pytest.mark.parametrize("n", [1, 20, 200])
def test_few_problems_without_a_change_leave_room_for_one(n: int) -> None:
    bound = Z_95**2 / (n + Z_95**2)  # Wilson's upper bound of 0 in n
    same = paired_difference([0.5] * n, [0.5] * n)
    assert (same.low, same.high) == (pytest.approx(-bound), pytest.approx(bound))
    # all better by one: what was not seen may be worse by one
    better = paired_difference([0.0] * n, [1.0] * n)
    assert (better.difference, better.low, better.high) == (1.0, pytest.approx(1 - 2 * bound), 1.0)
    half = paired_difference([1.0] * n, [0.5] * n)
    assert (half.low, half.high) == (
        pytest.approx(-0.5 - bound / 2),
        pytest.approx(-0.5 + 1.5 * bound),
    )


def test_equal_scores_between_0_and_1_have_an_interval_with_width() -> None:
    bound = Z_95**2 / (10 + Z_95**2)
    found = mean_with_interval([0.25] * 10)
    assert (found.low, found.high) == (
        pytest.approx(0.25 * (1 - bound)),
        pytest.approx(0.25 + 0.75 * bound),
    )
    assert mean_with_interval([0.25, 0.5]) == bootstrap_mean([0.25, 0.5])
    assert (mean_with_interval([1, 1]).low, mean_with_interval([1, 1]).high) == wilson_interval(
        2, 2
    )
    with pytest.raises(ValueError, match=r"\(0,\)"):
        mean_with_interval([])


def test_paired_difference_refuses_other_problems() -> None:
    with pytest.raises(ValueError, match="2 and 3"):
        paired_difference([0, 1], [0, 1, 1])


def test_how_little_30_problems_prove() -> None:
    assert stats.binomtest(6, 6).pvalue < 0.05 <= stats.binomtest(5, 5).pvalue
    assert smallest_provable_difference(30) == pytest.approx(6 / 30)
    assert smallest_provable_difference(500) == pytest.approx(6 / 500)
    assert smallest_provable_difference(5) is None


def test_ngram_entropy_by_hand() -> None:
    assert ngram_entropy("aabb", 1) == pytest.approx(1.0)
    assert ngram_entropy("abcd", 1) == pytest.approx(2.0)
    assert ngram_entropy("abab", 2) == pytest.approx(math.log2(3) - 2 / 3)  # ab twice, ba once
    assert ngram_entropy([7] * 9, 3) == 0.0
    assert ngram_entropy("ab", 3) == 0.0


def test_repetition_by_hand() -> None:
    assert repetition_rate("abab", 1) == pytest.approx(0.5)
    assert repetition_rate("abab", 2) == pytest.approx(1 / 3)
    assert repetition_rate("abcd", 2) == 0.0
    assert repetition_rate("", 1) == 0.0
    # counts 2 and 1 of the 2-grams of abab: (4 + 1) / 3
    assert ngram_frequency("abab", 2) == pytest.approx(5 / 3)
    assert ngram_frequency("aaaa", 1) == 4.0
    assert ngram_frequency("", 2) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("One. Two. Three.", 0),
        ("Wait, no. So it is 2.  wait, NO.", 1 / 3),
        ("a\na\n\na\nb", 2 / 4),
        (
            "x = 3.5 and y = 3.5. x = 3.5 and y = 3.5.",
            1 / 2,
        ),  # a point within a number ends nothing
        ("... ! ?", 0),  # nothing said
    ],
)
def test_sentence_redundancy_by_hand(text: str, expected: float) -> None:
    assert sentence_redundancy(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # computed by hand from the formula with z = 1.96
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (97, 100, 0.9155, 0.9897),
    ],
)
def test_wilson_against_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="must"):
        wilson_interval(successes, n)


def test_the_proportion_lies_inside_whatever_rounding_does() -> None:
    for n in range(1, 1001):
        for successes in (0, n):
            low, high = wilson_interval(successes, n)
            assert 0 <= low <= successes / n <= high <= 1
