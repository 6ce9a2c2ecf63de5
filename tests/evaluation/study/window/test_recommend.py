"""Which setting is recommended, from scores and bytes made by hand."""

from __future__ import annotations

import numpy as np

from rlkv.evaluation.measurements import Sizes
from rlkv.evaluation.window_recommend import Candidate, choose, recommend

FULL = {"task": np.ones(40)}


def candidate(window: int, solved: int, share: float, sparsity: float = 0.6) -> Candidate:
    """A setting that solves the first ``solved`` of 40 problems."""
    return Candidate(
        Sizes(4, window),
        sparsity,
        {"task": (np.arange(40) < solved).astype(float)},
        {"task": share},
    )


def test_the_fewest_bytes_within_the_margin() -> None:
    settings = [candidate(8, 30, 0.3), candidate(16, 39, 0.4), candidate(32, 40, 0.5)]
    assert choose(settings, FULL, 0.025, None) is settings[1]  # a loss of exactly the margin
    assert choose(settings, FULL, 0.02, None) is settings[2]
    assert choose(settings[:1], FULL, 0.02, None) is None


def test_a_loss_that_the_test_shows_is_too_much_for_any_margin() -> None:
    settings = [candidate(8, 30, 0.3), candidate(16, 36, 0.4)]
    assert choose(settings, FULL, 0.5, None) is settings[1]  # 4 of 40 lost: p = 0.125


def test_of_equal_bytes_the_more_accurate() -> None:
    settings = [candidate(8, 39, 0.4), candidate(16, 40, 0.4)]
    assert choose(settings, FULL, 0.1, None) is settings[1]


def test_within_a_budget_the_most_accurate_then_the_fewest_bytes() -> None:
    settings = [
        candidate(8, 30, 0.3),
        candidate(16, 39, 0.4),
        candidate(32, 39, 0.35),
        candidate(64, 40, 0.6),
    ]
    assert choose(settings, FULL, 0.02, 0.4) is settings[2]
    assert choose(settings, FULL, 0.02, 0.29) is None
    found = recommend(settings, FULL, 0.02, 0.4)
    assert found is not None
    assert (found["name"], found["alike"]) == ("4 + 32", 1)
    assert found["accuracy"] == {"task": 39 / 40}


def test_every_task_must_be_near_and_within_the_budget() -> None:
    full = {"a": np.ones(10), "b": np.ones(10)}
    one = Candidate(Sizes(4, 8), 0.6, {"a": np.ones(10), "b": np.zeros(10)}, {"a": 0.2, "b": 0.2})
    two = Candidate(Sizes(4, 16), 0.6, full, {"a": 0.3, "b": 0.5})
    assert choose([one, two], full, 0.02, None) is two
    assert choose([one, two], full, 0.02, 0.4) is one
    assert (two.share, one.accuracy) == (0.4, 0.5)


def test_the_choice_is_measured_on_problems_that_did_not_make_it() -> None:
    """The first setting solves all even problems and no odd one, the second all but two of all."""
    lucky = Candidate(Sizes(4, 8), 0.6, {"task": np.tile([1.0, 0.0], 20)}, {"task": 0.3})
    found = recommend([lucky, candidate(16, 38, 0.4)], FULL, 0.1, None)
    assert found is not None
    assert found["name"] == "4 + 16"
    assert found["held_out"]["chosen"] == ["4 + 8 @ 0.6", "4 + 16 @ 0.6"]
    # on the odd problems the first one solves none, on the even ones the second 19 of 20
    assert found["held_out"]["accuracy"] == (0 + 19 / 20) / 2
    assert found["held_out"]["full"] == 1


def test_no_recommendation() -> None:
    assert recommend([candidate(8, 10, 0.3)], FULL, 0.02, None) is None
