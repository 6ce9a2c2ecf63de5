"""How often the verifier and the graders of the tasks are right on references, whose verdicts are known."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rlkv.data.deepscaler import Problem
from rlkv.evaluation.report.page import Page
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.utils.atomic import write_json
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import hardware_line, provenance
from rlkv.verifier.verifier import Verifier, extract_answer, last_box

SENTENCE = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"
Check = dict[str, Any]  # JSON-able


def check_verifier(problems: list[Problem], verifier: Verifier, source: str) -> Check:
    """Compare every reference solution with its own answer and the next problem's; ``source`` names them in errors.

    Returns:
        ``own``: solutions compared with their own answer, of which ``refused`` were not accepted.  ``next``: solutions
        compared with the answer of the following problem (the first one's after the last), where it is another text,
        of which ``accepted`` were accepted.  Problems without solution or answer are ``left_out``.  A wrong verdict
        has the ``index`` of its problem, the ``extracted`` answer and the ``answer`` that it was compared with.

    Raises:
        ValueError: if no problem has a solution and an answer.
    """
    rows = [(i, p) for i, p in enumerate(problems) if p.solution.strip() and p.answer.strip()]
    if not rows:
        raise ValueError(f"{source}: no problem has both a solution and an answer, nothing to check the verifier on")
    own = [(i, p.solution, p.answer) for i, p in rows]
    following = zip(rows, [*rows[1:], rows[0]], strict=True)
    swapped = [(i, p.solution, q.answer) for (i, p), (_, q) in following if p.answer != q.answer]

    def wrong(cases: list[tuple[int, str, str]], expected: bool) -> list[Check]:
        verdicts = verifier.are_correct([(solution, answer) for _, solution, answer in cases])
        return [
            {"index": index, "extracted": extract_answer(solution), "answer": answer}
            for (index, solution, answer), verdict in zip(cases, verdicts, strict=True)
            if verdict is not expected
        ]

    return {
        **{"own": len(own), "refused": wrong(own, True)},
        **{"next": len(swapped), "accepted": wrong(swapped, False)},
        "left_out": len(problems) - len(rows),
    }


def stated(problem: EvalProblem) -> str:
    """The reference as a completion in the form that the prompt asks for: the solution, then the answer in a box."""
    return f"{problem.meta['solution']}\n{SENTENCE % problem.answer}".lstrip()


def check_math(problems: list[EvalProblem], verifier: Verifier, source: str, own_words: bool = False) -> Check:
    """Reference answers against themselves and the next problem's; ``own_words``: the boxed solutions as they are."""
    chosen = [p for p in problems if not own_words or last_box(p.meta["solution"]) is not None]
    rows = [Problem(p.prompt, p.answer, p.meta["solution"] if own_words else stated(p)) for p in chosen]
    return check_verifier(rows, verifier, source)


def math_checks(data: Path, timeout: float, workers: int) -> list[Check]:
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
                rows.append({"task": task.name, "form": form, **found, "seconds": seconds})
    return rows


def wrong_program(program: str) -> str:
    """Functions of the same names that return an object equal to nothing but itself."""
    names = dict.fromkeys(re.findall(r"^def\s+(\w+)", program, re.MULTILINE))
    return "\n".join(f"def {name}(*args, **kwargs):\n    return object()\n" for name in names)


def check_code(problems: list[EvalProblem]) -> Check:
    """Grade problems of MBPP with their reference program, an empty one, a wrong one and the next problem's.

    ``refused`` has ids that fail with their reference, ``NAME_passed`` those that pass with another program.
    """
    passed: dict[str, list[str]] = {name: [] for name in ("reference", "empty", "wrong", "next")}
    started = time.monotonic()
    with progress_bar("mbpp", "problems", len(problems)) as bar:
        for problem, following in zip(problems, [*problems[1:], problems[0]], strict=True):
            programs = (problem.answer, "", wrong_program(problem.answer), following.answer)
            for name, program in zip(passed, programs, strict=True):
                if TASKS["mbpp"].grade(f"```python\n{program}\n```", problem):
                    passed[name].append(problem.id)
            bar.advance()
    return {
        **{"task": "mbpp", "reference": len(problems)},
        "refused": [p.id for p in problems if p.id not in passed["reference"]],
        **{f"{name}_passed": passed[name] for name in ("empty", "wrong", "next")},
        "seconds": round(time.monotonic() - started, 3),
    }


def grader_page(rows: list[Check], code: Check | None) -> Page:
    """The counts of :func:`math_checks` and :func:`check_code`."""
    page = Page("Graders")
    page.table(
        ["task", "completions", "own answer accepted", "next problem's answer refused"],
        [
            [row["task"], row["form"], _accepted(row), _share(row["next"] - len(row["accepted"]), row["next"])]
            for row in rows
        ],
    )
    if code is not None:
        passed = _share(code["reference"] - len(code["refused"]), code["reference"])
        page.paragraph(
            f"MBPP: the reference program passes {passed}, an empty program {len(code['empty_passed'])}, a wrong one "
            f"{len(code['wrong_passed'])}, the next problem's {len(code['next_passed'])}."
        )
    return page


def verifier_page(rows: list[Check]) -> Page:
    """The counts of :func:`check_verifier`, a row per ``input`` with its ``seconds``."""
    page = Page("Verifier")
    page.table(
        ["solutions of", "own answer accepted", "next problem's answer accepted", "left out", "seconds"],
        [
            [
                *(Path(row["input"]).name, _accepted(row), f"{len(row['accepted'])} of {row['next']}"),
                *(str(row["left_out"]), f"{row['seconds']:.1f}"),
            ]
            for row in rows
        ],
    )
    return page


def _accepted(row: Check) -> str:
    return _share(row["own"] - len(row["refused"]), row["own"])


def _share(part: int, n: int) -> str:
    return f"{part} of {n} ({part / n:.2%})" if n else "none"


def write_checks(folder: Path, name: str, content: dict[str, Any], page: Page) -> None:
    """``NAME.json`` with the content and where it comes from, ``NAME.md`` with the page, which is printed too."""
    write_json(folder / f"{name}.json", {**content, **provenance()})
    page.paragraph(f"{hardware_line()}.")
    page.write(folder / f"{name}.md")
    print(page.markdown(folder))
