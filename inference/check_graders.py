"""Check the graders of the tasks on reference answers: are they accepted, and those of other
problems refused?

    python inference/check_graders.py --data ../shared/data --output-dir results/graders

Maths: the reference in the prompt's form, and the reference solution in its own words where it has
a box, each against its own answer and against the next problem's (where that is another text).
Code: the reference program, an empty one, a wrong one (functions of the right names that return
nothing useful) and the next problem's.  Writes graders.json with every wrong verdict, and
graders.md, into --output-dir.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.app import parse, run_app
from rlkv.data.problems import SUFFIXES, Problem
from rlkv.evaluation.checks import Check, accepted, check_verifier, share_of, write_checks
from rlkv.evaluation.report import Page
from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.inference.options import check_positive
from rlkv.utils.progress import progress_bar
from rlkv.utils.store import check_results
from rlkv.verifier import Verifier
from rlkv.verifier.extraction import last_box

SENTENCE = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    data: Path
    """folder with the tasks' files, such as gsm8k_test.jsonl"""
    output_dir: Path
    """where graders.json and graders.md go"""
    timeout: float = 5.0
    """CPU seconds that one comparison of answers may take"""
    workers: int = 2
    """processes that compare answers"""
    code: bool = True
    """check MBPP too, in the sandbox"""
    code_limit: int | None = None
    """use only the first N problems of MBPP"""

    def check(self) -> None:
        check_positive(self, "workers", "code_limit")


def stated(problem: EvalProblem) -> str:
    """The reference as a completion in the form that the prompt asks for: the solution, then the
    answer in a box.
    """
    return f"{problem.meta['solution']}\n{SENTENCE % problem.answer}".lstrip()


def check_math(
    problems: list[EvalProblem], verifier: Verifier, source: str, own_words: bool = False
) -> Check:
    """Reference answers against themselves and the next problem's; ``own_words``: the boxed
    solutions as they are.
    """
    chosen = [p for p in problems if not own_words or last_box(p.meta["solution"]) is not None]
    rows = [
        Problem(p.prompt, p.answer, p.meta["solution"] if own_words else stated(p)) for p in chosen
    ]
    return check_verifier(rows, verifier, source)


def math_checks(data: Path, timeout: float, workers: int) -> list[Check]:
    """Every maths task with a file, in the prompt's form and, where references have solutions, in
    their own words.
    """
    rows = []
    here = {file.stem for file in data.iterdir() if file.suffix in SUFFIXES}
    with closing(Verifier(num_workers=workers, timeout=timeout)) as verifier:
        for task in [task for task in TASKS.values() if task.kind == "math" and task.file in here]:
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
    """Grade problems of MBPP with their reference program, an empty one, a wrong one and the next
    problem's.

    ``refused`` has ids that fail with their reference, ``NAME_passed`` those that pass with another
    program.
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
        **{"task": "mbpp", "reference": len(problems), "sandbox": isolation()},
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
            [
                row["task"],
                row["form"],
                accepted(row),
                share_of(row["next"] - len(row["accepted"]), row["next"]),
            ]
            for row in rows
        ],
    )
    if code is not None:
        passed = share_of(code["reference"] - len(code["refused"]), code["reference"])
        page.paragraph(
            f"MBPP: the reference program passes {passed}, an empty program "
            f"{len(code['empty_passed'])}, a wrong one "
            f"{len(code['wrong_passed'])}, the next problem's {len(code['next_passed'])}."
        )
    return page


def main() -> None:
    config = parse(GraderConfig, __doc__)
    check_results(config.output_dir, "graders.json", ("graders.md",), ("math", "code"))
    programs = (
        load_task("mbpp", config.data, config.code_limit) if config.code else None
    )  # its errors come first
    rows = math_checks(config.data, config.timeout, config.workers)
    code = None if programs is None else check_code(programs)
    content = {"math": rows, "code": code, "timeout": config.timeout}
    write_checks(config.output_dir, "graders", content, grader_page(rows, code))


if __name__ == "__main__":
    run_app(main)
