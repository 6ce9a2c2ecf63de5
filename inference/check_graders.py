"""Check the graders of the tasks on reference answers: are they accepted, and those of other problems refused?

    python inference/check_graders.py --data ../shared/data --output-dir results/graders

Maths: the reference in the prompt's form, and the reference solution in its own words where it has a box, each against
its own answer and against the next problem's (where that is another text).  Code: the reference program, an empty one,
a wrong one (functions of the right names that return nothing useful) and the next problem's.  Writes graders.json with
every wrong verdict, and graders.md, into --output-dir.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.grader_check import check_code, check_math
from rlkv.evaluation.tasks import find_task, load_task
from rlkv.utils.atomic import atomic_path
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import hardware_line, provenance
from rlkv.verifier.verifier import Verifier, last_box

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
MATHS = ("gsm8k", "math500", "aime24", "aime25")


def math_rows(name: str, data: Path, verifier: Verifier) -> list[dict[str, Any]]:
    """Both forms of the reference of one task; those without solutions have one form."""
    problems = load_task(name, data)
    forms = [False, True] if any(last_box(p.meta["solution"]) for p in problems) else [False]
    rows = []
    for own_words in forms:
        started = time.monotonic()
        found = check_math(problems, verifier, f"task {name}", own_words)
        form = "reference solution" if own_words else "answer in the prompt's form"
        rows.append({"task": name, "form": form, **asdict(found), "seconds": round(time.monotonic() - started, 3)})
    return rows


def code_row(data: Path, limit: int | None) -> dict[str, Any]:
    """MBPP with reference, empty, wrong and next programs."""
    problems = load_task("mbpp", data, limit)
    started = time.monotonic()
    with progress_bar("mbpp", "problems", len(problems)) as progress:
        found = check_code(find_task("mbpp"), problems, progress.advance)
    return {"task": "mbpp", **asdict(found), "seconds": round(time.monotonic() - started, 3)}


def share(part: int, n: int) -> str:
    """A count with its percentage."""
    return f"{part} of {n} ({part / n:.2%})" if n else "none"


def table(rows: list[dict[str, Any]], code: dict[str, Any] | None) -> str:
    """The counts as Markdown."""
    lines = ["| task | completions | own answer accepted | next problem's answer refused |", "|---|---|---|---|"]
    for row in rows:
        accepted = share(row["own"] - len(row["refused"]), row["own"])
        refused = share(row["next"] - len(row["accepted"]), row["next"])
        lines.append(f"| {row['task']} | {row['form']} | {accepted} | {refused} |")
    if code is not None:
        passed = share(code["reference"] - len(code["refused"]), code["reference"])
        lines += [
            "",
            f"MBPP: the reference program passes {passed}, an empty program "
            f"{len(code['empty_passed'])}, a wrong one {len(code['wrong_passed'])}, the next problem's "
            f"{len(code['next_passed'])}.",
        ]
    return "\n".join(lines) + "\n"


@app.command(help=help_text(__doc__))
def main(
    data: Annotated[Path, typer.Option(help="folder with the tasks' files, such as gsm8k_test.jsonl")],
    output_dir: Annotated[Path, typer.Option(help="where graders.json and graders.md go")],
    timeout: Annotated[float, typer.Option(help="CPU seconds that one comparison of answers may take", min=0.1)] = 5.0,
    workers: Annotated[int, typer.Option(help="processes that compare answers", min=1)] = 2,
    code: Annotated[bool, typer.Option(help="check MBPP too, in the sandbox")] = True,
    code_limit: Annotated[int | None, typer.Option(help="only the first so many problems of MBPP", min=1)] = None,
) -> None:
    with closing(Verifier(num_workers=workers, timeout=timeout)) as verifier:
        rows = [row for name in MATHS for row in math_rows(name, data, verifier)]
    programs = code_row(data, code_limit) if code else None
    with atomic_path(output_dir / "graders.json") as path:
        report = {"math": rows, "code": programs, "timeout": timeout, **provenance()}
        path.write_text(json.dumps(report, indent=2) + "\n")
    with atomic_path(output_dir / "graders.md") as path:
        path.write_text(f"{table(rows, programs)}\n{hardware_line()}.\n")
    typer.echo(table(rows, programs))


if __name__ == "__main__":
    run_app(app)
