"""How often the verifier is right on reference solutions, whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.data.deepscaler import Problem
from rlkv.verifier.verifier import Verifier, extract_answer


@dataclass(frozen=True)
class Miss:
    """A wrong verdict: on the solution of problem ``index`` (from 0), which gives ``extracted``, against ``answer``."""

    index: int
    extracted: str | None
    answer: str


@dataclass(frozen=True)
class VerifierCheck:
    """Verdicts on one data set.

    ``own``: solutions compared with their own answer, of which ``refused`` were not accepted.  ``next``: solutions
    compared with the answer of the following problem (the first one's after the last), where it is another text, of
    which ``accepted`` were accepted.  Problems without solution or answer are ``left_out``.
    """

    own: int
    refused: list[Miss]
    next: int
    accepted: list[Miss]
    left_out: int


def check_verifier(problems: list[Problem], verifier: Verifier, source: str) -> VerifierCheck:
    """Compare every reference solution with its own answer and the next problem's; ``source`` names them in errors.

    Raises:
        ValueError: if no problem has a solution and an answer.
    """
    rows = [(i, p) for i, p in enumerate(problems) if p.solution.strip() and p.answer.strip()]
    if not rows:
        raise ValueError(f"{source}: no problem has both a solution and an answer, nothing to check the verifier on")
    own = [(i, p.solution, p.answer) for i, p in rows]
    following = [*rows[1:], rows[0]]
    swapped = [
        (i, p.solution, q.answer) for (i, p), (_, q) in zip(rows, following, strict=True) if p.answer != q.answer
    ]

    def wrong(cases: list[tuple[int, str, str]], expected: bool) -> list[Miss]:
        verdicts = verifier.are_correct([(solution, answer) for _, solution, answer in cases])
        return [
            Miss(index, extract_answer(solution, verifier.extraction), answer)
            for (index, solution, answer), verdict in zip(cases, verdicts, strict=True)
            if verdict is not expected
        ]

    return VerifierCheck(len(own), wrong(own, True), len(swapped), wrong(swapped, False), len(problems) - len(rows))
