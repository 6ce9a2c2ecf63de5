"""Strict accuracy, the ratio of terminated texts and the sign test, against values by hand and
scipy.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from rlkv.evaluation.metrics import (
    mean_with_interval,
    paired_difference,
    ratio_with_interval,
    sign_test,
    strict_scores,
    unseen_interval,
    wilson_interval,
)


def test_strict_is_all_samples_right() -> None:
    assert strict_scores([[True, True], [True, False], [False, False], [True]]).tolist() == [
        1.0,
        0.0,
        0.0,
        1.0,
    ]


def test_the_sign_test_counts_signs_only() -> None:
    first, second = [0.5, 0.5, 0.25, 0.0, 1.0, 0.75], [0.75, 1.0, 0.5, 0.25, 0.0, 0.75]
    found = sign_test(first, second)
    assert (found.better, found.worse) == (4, 1)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 2**5)  # at most one of five: by hand
    assert found.p_value == stats.binomtest(4, 5).pvalue
    mirrored = sign_test(second, first)
    assert (mirrored.better, mirrored.worse, mirrored.p_value) == (1, 4, found.p_value)


def test_the_sign_test_is_the_share_of_sign_patterns_as_extreme() -> None:
    better, worse = 6, 1
    patterns = [sum(signs) for signs in itertools.product([0, 1], repeat=better + worse)]
    extreme = [count for count in patterns if abs(count - 3.5) >= abs(better - 3.5)]
    found = sign_test([0.0] * 7, [1.0] * better + [-1.0] * worse)
    assert found.p_value == pytest.approx(len(extreme) / len(patterns))


def test_the_sign_test_of_verdicts_is_the_flip_test() -> None:
    first, second = [0, 0, 0, 1, 1, 0, 0, 1], [1, 1, 1, 0, 1, 1, 0, 1]
    assert sign_test(first, second).p_value == pytest.approx(
        paired_difference(first, second).p_value
    )
    assert sign_test([1, 0], [1, 0]).p_value == 1.0
    with pytest.raises(ValueError, match="2 and 1"):
        sign_test([1, 0], [1])


def test_a_ratio_weights_problems_by_their_terminated_texts() -> None:
    found = ratio_with_interval([3, 0, 1, 0], [4, 1, 1, 0])
    assert found is not None
    assert (found.mean, found.n) == (4 / 6, 3)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found == ratio_with_interval([3, 0, 1, 0], [4, 1, 1, 0])


def test_the_interval_of_a_ratio_agrees_with_scipy() -> None:
    rng = np.random.default_rng(1)
    wholes = rng.integers(1, 5, size=60)
    parts = rng.binomial(wholes, 0.6)

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return a.sum(axis) / b.sum(axis)

    want = stats.bootstrap(
        (parts, wholes), ratio, paired=True, method="percentile", n_resamples=10_000, rng=rng
    )
    found = ratio_with_interval(parts.tolist(), wholes.tolist())
    assert found is not None
    assert found.low == pytest.approx(want.confidence_interval.low, abs=0.01)
    assert found.high == pytest.approx(want.confidence_interval.high, abs=0.01)


def test_ratios_without_spread() -> None:
    assert ratio_with_interval([0, 0], [0, 0]) is None
    found = ratio_with_interval([4, 2, 0], [4, 2, 0])
    assert found is not None
    assert (found.low, found.high) == unseen_interval(1.0, 2, least=0.0)


def test_one_text_of_each_problem_is_right_or_wrong() -> None:
    found = ratio_with_interval([1, 1, 0, 0], [1, 1, 1, 0])
    assert found == mean_with_interval([1.0, 1.0, 0.0])
    assert found is not None
    assert (found.low, found.high) == wilson_interval(2, 3)
