"""How often the verifier and the graders of the tasks are right on references, whose verdicts are known."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkv.data.deepscaler import Problem
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.utils.atomic import atomic_path
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import hardware_line, provenance
from rlkv.verifier.verifier import Verifier, extract_answer, last_box

SENTENCE = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"


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
    following = zip(rows, [*rows[1:], rows[0]], strict=True)
    swapped = [(i, p.solution, q.answer) for (i, p), (_, q) in following if p.answer != q.answer]

    def wrong(cases: list[tuple[int, str, str]], expected: bool) -> list[Miss]:
        verdicts = verifier.are_correct([(solution, answer) for _, solution, answer in cases])
        return [
            Miss(index, extract_answer(solution), answer)
            for (index, solution, answer), verdict in zip(cases, verdicts, strict=True)
            if verdict is not expected
        ]

    return VerifierCheck(len(own), wrong(own, True), len(swapped), wrong(swapped, False), len(problems) - len(rows))


def stated(problem: EvalProblem) -> str:
    """The reference as a completion in the form that the prompt asks for: the solution, then the answer in a box."""
    return f"{problem.meta['solution']}\n{SENTENCE % problem.answer}".lstrip()


def check_math(problems: list[EvalProblem], verifier: Verifier, source: str, own_words: bool = False) -> VerifierCheck:
    """Reference answers against themselves and the next problem's; ``own_words``: the boxed solutions as they are."""
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
    """Grade the reference program, an empty one, a wrong one and the next problem's; ``on_done`` ends each."""
    passed: dict[str, list[str]] = {name: [] for name in ("reference", "empty", "wrong", "next")}
    for problem, following in zip(problems, [*problems[1:], problems[0]], strict=True):
        programs = (problem.answer, "", wrong_program(problem.answer), following.answer)
        for name, program in zip(passed, programs, strict=True):
            if task.grade(f"```python\n{program}\n```", problem):
                passed[name].append(problem.id)
        on_done()
    refused = [p.id for p in problems if p.id not in passed["reference"]]
    return CodeCheck(len(problems), refused, passed["empty"], passed["wrong"], passed["next"])


def math_checks(data: Path, timeout: float, workers: int) -> list[dict[str, Any]]:
    """Every maths task with data, in the prompt's form and, where references have solutions, in their own words."""
    rows = []
    with closing(Verifier(num_workers=workers, timeout=timeout)) as verifier:
        for task in [task for task in TASKS.values() if task.kind == "math" and task.draw is None]:
            problems = load_task(task.name, data)
            forms = {"answer in the prompt's form": False}
            if any(last_box(p.meta["solution"]) for p in problems):
                forms["reference solution"] = True
            for form, own_words in forms.items():
                started = time.monotonic()
                found = check_math(problems, verifier, f"task {task.name}", own_words)
                seconds = round(time.monotonic() - started, 3)
                rows.append({"task": task.name, "form": form, **asdict(found), "seconds": seconds})
    return rows


def code_checks(data: Path, limit: int | None) -> dict[str, Any]:
    """MBPP with reference, empty, wrong and next programs."""
    problems = load_task("mbpp", data, limit)
    started = time.monotonic()
    with progress_bar("mbpp", "problems", len(problems)) as progress:
        found = check_code(TASKS["mbpp"], problems, progress.advance)
    return {"task": "mbpp", **asdict(found), "seconds": round(time.monotonic() - started, 3)}


def grader_table(rows: list[dict[str, Any]], code: dict[str, Any] | None) -> str:
    """The counts of :func:`math_checks` and :func:`code_checks` as Markdown."""
    lines = ["| task | completions | own answer accepted | next problem's answer refused |", "|---|---|---|---|"]
    for row in rows:
        accepted = _share(row["own"] - len(row["refused"]), row["own"])
        refused = _share(row["next"] - len(row["accepted"]), row["next"])
        lines.append(f"| {row['task']} | {row['form']} | {accepted} | {refused} |")
    if code is not None:
        passed = _share(code["reference"] - len(code["refused"]), code["reference"])
        lines += [
            "",
            f"MBPP: the reference program passes {passed}, an empty program {len(code['empty_passed'])}, a wrong one "
            f"{len(code['wrong_passed'])}, the next problem's {len(code['next_passed'])}.",
        ]
    return "\n".join(lines) + "\n"


def _share(part: int, n: int) -> str:
    return f"{part} of {n} ({part / n:.2%})" if n else "none"


def verifier_table(rows: list[dict[str, Any]]) -> str:
    """The counts of :func:`check_verifier` as Markdown, a row per ``input`` with its ``seconds``."""
    lines = ["| solutions of | own answer accepted | next problem's answer accepted | left out | seconds |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        accepted = _share(row["own"] - len(row["refused"]), row["own"])
        others = f"{len(row['accepted'])} of {row['next']} | {row['left_out']}"
        lines.append(f"| {Path(row['input']).name} | {accepted} | {others} | {row['seconds']:.1f} |")
    return "\n".join(lines) + "\n"


def write_checks(folder: Path, name: str, content: dict[str, Any], table: str) -> None:
    """``NAME.json`` with the content and where it comes from, ``NAME.md`` with the table, which is printed too."""
    with atomic_path(folder / f"{name}.json") as path:
        path.write_text(json.dumps({**content, **provenance()}, indent=2) + "\n")
    with atomic_path(folder / f"{name}.md") as path:
        path.write_text(f"{table}\n{hardware_line()}.\n")
    print(table)
