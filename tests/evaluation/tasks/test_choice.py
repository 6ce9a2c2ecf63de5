"""Multiple choice: rows of the three benchmarks, and the letter that a text chooses."""

# ruff: noqa: RUF001 (signs that look like others are what is tested)

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.choice import extract_letter
from rlkv.evaluation.tasks.registry import TASKS

Load = Callable[..., list[EvalProblem]]

OPTIONS = "A: 3 m/s\nB: 4 m/s\nC: 5 m/s\nD: 6 m/s"
# what each text chooses, and "-" where it chooses nothing; \n is a line break
STYLES = r"""
C Answer: C
C answer: c
C Answer : C.
C Answer:\n\nC
C Answer - C
C The answer is C
C the answer is (c).
C So the correct answer is C) 5 m/s.
C The answer is: C: 5 m/s
C The answer is [C].
C The answer is “C”.
C Answer – C
C The correct answer is option (C).
C Therefore, the best choice would be C.
C The answer, therefore, is C.
C The answer to this question is C.
A Final answer: A
A The answer is A because it is slow.
I The answer is I.
C **Answer:** C
C **Final Answer:** **(C)**
C ### Final Answer\n\n**C**
C __Answer__: C
C Answer: $C$
C The answer is $\boxed{\text{C}}$.
C \[\boxed{\textbf{(C)}\ 5}\]
C \(\boxed{C. \text{5 m/s}}\)
C $\boxed{\mathrm{c}}$
C The speed is $\boxed{5}$. Answer: C
C The answer is \(\textbf{C}\).
C C.
C C) 5 m/s
C (C) because it has the speed rather than (D).
C We compute v = s/t = 5.\n\nC. 5 m/s
C A and B are too small, so C is correct.
C Option C is the right answer.
C I would go with option C.
C 5 m/s. Therefore, (C).
D The answer is (B). Wait, that is wrong: the answer is (D).
D \boxed{B} was my first thought. On reflection the answer is D.
D The answer is B. On reflection: \boxed{D}
D The answer is not (B) but (D).
C Answer: C, A is wrong because it is slow.
C The answer is C. The other option is B.
B A, C and D are right. The incorrect option is B.
D It is not A, B or C. Hence the only other option is D.
C <think>The answer is A. No, the answer is B.</think>\n\nAnswer: C
C The answer is B. </think> Answer: C
- <think> B. </think> So <think> The answer is B. Wait
- I do not know.
- The answer is a matter of taste.
- The answer is I think unclear.
- The answer is not C.
- The answer is either (C) or (D).
- Answer: C and D
- \boxed{C, D}
- \boxed{a + b}
- Answer: 5 m/s
- Answer: None of the above
- <think>The answer is C.</think>
- <think> The answer is B. Wait, let me check
- Because the DNA is correct in both cases
"""


def test_answer_styles() -> None:
    rows = [line.partition(" ") for line in STYLES.strip().splitlines()]
    rows += [("C", "", f"The options:\n{OPTIONS}\nA is too slow.\nAnswer: C"), ("-", "", OPTIONS)]
    for expected, _, text in rows:
        found = extract_letter(text.replace(r"\n", "\n"), 10)
        assert (found or "-", text) == (expected, text)
    for style in ("Answer: {} 12 cm", "Answer: {} (12)", "Answer: {} Paris", "Answer: {} [12]"):
        for option in "ABCDEFGHIJ":
            assert extract_letter(style.format(option), 10) == option
    for style in ("Answer: {}", "The answer is ({}).", "\\boxed{{{}}}", "{}", "({}) 5 m/s"):
        for option in "ABCDEFGHIJ":
            assert extract_letter(style.format(option), 10) == option
            assert extract_letter(style.format(option.lower()), 10) == option
    assert extract_letter("", 4) is extract_letter("Answer: E", 4) is None


@pytest.mark.parametrize(
    "text",
    ["the answer is " * 5000, "\\text{" * 5000, "(A) " * 20000, "answer a a a a a a " * 3000],
)
def test_long_texts_take_no_time(text: str) -> None:
    started = time.monotonic()
    extract_letter(text, 10)
    # seconds where reading is linear, minutes where it is not
    assert time.monotonic() - started < 60


def mmlu_row(number: int, category: str = "law", **other: Any) -> dict[str, Any]:
    row = {"question_id": number, "question": f"q{number}?", "options": ["w", "x", "y"]}
    return {**row, "answer": "B", "answer_index": 1, "category": category, **other}


def test_mmlu_pro_takes_its_category(load: Load) -> None:
    rows = [mmlu_row(1), mmlu_row(2, "computer science", options=["w", "x", "N/A"]), mmlu_row(3)]
    ids = [problem.id for problem in load("mmlu_pro:law", *rows)]
    assert ids == ["mmlu_pro:law/1", "mmlu_pro:law/3"]
    (problem,) = load("mmlu_pro:computer_science", *rows)
    assert (problem.answer, problem.meta["options"]) == ("B", ["w", "x"])
    assert "LETTER is one of AB." in problem.prompt
    assert problem.prompt.endswith("q2?\n\nA: w\nB: x\n\nAnswer:")
    with pytest.raises(ValueError, match=r"'physics'.*computer science, law"):
        load("mmlu_pro:physics", *rows)


def test_mmlu_pro_samples_500_once_and_for_all(load: Load) -> None:
    rows = [mmlu_row(i) for i in range(700)]
    first = [problem.id for problem in load("mmlu_pro:law", *rows)]
    assert [problem.id for problem in load("mmlu_pro:law", *rows)] == first
    numbers = [int(name.rpartition("/")[2]) for name in first]
    assert len(numbers) == 500
    assert numbers == sorted(set(numbers)) != list(range(500))


def gpqa_row(number: int, **more: Any) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f"wrong {i}\n" for i in (1, 2, 3)}
    row = {"Question": f"Question {number}?", "Correct Answer": " right ", **wrong}
    return {**row, "Record ID": f"rec{number}", "High-level domain": "Physics", **more}


def test_gpqa_shuffles_its_options_by_the_question(load: Load) -> None:
    problems = load("gpqa_diamond", *map(gpqa_row, range(40)))
    assert {problem.answer for problem in problems} == set("ABCD")
    for problem in problems:
        options = problem.meta["options"]
        assert sorted(options) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert options["ABCD".index(problem.answer)] == "right"
        assert f"{problem.answer}: right" in problem.prompt
    # neither the place in the file nor the run changes the order
    (alone,) = load("gpqa_diamond", gpqa_row(7))
    assert (alone.id, alone.prompt) == (problems[7].id, problems[7].prompt)
    assert "".join(p.answer for p in problems[:8]) == "DBABAABB"  # in every version of Python


def test_longreason_takes_the_whole_prompt(load: Load) -> None:
    prompt = "A long text.\n\nWho is it?\nA. Ann\nB. Bob\nC. Cid\nD. Dan\nE. Eve"
    row = {"example_idx": 3, "prompt": prompt, "background": "A long text.", "answer": "E"}
    (problem,) = load("longreason:8k", row)
    assert (problem.id, problem.answer) == ("longreason:8k/3", "E")
    assert problem.prompt.startswith(prompt)
    assert TASKS["longreason:64k"].hub.split == "64k"  # type: ignore[union-attr]


def test_grading_is_by_the_letter() -> None:
    problem = EvalProblem("gpqa_diamond/1", "p", "C", {"options": ["w", "x", "y"]})
    for task in ("gpqa_diamond", "mmlu_pro:law", "longreason:8k"):
        assert TASKS[task].grade("<think>A or B</think>It is clear.\nAnswer: C", problem)
        assert not TASKS[task].grade("Answer: B", problem)
        assert not TASKS[task].grade("Answer: D", problem)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("mmlu_pro:law", mmlu_row(1, answer="Z"), "line 1.*'Z'.*answer_index 1.*ABC"),
        ("mmlu_pro:law", mmlu_row(1, answer="A"), "'A'.*answer_index 1"),
        ("mmlu_pro:law", mmlu_row(1, answer_index=3), "answer_index 3"),
        ("mmlu_pro:law", mmlu_row(1, options="abc"), "'options'"),
        ("gpqa_diamond", gpqa_row(0, Question=" "), "line 1: the question or an answer is empty"),
        ("gpqa_diamond", {"Question": "q", "Correct Answer": "a"}, "Incorrect Answer 1"),
        ("longreason:8k", {"prompt": "p", "answer": "Eve"}, "line 1.*'EVE'"),
    ],
)
def test_broken_rows_are_named(load: Load, task: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(task, row)
