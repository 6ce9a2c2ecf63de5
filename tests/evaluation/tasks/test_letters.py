"""The letter that a completion chooses, in the styles that models write."""

from __future__ import annotations

import time

import pytest

from rlkv.evaluation.tasks.choice import extract_letter
from rlkv.verifier.extraction import after_thinking

OPTIONS = "A: 3 m/s\nB: 4 m/s\nC: 5 m/s\nD: 6 m/s"

STYLES = [
    # plain statements
    ("Answer: C", "C"),
    ("answer: c", "C"),
    ("ANSWER: C", "C"),
    ("Answer : C.", "C"),
    ("Answer:C", "C"),
    ("Answer:\n\nC", "C"),
    ("Answer - C", "C"),
    ("The answer is C", "C"),
    ("The answer is C.", "C"),
    ("The answer is (C)", "C"),
    ("the answer is (c).", "C"),
    ("So the correct answer is C) 5 m/s.", "C"),
    ("The answer is: C: 5 m/s", "C"),
    ("The answer is [C].", "C"),
    ('The answer is "C".', "C"),
    ("The answer is \u201cC\u201d.", "C"),
    ("Answer \u2013 C", "C"),
    ("The correct option is C.", "C"),
    ("The correct answer is option (C).", "C"),
    ("Therefore, the best choice would be C.", "C"),
    ("The answer, therefore, is C.", "C"),
    ("The answer to this question is C.", "C"),
    ("Final answer: A", "A"),
    ("The answer is A because it is slow.", "A"),
    ("The answer is I.", "I"),
    ("The answer is c", "C"),
    # Markdown and LaTeX
    ("**Answer: C**", "C"),
    ("**Answer:** C", "C"),
    ("**Final Answer:** **(C)**", "C"),
    ("### Final Answer\n\n**C**", "C"),
    ("__Answer__: C", "C"),
    ("Answer: $C$", "C"),
    (r"\boxed{C}", "C"),
    (r"The answer is $\boxed{\text{C}}$.", "C"),
    (r"\[\boxed{\textbf{(C)}\ 5}\]", "C"),
    (r"\(\boxed{C. \text{5 m/s}}\)", "C"),
    (r"$\boxed{\mathrm{c}}$", "C"),
    (r"The speed is $\boxed{5}$. Answer: C", "C"),
    (r"The answer is \(\textbf{C}\).", "C"),
    # the letter alone, or first
    ("C", "C"),
    ("C.", "C"),
    ("(C)", "C"),
    ("C) 5 m/s", "C"),
    ("(C) because it has the speed rather than (D).", "C"),
    ("We compute v = s/t = 5.\n\nC. 5 m/s", "C"),
    # preference
    ("A and B are too small, so C is correct.", "C"),
    ("Option C is the right answer.", "C"),
    ("I would go with option C.", "C"),
    ("I choose (C).", "C"),
    ("5 m/s. Therefore, (C).", "C"),
    # more letters than one in the text
    (f"The options are:\n{OPTIONS}\nA is too slow. B is too slow. D is too fast.\nAnswer: C", "C"),
    ("The answer is (B). Wait, that is wrong: the answer is (D).", "D"),
    (r"\boxed{B} was my first thought. On reflection the answer is D.", "D"),
    (r"The answer is B. On reflection: \boxed{D}", "D"),
    ("The answer is not (B) but (D).", "D"),
    ("Answer: C, A is wrong because it is slow.", "C"),
    ("<think>The answer is A. No, the answer is B.</think>\n\nAnswer: C", "C"),
    # no answer
    ("", None),
    ("I do not know.", None),
    ("The answer is a matter of taste.", None),
    ("The answer is I think unclear.", None),
    ("The answer is not C.", None),
    ("The answer is either (C) or (D).", None),
    ("The answer is C or D.", None),
    ("Answer: C and D", None),
    (r"\boxed{C, D}", None),
    (r"\boxed{a + b}", None),
    (f"Let me look at the options again.\n{OPTIONS}", None),
    ("Answer: 5 m/s", None),
    ("Answer: None of the above", None),
    ("<think>The answer is C.</think>", None),
    ("Because the DNA is correct in both cases", None),
]


@pytest.mark.parametrize(("text", "letter"), STYLES)
def test_answer_styles(text: str, letter: str | None) -> None:
    assert extract_letter(text, 10) == letter


def test_letters_beyond_the_options_are_no_answer() -> None:
    assert extract_letter("Answer: D", 4) == "D"
    assert extract_letter("Answer: E", 4) is None
    assert extract_letter("Answer: Z", 10) is None


@pytest.mark.parametrize("option", "ABCDEFGHIJ")
@pytest.mark.parametrize(
    "style", ["Answer: {}", "The answer is ({}).", "\\boxed{{{}}}", "{}", "({}) 5 m/s"]
)
def test_every_option_in_every_common_style(option: str, style: str) -> None:
    assert extract_letter(style.format(option), 10) == option
    assert extract_letter(style.format(option.lower()), 10) == option


@pytest.mark.parametrize(
    "text",
    [
        "the answer is " * 5000,
        "\\text{" * 5000,
        "(A) " * 20000,
        "answer a a a a a a " * 3000,
        "\\boxed{" * 3000,
    ],
)
def test_long_texts_take_no_time(text: str) -> None:
    started = time.monotonic()
    extract_letter(text, 10)
    assert (
        time.monotonic() - started < 60
    )  # seconds where reading is linear, minutes where it is not


def test_thoughts_that_do_not_end_hold_no_answer() -> None:
    assert after_thinking("<think> The answer is B. </think> It is C.") == " It is C."
    assert after_thinking("The answer is B. </think> It is C.") == " It is C."
    assert after_thinking("<think> B. </think> So <think> The answer is B. Wait") == ""
    assert extract_letter("<think> The answer is B. Wait, let me check", 4) is None
    assert extract_letter("The answer is B.", 4) == "B"
