"""Check the graders of the tasks on references: are they accepted, and other answers refused?

    python inference/check_graders.py --data ../shared/data --output-dir results/graders
    python inference/check_graders.py --input problems.jsonl --output-dir results/graders
    python inference/check_graders.py --pairs pairs.jsonl --output-dir results/graders

--data checks maths tasks and MBPP, as far as their files are there. Maths: the reference in the
prompt's form, and the reference solution in its own words where it has a box, each against its own
answer and against the next problem's, where that is another text. Code: the reference program, an
empty one, a wrong one (functions of the right names that return nothing useful) and the next
problem's. --input takes files with problem, answer and solution, --pairs files with text, gold,
right and kind. Writes graders.json, with every wrong verdict, and graders.md into --output-dir.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.cli.app import parse, run_app
from rlkv.data.problems import SUFFIXES, Problem, load_problems, read_rows
from rlkv.evaluation.report import Page
from rlkv.evaluation.sandbox import isolation
from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import TASKS, load_task
from rlkv.inference.options import check_least
from rlkv.utils.files import write_json
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import hardware_line, provenance
from rlkv.utils.store import Row, check_results
from rlkv.verifier import Verifier, extract_answer
from rlkv.verifier.extraction import last_box

SENTENCE = "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct"
IN_FORM = "answer in the prompt's form"
IN_OWN_WORDS = "reference solution"
TOTAL = "total"
Check = dict[str, Any]  # JSON-able


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    data: Path | None = None
    """folder with the tasks' files, such as gsm8k_test.jsonl"""
    input: tuple[str, ...] = ()
    """.jsonl or .parquet files with problem, answer and solution"""
    pairs: tuple[str, ...] = ()
    """.jsonl or .parquet files with text, gold, right (true or false) and kind"""
    output_dir: Path
    """where graders.json and graders.md go"""
    timeout: float = 5.0
    """CPU seconds that one comparison of answers may take"""
    workers: int = 2
    """processes that compare answers"""
    code: bool = True
    """check MBPP of --data too, in the sandbox"""
    code_limit: int | None = None
    """use only the first N problems of MBPP"""

    def check(self) -> None:
        check_least(self, 1, "workers", "code_limit")
        if self.data is None and not self.input and not self.pairs:
            raise ValueError("there is nothing to check: pass --data, --input or --pairs")


def check_solutions(
    problems: list[Problem], verifier: Verifier, task: str, form: str = IN_OWN_WORDS
) -> Check:
    """Compare every solution with its own answer and with the next problem's.

    Returns:
        ``own``: solutions compared with their own answer, of which ``refused`` were not accepted.
        ``next``: solutions compared with the answer of the following problem (the first one's after
        the last), where it is another text, of which ``accepted`` were accepted.  Problems without
        solution or answer are ``left_out``.
    """
    started = time.monotonic()
    rows = [(i, p) for i, p in enumerate(problems) if p.solution.strip() and p.answer.strip()]
    if not rows:
        raise ValueError(
            f"{task}: no problem has both a solution and an answer, nothing to check the verifier "
            "on"
        )
    own = []
    swapped = []
    for (i, problem), (_, following) in zip(rows, [*rows[1:], rows[0]], strict=True):
        own.append((i, problem.solution, problem.answer))
        if problem.answer != following.answer:
            swapped.append((i, problem.solution, following.answer))
    return {
        "task": task,
        "form": form,
        "own": len(own),
        "refused": wrong_verdicts(own, verifier, expected=True),
        "next": len(swapped),
        "accepted": wrong_verdicts(swapped, verifier, expected=False),
        "left_out": len(problems) - len(rows),
        "seconds": round(time.monotonic() - started, 3),
    }


def wrong_verdicts(
    cases: list[tuple[int, str, str]], verifier: Verifier, expected: bool
) -> list[Check]:
    """Return the cases (index, solution, answer) whose verdict is not ``expected``."""
    verdicts = verifier.are_correct([(solution, answer) for _, solution, answer in cases])
    found = []
    for (index, solution, answer), verdict in zip(cases, verdicts, strict=True):
        if verdict is not expected:
            extracted = extract_answer(solution)
            found.append({"index": index, "extracted": extracted, "answer": answer})
    return found


def files_of(data: Path) -> set[str]:
    """Return the names of the tasks' files in a folder, without suffix."""
    return {file.stem for file in data.iterdir() if file.suffix in SUFFIXES}


def task_checks(data: Path, verifier: Verifier) -> list[Check]:
    """Check every maths task with a file, in the prompt's form and in the references' own words."""
    rows = []
    for task in TASKS.values():
        if task.kind != "math" or task.file not in files_of(data):
            continue
        problems = load_task(task.name, data)
        stated = [Problem(p.prompt, p.answer, in_form(p)) for p in problems]
        rows.append(check_solutions(stated, verifier, task.name, IN_FORM))
        own = [Problem(p.prompt, p.answer, p.meta["solution"]) for p in problems]
        boxed = [problem for problem in own if last_box(problem.solution) is not None]
        if boxed:
            rows.append(check_solutions(boxed, verifier, task.name))
    return rows


def in_form(problem: EvalProblem) -> str:
    """Return the reference solution, then the answer in the form that the prompt asks for."""
    return f"{problem.meta['solution']}\n{SENTENCE % problem.answer}".lstrip()


def load_pairs(source: str) -> list[Row]:
    """Read a file of pairs; ``ValueError`` if a field is absent or of another type."""
    rows = []
    for where, row in read_rows(source):
        kinds = {"text": str | None, "gold": object, "kind": str, "right": bool}
        for name, kind in kinds.items():
            if name not in row or not isinstance(row[name], kind):
                raise ValueError(
                    f"{where}: expected text and kind, which are texts, gold, and right, which is "
                    "true or false"
                )
        if row["kind"] == TOTAL:
            raise ValueError(f"{where}: the kind {TOTAL!r} is that of all rows: take another")
        rows.append(row)
    return rows


def check_pairs(rows: list[Row], verifier: Verifier) -> list[Check]:
    """Count the verdicts on pairs that are known to be right or wrong, by kind and in total."""
    verdicts = verifier.are_correct([(row["text"], row["gold"]) for row in rows])
    counts: dict[str, Check] = {}
    for kind in [*sorted({row["kind"] for row in rows}), TOTAL]:
        counts[kind] = {"kind": kind, "right": 0, "wrong": 0, "refused": [], "accepted": []}
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        for kind in (row["kind"], TOTAL):
            counts[kind]["right" if row["right"] else "wrong"] += 1
            if verdict != row["right"]:
                counts[kind]["accepted" if verdict else "refused"].append(index)
    return list(counts.values())


def wrong_program(program: str) -> str:
    """Return functions of the same names that return an object equal to nothing but itself."""
    names = dict.fromkeys(re.findall(r"^def\s+(\w+)", program, re.MULTILINE))
    return "\n".join(f"def {name}(*args, **kwargs):\n    return object()\n" for name in names)


def check_code(problems: list[EvalProblem]) -> Check:
    """Grade problems of MBPP with four programs: the reference, none, a wrong one, the next one's.

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
        "task": "mbpp",
        "reference": len(problems),
        "sandbox": isolation(),
        "refused": [p.id for p in problems if p.id not in passed["reference"]],
        "empty_passed": passed["empty"],
        "wrong_passed": passed["wrong"],
        "next_passed": passed["next"],
        "seconds": round(time.monotonic() - started, 3),
    }


def share_of(part: int, n: int) -> str:
    """Return a count with its percentage."""
    return f"{part} of {n} ({part / n:.2%})" if n else "none"


def grader_page(rows: list[Check], pairs: list[list[Check]], code: Check | None) -> Page:
    """Return the counts as tables."""
    page = Page("Graders")
    if rows:
        lines = []
        for row in rows:
            own = share_of(row["own"] - len(row["refused"]), row["own"])
            others = share_of(row["next"] - len(row["accepted"]), row["next"])
            lines.append([row["task"], row["form"], own, others, str(row["left_out"])])
        page.table(
            [
                "task",
                "completions",
                "own answer accepted",
                "next problem's answer refused",
                "left out",
            ],
            lines,
        )
    for counts in pairs:
        lines = []
        for count in counts:
            right = share_of(count["right"] - len(count["refused"]), count["right"])
            wrong = share_of(count["wrong"] - len(count["accepted"]), count["wrong"])
            lines.append([count["kind"], right, wrong])
        page.table(["kind", "right ones accepted", "wrong ones refused"], lines)
    if code is not None:
        passed = share_of(code["reference"] - len(code["refused"]), code["reference"])
        page.paragraph(
            f"MBPP: the reference program passes {passed}, an empty program "
            f"{len(code['empty_passed'])}, a wrong one {len(code['wrong_passed'])}, the next "
            f"problem's {len(code['next_passed'])}."
        )
    page.paragraph(f"{hardware_line()}.")
    return page


def main() -> None:
    config = parse(GraderConfig, __doc__)
    check_results(config.output_dir, "graders.json", ("graders.md",), ("math", "code"))
    # what cannot be read is refused before anything is checked
    pairs = [load_pairs(source) for source in config.pairs]
    problems = {source: load_problems(source) for source in config.input}
    programs = None
    if config.data is not None and config.code:
        if TASKS["mbpp"].file in files_of(config.data):
            programs = load_task("mbpp", config.data, config.code_limit)
        else:
            print(f"{config.data} has no {TASKS['mbpp'].file}: no programs are checked", flush=True)
    with closing(Verifier(num_workers=config.workers, timeout=config.timeout)) as verifier:
        rows = [] if config.data is None else task_checks(config.data, verifier)
        for source, found in problems.items():
            rows.append(check_solutions(found, verifier, source))
        kinds = [check_pairs(each, verifier) for each in pairs]
    code = None if programs is None else check_code(programs)
    if not rows and code is None and not any(pairs):
        raise ValueError(
            "nothing was checked: --data holds no file of a maths task or MBPP, and --pairs no pair"
        )
    content = {"math": rows, "pairs": kinds, "code": code, "timeout": config.timeout}
    write_json(config.output_dir / "graders.json", {**content, **provenance()})
    page = grader_page(rows, kinds, code)
    page.write(config.output_dir / "graders.md")
    print(page.markdown())


if __name__ == "__main__":
    run_app(main)
