"""The task of the built-in language model: right by construction, reproducible, with names that are
held out.
"""

from __future__ import annotations

import random
import re

import pytest

from rlkv.smol import HELD_OUT_NAMES, MAX_STEPS, MAX_VALUE, NAMES, draw_problem, problems
from rlkv.verifier import is_correct


def solve(problem: str) -> int:
    """Answer a problem from its text alone, independently of the generator."""
    known = {name: int(value) for name, value in re.findall(r"(\w+) has (\d+)\.", problem)}
    relations = re.findall(r"(\w+) has (\d+) (more|fewer) than (\w+)\.", problem)
    for _ in relations:  # every round resolves at least one
        for name, amount, kind, other in relations:
            if other in known:
                known[name] = known[other] + (int(amount) if kind == "more" else -int(amount))
    return known[re.search(r"does (\w+) have\?", problem)[1]]


@pytest.mark.parametrize("steps", range(1, MAX_STEPS + 1))
def test_answers_and_solutions_are_right(steps: int) -> None:
    rng = random.Random(steps)
    for distractors in range(7):
        drawn = draw_problem(rng, steps, distractors)
        assert 0 < solve(drawn.problem) == int(drawn.answer) <= MAX_VALUE
        assert is_correct(drawn.solution, drawn.answer)
        computed = re.findall(r": (\d+) ([+-]) (\d+) = (\d+)\.", drawn.solution)
        assert len(computed) == drawn.steps == steps
        for left, sign, right, result in computed:
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result)
            assert 0 < int(result) <= MAX_VALUE


def test_every_fact_of_a_solution_is_in_the_problem() -> None:
    drawn = draw_problem(random.Random(1), 8, 4)
    assert len(drawn.problem.split(". ")) == 8 + 1 + 4 + 1
    for fact in re.findall(r"\w+ has \d+ (?:more|fewer) than \w+", drawn.solution):
        assert fact in drawn.problem


def test_same_seed_same_problems() -> None:
    assert problems(20, seed=3) == problems(20, seed=3)
    assert problems(20, seed=3) != problems(20, seed=4)
    assert problems(5, seed=3) == problems(20, seed=3)[:5]


def test_held_out_names_are_others() -> None:
    assert not set(NAMES) & set(HELD_OUT_NAMES)
    everyone = (*NAMES, *HELD_OUT_NAMES)
    assert not [
        name for name in everyone for other in everyone if name != other and name.startswith(other)
    ]
    for unseen, allowed in ((False, NAMES), (True, HELD_OUT_NAMES)):
        text = " ".join(row["problem"] for row in problems(50, 0, held_out_names=unseen))
        assert set(re.findall(r"\b([A-Z]\w+) has", text)) <= set(allowed)


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5), (3, MAX_STEPS + 1)])
def test_refuses_impossible_lengths(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="min_steps"):
        problems(1, seed=0, min_steps=low, max_steps=high)
