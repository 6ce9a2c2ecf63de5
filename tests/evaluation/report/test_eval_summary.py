"""Figures of an evaluation from rows written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rlkv.evaluation.metrics import wilson_interval
from rlkv.evaluation.report import by_problem, pass_at, summarize


def row(key: str, correct: bool, sample: int = 0, **more: Any) -> dict[str, Any]:
    fields = {
        "finish_reason": "stop",
        "repetitive": False,
        "kv_bytes": 50,
        "kv_bytes_full": 100,
        "seconds": 2.0,
    }
    return {
        "key": key,
        "sample": sample,
        "correct": correct,
        **fields,
        "text": "a b.",
        "token_ids": [1, 2, 3],
        **more,
    }


def test_one_sample_of_each_problem() -> None:
    full = [row("a", True), row("b", True), row("c", False), row("d", True, token_ids=[1] * 9)]
    rows = [
        row("d", True, token_ids=[1] * 5),
        row("c", True),
        row("b", False, finish_reason="length"),
        row("a", False, finish_reason="repetition", repetitive=True, token_ids=[7, 7, 7, 7]),
    ]
    found = summarize("math500", "rlkv@0.5", rows, full)
    assert (found["n"], found["samples"], found["accuracy"]) == (4, 1, 0.5)
    assert found["difference"] == pytest.approx(0.5 - 0.75)
    assert found["difference_low"] <= found["difference"] <= found["difference_high"]
    assert found["p_value"] == 1.0  # three changes, two down and one up
    assert found["ci_low"] < 0.5 < found["ci_high"]
    assert (found["kv_bytes"], found["kv_bytes_full"], found["seconds"]) == (200, 400, 8.0)
    assert found["tokens_per_second"] == pytest.approx((5 + 3 + 3 + 4) / 8)
    assert found["solved_in_full"] == 3
    assert (found["repetitive"], found["overlength"], found["incorrect"]) == (1, 1, 0)
    assert (
        found["stopped_for_repetition"],
        found["share_repetitive"],
        found["share_at_limit"],
    ) == (1, 0.25, 0.25)
    assert (found["tokens_both_right"], found["full_tokens_both_right"], found["n_both_right"]) == (
        5,
        9,
        1,
    )
    assert found["repeated_1_grams"] == pytest.approx((4 / 5 + 0 + 0 + 3 / 4) / 4)
    assert found["entropy_1_gram"] == pytest.approx((0 + 2 * 1.5849625 + 0) / 4)
    assert found["pass_at_k"].keys() == {"1"}
    assert found["strict"]["mean"] == found["accuracy"]
    assert found["share_terminated"] == 0.5
    assert found["right_of_terminated"]["mean"] == 1.0  # d and c
    assert (found["problems_better"], found["problems_worse"], found["sign_p_value"]) == (1, 2, 1.0)
    assert (found["mean_output_tokens"], found["seconds_per_text"]) == (15 / 4, 2.0)
    assert (found["tokens_times_full"], found["seconds_times_full"]) == (
        pytest.approx(15 / 18),
        1.0,
    )
    assert found["smallest_provable_difference"] is None  # of four problems


def test_the_full_cache_has_no_difference() -> None:
    rows = [row("a", True), row("b", False)]
    assert not {"difference", "repetitive"} & summarize("tiny", "full", rows, rows).keys()
    assert not {"difference", "repetitive"} & summarize("tiny", "rlkv@0.5", rows, None).keys()


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rlkv@0\.5"):
        summarize("tiny", "rlkv@0.5", [row("a", True)], [row("b", True)])


def test_samples_give_pass_at_k() -> None:
    right = {"a": [True, False, False, False], "b": [False] * 4, "c": [True] * 4}
    rows = [
        row(key, verdict, i)
        for key, verdicts in right.items()
        for i, verdict in enumerate(verdicts)
    ]
    assert by_problem(rows[::-1]).keys() == right.keys()
    found = summarize("tiny", "rlkv@0.5", rows, None)
    assert (found["n"], found["samples"]) == (3, 4)
    means = {k: estimate["mean"] for k, estimate in found["pass_at_k"].items()}
    # 1 - C(3, k) / C(4, k) for a, 0 for b, 1 for c
    assert means == pytest.approx(
        {"1": (0.25 + 0 + 1) / 3, "2": (0.5 + 0 + 1) / 3, "4": (1 + 0 + 1) / 3}
    )
    assert found["accuracy"] == means["1"]
    assert found["strict"]["mean"] == pytest.approx(1 / 3)  # c alone
    for estimate in found["pass_at_k"].values():
        assert 0 <= estimate["low"] <= estimate["mean"] <= estimate["high"] <= 1


@pytest.mark.parametrize("verdict", [True, False])
def test_samples_that_are_all_right_or_all_wrong_have_wilsons_interval(verdict: bool) -> None:
    rows = [row(key, verdict, i) for key in "abcde" for i in range(4)]
    found = summarize("tiny", "rlkv@0.5", rows, None)
    low, high = wilson_interval(5 * verdict, 5)  # over problems, not samples
    assert (found["ci_low"], found["ci_high"]) == (low, high)
    assert high - low > 0.4
    for estimate in found["pass_at_k"].values():
        assert (estimate["low"], estimate["high"]) == (low, high)


def test_k_goes_up_by_powers_of_two() -> None:
    assert list(pass_at([[True] * 6, [False] * 6])) == ["1", "2", "4"]
    assert list(pass_at([[True] * 64])) == ["1", "2", "4", "8", "16", "32", "64"]


def test_problems_with_several_samples_are_tested_by_their_means() -> None:
    def rows(right: dict[str, int]) -> list[dict[str, Any]]:
        return [row(key, i < right[key], i) for key in right for i in range(4)]

    found = summarize(
        "tiny", "rlkv@0.5", rows({"a": 1, "b": 2, "c": 4}), rows({"a": 2, "b": 1, "c": 0})
    )
    assert found["difference"] == pytest.approx((-0.25 + 0.25 + 1) / 3)
    assert (found["problems_better"], found["problems_worse"], found["sign_p_value"]) == (2, 1, 1.0)


def test_without_terminated_texts_their_accuracy_is_none() -> None:
    found = summarize("tiny", "full", [row("a", False, finish_reason="length")], None)
    assert (found["share_terminated"], found["right_of_terminated"]) == (0, None)
