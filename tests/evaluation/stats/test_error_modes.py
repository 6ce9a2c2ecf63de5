"""Error modes of completions written by hand."""

from __future__ import annotations

import pytest

from rlkv.evaluation.metrics import RepetitionRule, error_mode

RULE = RepetitionRule(window=10, distinct=3)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2] * 10, True),
        ([1, 2, 3] * 6 + [1, 2], False),
        ([1, 2] * 5 + list(range(10)), False),  # the first window is not checked
        (list(range(10)) + [1, 2] * 5, True),  # the second window
        (list(range(10)) + [1, 2] * 4, False),  # the second window is not full
        (
            list(range(5)) + [7] * 10 + list(range(5)),
            False,
        ),  # windows end at 10 and 20 only, as in the paper
    ],
)
def test_repetition_is_checked_at_every_full_window(ids: list[int], expected: bool) -> None:
    assert RULE(ids) is expected


def test_the_papers_rule_is_the_default() -> None:
    assert RepetitionRule() == RepetitionRule(window=400, distinct=40)
    assert RepetitionRule()([i % 39 for i in range(800)])
    assert not RepetitionRule()(
        [i % 39 for i in range(799)]
    )  # the evaluator's first check is at twice the window
    assert not RepetitionRule()([i % 40 for i in range(800)])


def test_modes_in_their_order() -> None:
    def mode(repetitive: bool, finish: str, correct: bool = False) -> str | None:
        return error_mode({"correct": correct, "repetitive": repetitive, "finish_reason": finish})

    assert mode(True, "length") == "repetitive"
    assert mode(False, "length") == "overlength"
    assert mode(False, "stop") == "incorrect"
    assert mode(True, "length", correct=True) is None


def test_impossible_rules_are_refused() -> None:
    assert RepetitionRule(8, 8)
    with pytest.raises(ValueError, match="--repetition 40 400"):
        RepetitionRule(40, 400)
