"""The task of the built-in language model: shuffled facts about people, and a question at the end of a chain.

A problem of two steps, with one fact that the question does not need::

    Ben has 2 fewer than Noah. Iris has 4 more than Ben. Mia has 14. Noah has 3 more than Mia. How many does Ben have?

Its solution first goes back along the chain, then computes forward::

    Ben depends on Noah. Noah depends on Mia. Mia has 14. Noah has 3 more than Mia: 14 + 3 = 17.
    Ben has 2 fewer than Noah: 17 - 2 = 15. The answer is \\boxed{15}.

Every sentence looks up one fact of the prompt, or the result before it: a wrong look-up is a wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlkv.smol.names import HELD_OUT_NAMES, NAMES

MIN_STEPS, MAX_STEPS = 3, 12
MAX_DISTRACTORS = 6
MAX_VALUE = 30  # a problem is hard because of its look-ups, not of its sums
MAX_NEW_TOKENS = 448  # the longest solution has fewer tokens


@dataclass(frozen=True)
class SmolProblem:
    """A problem with its worked solution (both as text), its answer and the number of its steps."""

    problem: str
    answer: str
    solution: str
    steps: int


def draw_problem(rng: random.Random, steps: int, distractors: int, names: Sequence[str] = NAMES) -> SmolProblem:
    """A random problem: a chain of ``steps`` computations, and ``distractors`` facts that it does not need."""
    people = rng.sample(names, steps + 1 + distractors)
    value, needs, fact, computed = {}, {}, {}, {}
    for i, person in enumerate(people):
        if i == 0 or (i > steps and rng.random() < 0.2):
            value[person] = rng.randint(5, MAX_VALUE)
            fact[person] = f"{person} has {value[person]}"
            continue
        other = needs[person] = people[i - 1] if i <= steps else rng.choice(people[:i])
        amount = rng.randint(1, 9)
        more = value[other] <= amount or (value[other] + amount <= MAX_VALUE and rng.random() < 0.5)
        value[person] = value[other] + amount if more else value[other] - amount
        fact[person] = f"{person} has {amount} {'more' if more else 'fewer'} than {other}"
        computed[person] = f"{fact[person]}: {value[other]} {'+' if more else '-'} {amount} = {value[person]}."
    chain, asked = people[: steps + 1], people[steps]
    facts = [f"{fact[person]}." for person in people]
    rng.shuffle(facts)
    back = [f"{person} depends on {needs[person]}." for person in reversed(chain[1:])]
    forward = [f"{fact[chain[0]]}.", *(computed[person] for person in chain[1:])]
    answer = str(value[asked])
    solution = " ".join([*back, *forward, f"The answer is \\boxed{{{answer}}}."])
    return SmolProblem(" ".join([*facts, f"How many does {asked} have?"]), answer, solution, steps)


def problems(
    n: int, seed: int, min_steps: int = MIN_STEPS, max_steps: int = MAX_STEPS, held_out_names: bool = False
) -> list[dict[str, str]]:
    """``n`` random problems as ``{"problem", "answer"}``, the same for the same arguments.

    Args:
        min_steps, max_steps: computations on the way to the answer, drawn uniformly.
        held_out_names: take the names that fine-tuning never saw.

    Raises:
        ValueError: if the range of steps is not within [1, 12].
    """
    if not 1 <= min_steps <= max_steps <= MAX_STEPS:
        raise ValueError(
            f"steps must satisfy 1 <= min_steps <= max_steps <= {MAX_STEPS}, "
            f"got min_steps={min_steps}, max_steps={max_steps}"
        )
    rng = random.Random(f"rlkv-smol-{seed}")
    names = HELD_OUT_NAMES if held_out_names else NAMES
    drawn = (
        draw_problem(rng, rng.randint(min_steps, max_steps), rng.randint(2, MAX_DISTRACTORS), names) for _ in range(n)
    )
    return [{"problem": p.problem, "answer": p.answer} for p in drawn]
