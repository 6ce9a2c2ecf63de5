"""The verifier: what counts as the answer, and as equal, kind by kind (kinds.txt)."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlkv.inference.session import _outcome
from rlkv.rollout.base import Completion
from rlkv.verifier import Verifier, extract_answer, is_correct
from rlkv.verifier.extraction import reference_answer
from tests.helpers.paths import SHARED

DATA = SHARED / "data"
KINDS = {}
for _part in (Path(__file__).parent / "kinds.txt").read_text(encoding="utf-8").split("## ")[1:]:
    _kind, *_lines = _part.strip().splitlines()
    KINDS[_kind] = _lines


def _load(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"a } b } \boxed{4} } {", "4"),
        (r"{ { { \boxed{4}", "4"),
        (r"x = 2 \\\boxed{4}", "4"),
        (r"x = 2 \\boxed{4}", "4"),
        (r"\boxed{1} The final answer is 2", "2"),
        (r"\boxed{1} The final answer is x = 2", "x = 2"),
        (r"\boxed{1} The final answer is: AB = 2", "AB = 2"),
        (r"\boxed{1} The final answer is equal to 12.", "equal to 12"),
        (r"\boxed{1} The final answer is pi/2", "pi/2"),
        (r"\boxed{1} The final answer is then rounded to 3 digits", "1"),
        (r"\boxed{1} The final answer is given to 2 decimal places.", "1"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct", r"\frac{1}{2}"),
        ("Thus the Final Answer is 3.5.\nBye 9", "3.5"),
        ("the final answer is \\(x+1\\), final answer is **12**", "12"),
        ("the answer might be 7", None),
        ("The total is 1,250 apples.", None),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{1" + "\0" + "}", None),
        (r"\boxed{" + "1" * 5000 + "}", None),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


NEVER = [None, "", " ", float("nan"), "nan", "NaN", "None", "null", "$$"]


def test_what_equals_nothing(verifier: Verifier) -> None:
    pairs = [(12, "13")]
    for nothing in NEVER:
        pairs += [(nothing, nothing), ("7", nothing), (nothing, "7")]
    assert not any(verifier.are_equal(pairs))
    assert verifier.are_equal([(12, "12")]) == [True]
    assert is_correct(r"\boxed{ 7 }", "7")
    assert not is_correct(None, "7")


def test_missing_math_verify_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    fresh = Verifier()
    assert fresh.are_correct([(r"\boxed{7}", "7")]) == [True], "plain cases need no math-verify"
    with pytest.raises(ValueError, match=r"rlkv\[eval\]"):
        fresh.are_correct([(r"\boxed{\frac{1}{2}}", "0.5")])


def test_importing_the_verifier_does_not_import_sympy() -> None:
    code = "import sys, rlkv.verifier; assert not {'sympy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    right += [("3, 5", solution + "3, 5"), ("(1,2)", "#### (1, 2)"), ("1234567", "#### 1,234,567")]
    right += [("(1,250)", "#### (1,250)"), ("[1,250]", "#### [1,250]")]
    right += [("1,100,1000", "#### 1,100,1000"), ("1250.75", "#### $1,250.75")]
    right += [("5", "#### Step 1\nAdd.\n#### Step 2\nSo $\\boxed{5}$.")]
    right += [("2, 3", r"So $x=\boxed{2}$ or $x=\boxed{3}$."), ("7", r"\boxed{\boxed{7}}")]
    wrong = [
        ("1", True),
        ("True", True),
        ("0", False),
        ("inf", float("inf")),
        ("24", solution + "72"),
        ("35", solution + "3, 5"),
    ]
    wrong += [("3", r"$x=\boxed{2}$ or $x=\boxed{3}$"), ("5", r"5, so \boxed{}")]
    wrong += [("5", "####"), ("null", None), ("nan", float("nan"))]
    verdicts = verifier.are_correct((rf"\boxed{{{text}}}", gold) for text, gold in right + wrong)
    assert verdicts == [True] * len(right) + [False] * len(wrong)


def test_a_reference_that_equals_nothing_is_no_answer() -> None:
    assert [reference_answer(text) for text in ("x" * 1001, "5\0", "nan", "#### ")] == [""] * 4


@pytest.mark.parametrize("answer", [True, None])
def test_a_row_of_an_input_file_keeps_the_type_of_its_answer(answer: object) -> None:
    completion = Completion([1], rf"\boxed{{{answer}}}", "stop")
    assert not _outcome("p", answer, completion, "").get("correct")


def test_pairs_of_another_author(verifier: Verifier) -> None:
    rows = _load("verifier_pairs.jsonl")
    verdicts = verifier.are_correct((row["text"], row["gold"]) for row in rows)
    seen = Counter(row["right"] for row in rows)
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if row["right"] != verdict]
    for is_right, number in Counter(row["right"] for row in wrong).items():
        assert number <= 0.03 * seen[is_right], wrong


@pytest.mark.parametrize("name", ["deepscaler_aime.jsonl", "math500.jsonl"])
def test_reference_solutions_are_accepted_and_other_answers_refused(
    verifier: Verifier, name: str
) -> None:
    rows = _load(name)
    accepted = verifier.are_correct([(r["solution"], r["answer"]) for r in rows])
    assert sum(accepted) >= 0.99 * len(rows)
    following = [*rows[1:], rows[0]]
    pairs = [
        (a["solution"], b["answer"])
        for a, b in zip(rows, following, strict=True)
        if a["answer"] != b["answer"]
    ]
    assert len(pairs) > 0.95 * len(rows)
    assert sum(verifier.are_correct(pairs)) <= 0.005 * len(pairs)
