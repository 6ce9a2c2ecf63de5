"""How often the graders of the tasks are right on completions whose verdict is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlkv.data.deepscaler import Problem
from rlkv.evaluation.tasks import EvalProblem, EvalTask
from rlkv.evaluation.verifier_check import VerifierCheck, check_verifier
from rlkv.verifier.verifier import Verifier, last_box

SENTENCE = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"


def stated(problem: EvalProblem) -> str:
    """The reference as a completion in the form that the prompt asks for: the solution, then the answer in a box."""
    return f"{problem.meta['solution']}\n{SENTENCE % problem.answer}".lstrip()


def check_math(problems: list[EvalProblem], verifier: Verifier, source: str, own_words: bool = False) -> VerifierCheck:
    """The reference answers against themselves and against the next problem's.

    Args:
        own_words: take the reference solutions as they are (those with a box) in place of the prompt's form.
    """
    chosen = [p for p in problems if not own_words or last_box(p.meta["solution"]) is not None]
    rows = [Problem(p.prompt, p.answer, p.meta["solution"] if own_words else stated(p)) for p in chosen]
    return check_verifier(rows, verifier, source)


@dataclass(frozen=True)
class CodeCheck:
    """Ids of the problems that pass with their reference program, with none, with a wrong one and with the next's.

    ``refused`` lists those whose reference fails; ``reference`` counts all problems.
    """

    reference: int
    refused: list[str]
    empty_passed: list[str]
    wrong_passed: list[str]
    next_passed: list[str]


def wrong_program(program: str) -> str:
    """Functions of the same names that return an object equal to nothing but itself."""
    names = dict.fromkeys(re.findall(r"^def\s+(\w+)", program, re.MULTILINE))
    return "\n".join(f"def {name}(*args, **kwargs):\n    return object()\n" for name in names)


def check_code(task: EvalTask, problems: list[EvalProblem], on_done: Callable[[], None]) -> CodeCheck:
    """Grade the reference program, an empty program, a wrong one and the next problem's program of every problem.

    Args:
        on_done: called after every problem.
    """
    found: dict[str, list[str]] = {"reference": [], "empty": [], "wrong": [], "next": []}
    for problem, following in zip(problems, [*problems[1:], problems[0]], strict=True):
        programs = {
            "reference": problem.answer,
            "empty": "",
            "wrong": wrong_program(problem.answer),
            "next": following.answer,
        }
        for name, program in programs.items():
            if task.grade(f"```python\n{program}\n```", problem):
                found[name].append(problem.id)
        on_done()
    passed = set(found["reference"])
    refused = [p.id for p in problems if p.id not in passed]
    return CodeCheck(len(problems), refused, found["empty"], found["wrong"], found["next"])
