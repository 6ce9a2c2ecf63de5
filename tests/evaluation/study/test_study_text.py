"""What cells and sentences say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlkv.evaluation.analyses import Comparison
from rlkv.evaluation.measurements import accuracy_of, compare
from rlkv.evaluation.study_text import (
    accuracy_cell,
    difference_cell,
    p_text,
    seeds_of_sign,
    seeds_text,
    verdict,
)
from tests.helpers.study_fakes import outcome

FULL = outcome("1" * 10)


def test_a_cell_has_accuracy_difference_interval_and_seeds() -> None:
    low = accuracy_of([outcome("1000000000"), outcome("1100000000")], FULL)
    cell = accuracy_cell(low)
    assert cell.text == "0.150 (-0.850)"
    assert cell.sign == "worse"
    interval, seeds = cell.note.splitlines()
    assert interval.startswith("[0.")
    assert seeds == "2 seeds: 0.10 to 0.20"
    alike = accuracy_cell(accuracy_of([outcome("1111111110")], FULL))
    assert (alike.text, alike.sign, alike.note) == ("0.900 (-0.100)", "same", "[0.60, 0.98]")
    assert accuracy_cell(accuracy_of([FULL])).text == "1.000"


def test_seeds_with_the_same_heads_are_said_to_be_one_measurement() -> None:
    a, b = outcome("1100000000"), outcome("1010000000")
    assert seeds_text(accuracy_of([a])) == ""
    assert seeds_text(accuracy_of([a, a, a])) == "3 seeds, 1 set of heads"
    assert seeds_text(accuracy_of([a, b, a])) == "3 seeds, 2 sets of heads: all 0.20"
    assert seeds_text(accuracy_of([a, FULL])) == "2 seeds: 0.20 to 1.00"
    assert seeds_text(accuracy_of([replace(a, draws=3)])) == "3 draws, which share the problems"


@pytest.mark.parametrize(
    ("p_value", "text"), [(0.0002, "p < 0.001"), (0.0009, "p < 0.001"), (0.05, "p = 0.050")]
)
def test_p_values(p_value: float, text: str) -> None:
    assert p_text(p_value) == text


def test_verdicts() -> None:
    worse = compare([outcome("1000000000")], [FULL])
    assert verdict(worse["difference"]).startswith("-0.900 [-1.00, -0.70], p = 0.004, worse")
    assert verdict(worse["difference"], same_heads=True) == "the same heads"
    assert (
        verdict(compare([FULL], [outcome("1" * 10, key="other")])["difference"])
        == "no problem differs"
    )
    cell = difference_cell(worse["difference"])
    assert (cell.text, cell.sign) == ("-0.900", "worse")


def test_findings_are_made_from_the_metrics() -> None:
    low = outcome("1000000000")
    metrics = {
        "first": "RLKV",
        "tasks": {
            "tiny": {
                "rows": [{"sparsity": 0.6, "other": "Duo", "run": "seed", **compare([FULL], [low])}]
            }
        },
        "costs": {
            "RLKV": {
                "seeds": 1,
                "steps": [
                    {"step": "training", "unit": "CPU", "mean": 370.4, "low": 1, "high": 1, "n": 1}
                ],
            },
            "Duo": {"seeds": 1, "steps": []},
        },
    }
    assert Comparison().findings(metrics) == [
        "tiny at 0.6, n = 10: RLKV 1.000 against Duo 0.100 (+0.900 [+0.70, +1.00], p = 0.004, "
        "better).",
        "Finding the heads took: RLKV 370 s CPU.",
    ]


def test_seeds_of_a_sign_count_a_set_of_heads_once() -> None:
    good, bad, even = outcome("1110000000"), outcome("0000000000", key="b"), outcome("1000000000")
    found = compare([good, good, bad], [even])  # mean 0.2 against 0.1
    assert found["per_seed"]["first"] == pytest.approx([0.2, -0.1])
    assert found["per_seed"]["second"] == pytest.approx([0.1])
    assert (
        seeds_of_sign(found, "A", "B")
        == "; this sign: 1 of 2 sets of heads of A and 1 of 1 set of heads of B"
    )
    assert seeds_of_sign(compare([good], [even]), "A", "B") == ""
    drawn = replace(even, draws=3)
    assert (
        seeds_of_sign(compare([good, bad], [drawn]), "A", "B")
        == "; this sign: 1 of 2 sets of heads of A"
    )
    assert seeds_of_sign(compare([good], [drawn]), "A", "B") == ""
    rows = [{"sparsity": 0.5, "other": "B", **found}]
    metrics = {"first": "A", "tasks": {"t": {"rows": rows}}, "costs": {}}
    assert "; this sign: 1 of 2 sets of heads of A" in Comparison().findings(metrics)[0]
