"""Outcomes summed up: seeds, intervals, differences, modes, lengths."""

from __future__ import annotations

import numpy as np
import pytest

from rlkv.evaluation.analyses import both_right, length_shares, mode_shares, repetition_of
from rlkv.evaluation.measurements import accuracy_of, compare, join, mean_scores, outcome_of
from rlkv.evaluation.metrics import (
    mean_with_interval,
    ngram_entropy,
    ngram_frequency,
    repetition_rate,
    wilson_interval,
)
from tests.helpers.study_fakes import outcome


def row(correct: bool, repetitive: bool = False, finish: str = "stop", tokens: int = 3) -> dict:
    return {
        "correct": correct,
        "repetitive": repetitive,
        "finish_reason": finish,
        "token_ids": list(range(tokens)),
        "kv_bytes": 10,
        "kv_bytes_full": 40,
        "seconds": 0.5,
    }


def test_rows_become_an_outcome() -> None:
    rows = [
        row(True, True),
        row(False, True, "length"),
        row(False, False, "length"),
        row(False, tokens=5),
    ]
    found = outcome_of("key", rows)
    assert found.correct.tolist() == [1, 0, 0, 0]
    assert found.modes == (None, "repetitive", "overlength", "incorrect")
    assert found.lengths.tolist() == [3, 3, 3, 5]
    assert found.kv_share == 0.25
    assert found.seconds == 2.0


def test_parts_become_one_outcome_in_the_order_of_the_problems() -> None:
    parts = [
        outcome("110", [1, 4, 7], "a"),
        outcome("01", [2, 5], "b", "overlength"),
        outcome("00", [3, 6], "c"),
    ]
    found = join(parts)
    assert found.correct.tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert found.lengths.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.modes == (None, "overlength", "incorrect", None, None, "incorrect", "incorrect")
    assert (found.draws, found.seconds, found.kv_share) == (3, 4.5, 0.6)
    assert len({found.key, *(part.key for part in parts)}) == 4


def test_mean_over_seeds_and_its_interval() -> None:
    runs = [outcome("1100"), outcome("1010"), outcome("1100", key="1100")]
    assert mean_scores(runs) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    found = accuracy_of(runs)
    assert (found["n"], found["distinct"]) == (4, 2)
    assert found["mean"] == pytest.approx(0.5)
    assert found["seeds"] == [0.5, 0.5, 0.5]
    assert found["low"] < 0.5 < found["high"]
    assert found["kv_share"] == 0.6
    assert found["versus_full"] is None


def test_single_runs_have_wilson_intervals_also_at_one() -> None:
    assert (
        mean_with_interval(np.ones(20)).low,
        mean_with_interval(np.ones(20)).high,
    ) == wilson_interval(20, 20)
    same = accuracy_of([outcome("1101"), outcome("1101")])
    assert (same["low"], same["high"]) == wilson_interval(3, 4)
    assert same["distinct"] == 1


def test_difference_to_full_and_between_methods() -> None:
    full, runs = outcome("1" * 8), [outcome("10000000"), outcome("11000000")]
    test = accuracy_of(runs, full)["versus_full"]
    assert test is not None
    assert test["difference"] == pytest.approx(1.5 / 8 - 1)
    assert test["changed"] == 7
    assert test["p_value"] == pytest.approx(2 / 2**7)
    found = compare(runs, [full])
    assert found["difference"]["difference"] == pytest.approx(1.5 / 8 - 1)
    assert found["same_heads"] is False
    assert compare([full, full], [full])["same_heads"] is True
    assert compare([runs[0], runs[0], runs[1]], runs)["same_heads"] is False


def test_modes_count_only_what_full_solves() -> None:
    full = outcome("1110")
    runs = [outcome("1000", modes="overlength"), outcome("1100", modes="incorrect")]
    shares = mode_shares(runs, full)
    assert shares is not None
    assert {mode: of["mean"] for mode, of in shares.items()} == pytest.approx(
        {"repetitive": 0, "overlength": 1 / 3, "incorrect": 1 / 6}
    )
    assert {of["n"] for of in shares.values()} == {3}
    assert mode_shares(runs, outcome("0000")) is None


def test_lengths_fall_into_common_bins() -> None:
    texts = {
        "full": [outcome("11", lengths=[10, 20])],
        "mine": [outcome("11", lengths=[30, 30]), outcome("11", lengths=[10, 30])],
    }
    found = length_shares(texts)
    assert len(found["centres"]) == 20
    assert found["centres"][0] == pytest.approx(10.5)
    assert found["shares"]["full"][0] == found["shares"]["full"][10] == 0.5
    assert found["shares"]["mine"][0] == 0.25
    assert found["shares"]["mine"][-1] == 0.75


def test_lengths_where_both_are_right() -> None:
    full = outcome("1110", [10, 20, 30, 40])
    first, second = outcome("1011", [12, 99, 30, 1], "a"), outcome("1000", [14, 99, 99, 99], "b")
    one = both_right([first], full)
    assert one is not None
    assert (one["own"]["mean"], one["full"]["mean"], one["own"]["n"]) == (
        (12 + 30) / 2,
        (10 + 30) / 2,
        2,
    )
    both = both_right([first, second], full)
    assert both is not None
    assert (
        both["own"]["mean"] == (13 + 30) / 2
    )  # the first problem is solved twice, with 12 and 14 tokens
    assert both["difference"]["mean"] == (3 + 0) / 2
    assert both_right([outcome("0001")], full) is None


def test_repetition_is_that_of_each_text() -> None:
    texts = [np.array([1, 1, 1, 1], dtype=np.int32), np.array([1, 2, 3, 4], dtype=np.int32)]
    found = repetition_of(texts)
    want = [
        [
            measure(ids, n)
            for measure in (ngram_entropy, repetition_rate, ngram_frequency)
            for n in (1, 2, 3)
        ]
        for ids in ([1, 1, 1, 1], [1, 2, 3, 4])
    ]
    assert found.tolist() == want
    assert found[0, 3] == 0.75
    assert found[0, 6] == 4
