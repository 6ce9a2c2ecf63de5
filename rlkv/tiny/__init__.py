"""The built-in tiny reasoning model: its task, tokenizer and packaged weights."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkv.models.builtin import TINY
from rlkv.models.builtin import TINY_FOLDER as MODEL_DIR
from rlkv.models.loading import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["GROUND_TRUTH", "MODEL_DIR", "load", "problems"]

NAMES = string.ascii_lowercase
OPERATORS = "+-*"
NUM_GIVEN = 2
MIN_DEFINITIONS = 3
MAX_DEFINITIONS = 25
ANSWER_PREFIX = r"Therefore, the final answer is: $\boxed{"
GROUND_TRUTH = MODEL_DIR / "ground_truth.json"
ANSWER_SUFFIX = "}$. I hope it is correct"


@dataclass(frozen=True)
class TinyProblem:
    """One problem with its worked solution (both as text) and its answer, a digit."""

    problem: str
    answer: str
    solution: str


def apply_operator(operator: str, left: int, right: int) -> int:
    """Compute modulo 10."""
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result % 10


def draw_problem(rng: random.Random, num_definitions: int) -> TinyProblem:
    """Draw a problem with ``num_definitions`` definitions, the first two of them values."""
    names = rng.sample(NAMES, num_definitions)
    values: dict[str, int] = {}
    used_values = [0] * 10
    unused: list[str] = []
    statements = []
    steps = []
    for i, name in enumerate(names):
        if i < NUM_GIVEN:
            value = rng.randrange(10)
            statements.append(f"{name}={value}")
        else:
            # two different operands; a name that nothing depends on yet comes first
            left = rng.choice(unused if unused and rng.random() < 0.8 else names[:i])
            others = [n for n in names[:i] if n != left]
            fresh = [n for n in unused if n != left]
            right = rng.choice(fresh if fresh and rng.random() < 0.5 else others)
            # products fall into 0: of the three results take the one that was used least
            operator = min(
                rng.sample(OPERATORS, 3),
                key=lambda op: used_values[apply_operator(op, values[left], values[right])],
            )
            value = apply_operator(operator, values[left], values[right])
            unused = [n for n in unused if n not in (left, right)]
            statements.append(f"{name} = {left} {operator} {right}")
            steps.append(
                f"{statements[-1]} , {left}={values[left]} , {right}={values[right]} , "
                f"{values[left]} {operator} {values[right]} = {value} , {name}={value} ."
            )
        values[name] = value
        used_values[value] += 1
        unused.append(name)
    question = names[-1]
    answer = str(values[question])
    problem = " . ".join(statements) + f" . find {question} ?"
    solution = " ".join(steps) + f" {ANSWER_PREFIX} {answer} {ANSWER_SUFFIX}"
    return TinyProblem(problem, answer, solution)


def draw_length(rng: random.Random, low: int, high: int) -> int:
    """Draw a number of definitions in [low, high], log-uniform: many short, a long tail."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def longest_solution(num_definitions: int) -> int:
    """Count the tokens of a solution, with its EOS, of a problem with so many definitions."""
    return 18 * (num_definitions - NUM_GIVEN) + 4


def problems(
    n: int,
    seed: int,
    min_definitions: int = MIN_DEFINITIONS,
    max_definitions: int = MAX_DEFINITIONS,
) -> list[dict[str, str]]:
    """Draw ``n`` problems as ``{"problem", "answer"}``, the same for the same arguments.

    Raises:
        ValueError: if the range of definitions is not within [3, 25].
    """
    if not MIN_DEFINITIONS <= min_definitions <= max_definitions <= MAX_DEFINITIONS:
        raise ValueError(
            f"definitions must satisfy {MIN_DEFINITIONS} <= min <= max <= {MAX_DEFINITIONS}, "
            f"got min_definitions={min_definitions}, max_definitions={max_definitions}"
        )
    rng = random.Random(f"rlkv-tiny-{seed}")
    found = []
    for _ in range(n):
        drawn = draw_problem(rng, draw_length(rng, min_definitions, max_definitions))
        found.append({"problem": drawn.problem, "answer": drawn.answer})
    return found


def load(
    dtype: str = "float32", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load ``(model, tokenizer)`` from the packaged weights, without a network."""
    return load_model(TINY, dtype=dtype, device=device)
