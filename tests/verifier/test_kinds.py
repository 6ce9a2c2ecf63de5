"""What counts as the same answer, kind by kind (kinds.txt), and pairs of another author."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlkv.inference.session import _outcome
from rlkv.rollout.base import Completion
from rlkv.verifier import Verifier
from tests.helpers.paths import SHARED

PAIRS = SHARED / "data" / "verifier_pairs.jsonl"
KINDS = {}
for _part in (Path(__file__).parent / "kinds.txt").read_text(encoding="utf-8").split("## ")[1:]:
    _kind, *_lines = _part.strip().splitlines()
    KINDS[_kind] = _lines


@pytest.mark.parametrize("kind", KINDS)
def test_kind(verifier: Verifier, kind: str) -> None:
    pairs = []
    for line in KINDS[kind]:
        candidate, gold = line[2:].split(" :: ")
        text = candidate if kind == "extraction" else rf"The result is \(\boxed{{{candidate}}}\)."
        pairs.append((text, gold))
    verdicts = verifier.are_correct(pairs)
    expected = [line[0] == "+" for line in KINDS[kind]]
    judged = zip(KINDS[kind], verdicts, expected, strict=True)
    assert [line for line, verdict, right in judged if verdict != right] == []


def test_a_right_answer_of_another_type_or_form(verifier: Verifier) -> None:
    solution = "24 in each, so 3*24=<<3*24=72>>72.\n#### "
    right = [("0", 0), ("7", 7.0), ("1e-07", 1e-7), ("72", solution + "72"), ("1250", "#### 1,250")]
    wrong = [
        ("1", True),
        ("True", True),
        ("0", False),
        ("inf", float("inf")),
        ("24", solution + "72"),
    ]
    wrong += [("5", "####"), ("null", None), ("nan", float("nan"))]
    verdicts = verifier.are_correct((rf"\boxed{{{text}}}", gold) for text, gold in right + wrong)
    assert verdicts == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize("answer", [True, None])
def test_a_row_of_an_input_file_keeps_the_type_of_its_answer(answer: object) -> None:
    completion = Completion([1], rf"\boxed{{{answer}}}", "stop")
    assert not _outcome({"problem": "p", "answer": answer}, completion, "").get("correct")


def test_pairs_of_another_author(verifier: Verifier) -> None:
    if not PAIRS.exists():
        pytest.skip(f"{PAIRS} is not here")
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    verdicts = verifier.are_correct((row["text"], row["gold"]) for row in rows)
    seen = Counter(row["right"] for row in rows)
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if row["right"] != verdict]
    for is_right, number in Counter(row["right"] for row in wrong).items():
        assert number <= 0.03 * seen[is_right], wrong
