"""The verifier: what counts as the answer, what counts as equal."""

import json
import subprocess
import sys

import pytest

from rlkv.verifier import Verifier, extract_answer, is_correct
from tests.helpers.paths import SHARED

DATA = SHARED / "data"


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
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct", r"\frac{1}{2}"),
        ("Thus the Final Answer is 3.5.\nBye 9", "3.5"),
        ("the final answer is \\(x+1\\), final answer is **12**", "12"),
        ("the answer might be 7", None),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{1" + "\0" + "}", None),
        (r"\boxed{" + "1" * 5000 + "}", None),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_the_last_number_is_not_an_answer() -> None:
    assert extract_answer("The total is 1,250 apples.") is None


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\dfrac12"),
    ("10000", "10,000"),
    ("007", "7"),
    ("7", r"\textbf{(007)}"),
    ("7", r"\textbf{(C) } 7"),
    ("5", "x=5"),
    (r"90^\circ", "90"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"(a+5)(b+2)", "ab+2a+5b+10"),
    ("1,-2", "-2,1"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}"),
    ("2k+2", "2(k+1)"),
    ("$12$", "12."),
    (12, "12"),
    ("even", "Even"),
]
DIFFERENT = [
    ("12", "21"),
    (r"\sqrt{51}", r"\sqrt{52}"),
    (r"\text{east}", r"\text{seat}"),
    ("east", "seat"),
    ("7", "7x"),
    ("7", "7, 8"),
    ("7,8", "7"),
    (r"\frac{1}{3}", "0.333"),
    ("x^2+1", "x^2-1"),
]
NEVER = [None, "", " ", float("nan"), "nan", "NaN", "None", "null", "$$"]


def test_what_is_equal(verifier: Verifier) -> None:
    verdicts = verifier.are_equal(EQUAL)
    assert [pair for pair, verdict in zip(EQUAL, verdicts, strict=True) if not verdict] == []
    different = [*DIFFERENT, *((candidate, answer) for answer, candidate in DIFFERENT)]
    for nothing in NEVER:
        different += [(nothing, nothing), ("7", nothing), (nothing, "7")]
    verdicts = verifier.are_equal(different)
    assert [pair for pair, verdict in zip(different, verdicts, strict=True) if verdict] == []
    assert is_correct(r"\boxed{ 7 }", "7")
    assert not is_correct(r"\boxed{nan}", "nan")
    assert not is_correct(None, "7")


def test_batches_keep_their_order(verifier: Verifier) -> None:
    pairs = [
        (rf"\boxed{{\frac{{{i}}}{{7}}}}", rf"\frac{{{2 * i if i % 3 else 2 * i + 1}}}{{14}}")
        for i in range(60)
    ]
    assert verifier.are_correct(pairs) == [i % 3 != 0 for i in range(60)]
    assert len(verifier.pool._workers) == 2


def test_missing_math_verify_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    fresh = Verifier()
    assert fresh.is_correct(r"\boxed{7}", "7"), "plain cases need no math-verify"
    with pytest.raises(ValueError, match=r"rlkv\[eval\]"):
        fresh.is_correct(r"\boxed{\frac{1}{2}}", "0.5")


def test_importing_the_verifier_does_not_import_sympy() -> None:
    code = "import sys, rlkv.verifier; assert not {'sympy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _load(name: str) -> list[dict[str, str]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


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
