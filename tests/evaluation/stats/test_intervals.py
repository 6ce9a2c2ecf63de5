"""Wilson's interval and the sign test, by values computed by hand."""

import pytest

from rlkv.evaluation.stats.intervals import sign_test, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # computed by hand from the formula with z = 1.96
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (97, 100, 0.9155, 0.9897)],
)
def test_wilson_against_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="must"):
        wilson_interval(successes, n)


def test_the_proportion_lies_inside_whatever_rounding_does() -> None:
    for n in range(1, 1001):
        for successes in (0, n):
            low, high = wilson_interval(successes, n)
            assert 0 <= low <= successes / n <= high <= 1


def test_sign_test() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(1, 0) == 1
    assert sign_test(5, 0) == sign_test(0, 5) == 2 / 32
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test(6, 6) == 1
