r"""What counts as the same answer, kind by kind.

A line is ``+ candidate :: right answer`` where the candidate is right, ``-`` where it is wrong.
"""

# ruff: noqa: RUF001 (signs that look like others are what is tested)

from __future__ import annotations

import json
from collections import Counter

import pytest

from rlkv.inference.session import _outcome
from rlkv.rollout.base import Completion
from rlkv.verifier import Verifier, extract_answer
from tests.helpers.paths import SHARED

PAIRS = SHARED / "data" / "verifier_pairs.jsonl"
KINDS = {
    "mixed_numbers": r"""
        + 2\ 1/2 :: \frac52
        + 4⅔ :: \frac{14}{3}
        + -4 2/3 :: -\frac{14}{3}
        + 1\frac{1}{2}x :: \frac32 x
        + 3.5 :: 3\tfrac12
        - 3 2 :: 5
        - 3 2 :: 6
        - 2 3 4 :: 24
        - 10 1/2 :: 101/2
        - -2 1/3 :: -\frac{5}{3}
        - 2\frac12 :: 2\cdot\frac12
    """,
    "digit_groups": r"""
        + 12\,345 :: 12345
        + 12{,}345 :: 12345
        + 12,\!345 :: 12345
        + 12'345 :: 12345
        + \$1,234.50 :: 1234.5
        + 1,250\pi :: 1250\pi
        + 1{,}5 :: 1.5
        - 12\,345 :: 357
        - 1, 250 :: 1250
        - 12 34 :: 1234
        - 12 3 :: 1 23
        - 1.250 :: 1250
        - (3,4) :: 34
    """,
    "magnitude": r"""
        + 1.5e-3 :: 0.0015
        + 6.02\cdot10^{23} :: 602000000000000000000000
        + \frac{1}{100!} :: \frac{1}{99!\cdot 100}
        - 10^{-20} :: 10^{-21}
        - 10^{-30} :: 0
        - e^{-100} :: e^{-101}
        - 18446744073709551615 :: 2^{64}
        - 0.3333333333 :: \frac13
        - 3.14159 :: \pi
        - 1.0000001 :: 1
    """,
    "overlines": r"""
        + 0.1\overline{6} :: \frac16
        + 0.\dot{1}4285\dot{7} :: \frac17
        + 0.(6) :: \frac23
        + 0.272727\ldots :: \frac{3}{11}
        + 0.3̅ :: \frac13
        + -0.\bar 3 :: -\frac13
        - 0.\overline{12} :: 0.1\overline{2}
        - 0.\overline{45} :: 0.45
        - 0.3333 :: 0.\overline{3}
        - 0.\overline{33}1 :: \frac13
    """,
    "program_notation": r"""
        + 2*sqrt(3) :: 2\sqrt3
        + (1+sqrt(5))/2 :: \frac{1+\sqrt5}{2}
        + 3*pi/4 :: \frac{3\pi}{4}
        + 2**0.5 :: \sqrt2
        + x^(n+1) :: x^{n+1}
        + log2(8) :: 3
        + exp(-1) :: \frac1e
        + [[1,2],[3,4]] :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
        + 5(3) :: 15
        - 5(3) :: 8
        - x**2 :: 2x
        - 3+sqrt(5)/2 :: \frac{3+\sqrt5}{2}
        - 5\sqrt(2) :: 5
    """,
    "unicode": r"""
        + −5 :: -5
        + √(x+1) :: \sqrt{x+1}
        + √12 :: 2\sqrt3
        + 10⁻³ :: 0.001
        + １２ :: 12
        + ٣ :: 3
        + 25π cm² :: 25\pi
        + (−∞, 3] :: (-\infty,3]
        - –7 :: 7
        - 2³ :: 23
        - ½ :: 2
    """,
    "latex_dress": r"""
        + {\color{red}5} :: 5
        + \textcolor[rgb]{1,0,0}{5} :: 5
        + \fcolorbox{red}{white}{7} :: 7
        + \boldsymbol{\frac{3}{4}} :: \frac34
        + \underline{\underline{5}} :: 5
        + {\Large 5} :: 5
        + \text{\textbf{12}} :: 12
        + {\color{red} (3,4]} :: (3,4]
        + {\bf x+y=1} :: x+y=1
        + 7\;\checkmark :: 7
        + \big\{1,2\big\} :: \{1,2\}
        - \mathbf{12} :: 21
        - \textcolor{red}{6} :: 5
        - \big(2,1\big) :: (1,2)
    """,
    "degrees_trig_complex": r"""
        + \sin(30^\circ) :: 0.5
        + 2\cos 30° :: \sqrt3
        + \sin 15^\circ :: \frac{\sqrt6-\sqrt2}{4}
        + 45 degrees :: 45^\circ
        + \frac{\pi}{4} :: 45^\circ
        + \frac{\pi}{4}\text{ radians} :: 45^\circ
        - 45\text{ radians} :: 45^\circ
        + \angle A = 40^\circ :: 40
        + 2\operatorname{cis} 60^\circ :: 1+i\sqrt3
        + 20\text{ degrees Celsius} :: 20^\circ\text{C}
        + \mathrm{e}^{\mathrm{i}\pi} :: -1
        + (1+i)^2 :: 2i
        + |3+4i| :: 5
        - \sin 30 :: \frac12
        - 45^\circ :: 54^\circ
        - 3+2i :: 2+3i
        - i^3 :: i
    """,
    "intervals": r"""
        + 1<x\le 2 :: (1,2]
        + (1,2] :: 1 < x \le 2
        + x<1 \text{ or } x>2 :: (-\infty,1)\cup(2,\infty)
        + x > 1 \text{ and } x < 2 :: (1,2)
        + x \neq 3 :: \mathbb{R}\setminus\{3\}
        + x \ne 2, x \ne 3 :: x \ne 2, 3
        + \{x \in \mathbb{R} : x \geq 2\} :: [2,\infty)
        + ]1,2[ :: (1,2)
        + |x| \le 3 :: [-3,3]
        + {x | -2 < x < 2} :: (-2,2)
        + \text{all real numbers} :: (-\infty,\infty)
        - x \ge 5 :: (5,\infty)
        - x<1 \text{ and } x>2 :: (-\infty,1)\cup(2,\infty)
        - 2x+1>7 :: (3,\infty)
        - 1<x<2 :: [1,2]
        - x \neq 3 :: (-\infty,\infty)
    """,
    "named_values": r"""
        + S = 3+4 = 7 :: 7
        + \text{Area} = 12 \text{ cm}^2 :: 12
        + P(X>2) = 0.3 :: 0.3
        + \det A = 6 :: 6
        + \lceil 5.5\rceil = 6 :: 6
        + \text{The answer is } 5x-y=0 :: 5x-y=0
        + 7 :: x = 7
        + y = 2x+1 :: 2x+1
        + 3x + 2y = 6 :: y = 3 - \frac{3}{2}x
        - 2x=14 :: 7
        - 2x=14 :: x=7
        - x^2=49 :: 7
        - \sqrt{x} = 3 :: 3
        - y=7 :: x=7
        - y=-2x+5 :: 2x+y=-5
    """,
    "tuples_sets_matrices": r"""
        + y=2, x=1 :: (1,2)
        + (x, y) = (1, 2) :: (1,2)
        + x_1=0, x_2=1/2 :: 0,\frac12
        + 2, 3, \text{ and } 4 :: 4,2,3
        + x=\pm 2 :: -2,2
        + \{2,1,1\} :: \{1,2\}
        + \left[\begin{array}{cc}1&2\\3&4\end{array}\right] :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
        - (1,3,2) :: (1,2,3)
        - 3,2,1 :: (1,2,3)
        - 2 :: \pm 2
        - \{1,2\} :: (1,2)
        - (1,2) :: \{1,2\}
        - (1,2] :: (1,2)
        - \begin{pmatrix}1&2\end{pmatrix} :: \begin{pmatrix}1\\2\end{pmatrix}
    """,
    "units_and_words": r"""
        + 5 \text{ red balls} :: 5
        + 10 m/s^2 :: 10
        + 5 centimeters :: 5\text{ cm}
        + 5 ft 6 in :: 66\text{ inches}
        + 2 m 30 cm :: 230\text{ cm}
        + 7 days :: 1\text{ week}
        + 3h :: 180\text{ minutes}
        + 8:30 AM :: 8\!:\!30\text{ a.m.}
        + 8{:}30 AM :: 08:30 am
        + \text{The answer is } 101_2 :: 101_2
        + 101_{\text{two}} :: 101_2
        + 2.5 billion :: 2500000000
        + The total is 85 :: 85
        + 4^{\text{th}} :: 4
        - 5 hours 20 minutes :: 5
        - 8:30 a.m. :: 8:30 p.m.
        - 3 :: 3\text{ p.m.}
        - 101 :: 101_2
        - 3 dozen :: 3
        - 5\text{ cm}^2 :: 5\text{ cm}^3
        - at least 5 :: 5
        - \text{not }x=5 :: 5
        - \text{more than }0 :: 0
        - 5 km north :: 5\text{ km south}
        - 3x :: 3
    """,
    "percent_and_money": r"""
        + 25\% :: 0.25
        + 25\% :: 25
        + 25 :: 25\%
        + $25 :: 25
        + 25€ :: 25
        + 25¢ :: \$0.25
        + 25 cents :: \$0.25
        - 0.25 :: 25
        - 2500\% :: 25\%
        - €25 :: \$25
        - 25 cents :: \$25
    """,
    "words_and_choices": r"""
        + twenty-one :: 21
        + one hundred and five :: 105
        + two thirds :: \frac23
        + one and one half :: 1.5
        + A) :: A
        + A and C :: A, C
        + negative five :: -5
        + There are no solutions :: \text{no solution}
        + (A) 5 :: A
        + \textbf{(A)}\ 5 :: 5
        + Bob and Alice :: Alice and Bob
        + II :: \text{II}
        - (A) 5 :: B
        - sixteen :: 60
        - not even :: even
        - dog :: god
        - \text{(A)} \text{ or } 5 :: A
        - one solution :: no solution
        - A, B :: A
    """,
    "expressions": r"""
        + \frac{x^2}{4}+y^2=1 :: x^2+4y^2=4
        + \frac{1}{1+x} :: (1+x)^{-1}
        + 6:8 :: 3:4
        + A \cup B :: A∪B
        - (x-1)^2+(y+2)^2=9 :: (x-1)^2+(y+2)^2=3
        - 1,2,\dots,9 :: 1,2,\ldots,10
        - 1-x :: x-1
        - 2^n+1 :: 2^{n+1}
    """,
}
EXTRACTION = r"""
    + So there are **73** ways. :: 73
    + The final answer is 11,\! 111 :: 11111
    + **Answer:** 73 :: 73
    + The final answer is $73$ cm. :: 73
    + The final answer is $5$ and $6$. :: 5,6
    + Hence $\boxed7$. :: 7
    + $x=\boxed{2}$ or $x=\boxed{3}$ :: 2,3
    + \boxed{5}. The final answer is correct. :: 5
    + \boxed{5} is not right. The final answer is 6. :: 6
    + <think>\boxed{5}</think>The final answer is 6. :: 6
    + <think>So the answer is \boxed{5}. :: 5
    - <think>Maybe \boxed{5}. But let me check :: 5
    - <think>\boxed{5}</think> :: 5
    - \boxed{5} then \boxed{6 :: 5
    - \boxed{5} was wrong, so \boxed{} :: 5
    - \boxed{2} and \boxed{3} :: 3
    - The first has **12** and the second **15**. :: 15
    - The final answer is 5 or 6. :: 5
    - The answer is not 73. :: 73
"""


def _rows(lines: str) -> list[tuple[bool, str, str]]:
    rows = []
    for line in lines.strip().splitlines():
        candidate, gold = line.strip()[2:].split(" :: ")
        rows.append((line.strip()[0] == "+", candidate, gold))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_kind(verifier: Verifier, kind: str) -> None:
    rows = _rows(KINDS[kind])
    texts = [(rf"The result is \(\boxed{{{candidate}}}\).", gold) for _, candidate, gold in rows]
    verdicts = verifier.are_correct(texts)
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if row[0] != verdict] == []


def test_where_the_answer_is(verifier: Verifier) -> None:
    rows = _rows(EXTRACTION)
    verdicts = verifier.are_correct((text, gold) for _, text, gold in rows)
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if row[0] != verdict]
    assert [(row, extract_answer(row[1])) for row in wrong] == []


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
