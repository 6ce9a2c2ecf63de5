import pytest

from rlkv.evaluation.stats.intervals import wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # computed by hand from the formula with z = 1.96
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (97, 100, 0.9155, 0.9897)],
)
def test_wilson_against_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for successes, n in [(0, 3), (1, 7), (300, 1000), (1000, 1000)]:
        expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="interval"):
        wilson_interval(successes, n)


def test_the_proportion_lies_inside_whatever_rounding_does() -> None:
    for n in range(1, 1001):
        for successes in (0, n):
            low, high = wilson_interval(successes, n)
            assert 0 <= low <= successes / n <= high <= 1
