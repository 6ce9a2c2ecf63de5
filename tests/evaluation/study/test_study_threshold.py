"""The near-lossless threshold and its interval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlkv.evaluation.analyses import NearLossless, excluded_text, near_lossless
from rlkv.evaluation.metrics import wilson_interval
from rlkv.evaluation.report import Page, Table

SPARSITIES = (0.2, 0.4, 0.6)


def scores(*rights: int, n: int = 100) -> np.ndarray:
    """Per sparsity ``[S, n]`` with the first so many problems right."""
    return np.stack([np.repeat([1.0, 0.0], [right, n - right]) for right in rights])


@pytest.mark.parametrize(
    ("rights", "margin", "want"),
    [
        ((100, 100, 100), 0.0, 0.6),
        ((98, 98, 97), 0.02, 0.4),  # exactly the margin is not more than the margin
        ((97, 100, 100), 0.02, 0.0),  # what comes after the first loss does not count
        ((100, 97, 100), 0.02, 0.2),
        ((100, 97, 100), 0.03, 0.6),
    ],
)
def test_threshold(rights: tuple[int, ...], margin: float, want: float) -> None:
    found = near_lossless(np.ones(100), scores(*rights), SPARSITIES, margin)
    assert found["sparsity"] == want
    assert found["low"] <= want <= found["high"]
    assert found["n"] == 100


def test_exact_margins_survive_rounding() -> None:
    # 0.7 - 0.6 is not 0.1 in floating point
    for n in (10, 30, 70, 130):
        full = scores(n, n=n)[0]
        assert near_lossless(full, scores(n - n // 10, n=n), (0.5,), 0.1)["sparsity"] == 0.5


def test_interval_is_that_of_resampled_problems() -> None:
    certain = near_lossless(np.ones(50), scores(50, 50, 0, n=50), SPARSITIES, 0.02)
    assert (certain["sparsity"], certain["low"], certain["high"], certain["support"]) == (
        0.4,
        0.4,
        0.4,
        1.0,
    )
    assert (
        certain["not_excluded"] == wilson_interval(0, 50)[1]
    )  # no width, but not certain: 7.1 points
    # one of 100 problems is lost at 0.6: a resample without it or with it once or twice is
    # near-lossless at 2 points
    found = near_lossless(np.ones(100), scores(100, 100, 99), SPARSITIES, 0.02)
    assert found["sparsity"] == 0.6
    exact = sum(
        np.exp(-1) / f for f in (1, 1, 2)
    )  # Poisson limit of the binomial, 0.9197; exact binomial 0.9206
    assert found["support"] == pytest.approx(
        exact, abs=0.012
    )  # 4 standard errors of 10,000 resamples
    assert (found["low"], found["high"]) == (0.4, 0.6)
    assert found["not_excluded"] == wilson_interval(1, 100)[1]


def test_pairs_are_resampled_together() -> None:
    # the same problems are wrong in both runs: no resample makes a difference
    full = scores(50)[0]
    found = near_lossless(full, np.stack([full, full]), (0.2, 0.4), 0.0)
    assert (found["low"], found["high"], found["support"]) == (0.4, 0.4, 1.0)


@pytest.mark.parametrize(
    ("n", "margin", "want"),
    [
        (
            20,
            0.02,
            "n = 20 excludes a loss of more than 16.1 points, which is above the margin of 2: "
            "near-lossless is",
        ),
        (200, 0.02, "n = 200 excludes a loss of more than 1.9 points"),
        (
            200,
            0.01,
            "n = 200 excludes a loss of more than 1.9 points, which is above the margin of 1: "
            "near-lossless",
        ),
    ],
)
def test_few_problems_cannot_show_a_margin(
    n: int, margin: float, want: str, tmp_path: Path
) -> None:
    found = near_lossless(np.ones(n), scores(n, n, n, n=n), SPARSITIES, margin)
    shown = margin > found["not_excluded"]
    text = excluded_text(found)
    assert text.startswith(want)
    assert text.endswith("points") == shown
    task = {"methods": {"RLKV": found}, "published": []}
    metrics = {"sparsities": list(SPARSITIES), "margin": margin, "tasks": {"tiny": task}}
    assert [text in line for line in NearLossless().findings(metrics)] == (
        [False] if shown else [False, True]
    )
    page = Page("t")
    NearLossless().write(metrics, page, tmp_path)
    (table,) = (block for block in page.blocks if isinstance(block, Table))
    assert table.rows[0][-1].text == text


def test_problems_that_got_worse_count_though_others_got_better() -> None:
    full = scores(50)[0]
    found = near_lossless(full, 1 - scores(50), (0.2,), 0.0)  # 50 lost, 50 gained
    assert (found["sparsity"], found["not_excluded"]) == (0.2, wilson_interval(50, 100)[1])
    lost = near_lossless(np.ones(10), scores(0, n=10), (0.2,), 0.0)
    assert (lost["sparsity"], lost["not_excluded"], excluded_text(lost)) == (0.0, None, "")
