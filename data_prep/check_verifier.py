"""Check the verifier against reference solutions: does it accept the right answer, and refuse another one?

    python data_prep/check_verifier.py --input problems.jsonl --input more.parquet --output-dir results/verifier

Files have the fields problem, answer and solution.  Every solution is compared with its own answer and with the
answer of the next problem, where that is another text.  Writes verifier.json (with every wrong verdict) and
verifier.md into --output-dir.
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
from rlkv.data.deepscaler import load_problems
from rlkv.evaluation.verifier_check import check_verifier
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import hardware_line, provenance
from rlkv.verifier.verifier import Verifier

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def table(rows: list[dict[str, Any]]) -> str:
    """The counts as a Markdown table."""
    lines = ["| solutions of | own answer accepted | next problem's answer accepted | left out | seconds |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        right = row["own"] - len(row["refused"])
        cells = [
            Path(row["input"]).name,
            f"{right} of {row['own']} ({right / row['own']:.2%})",
            f"{len(row['accepted'])} of {row['next']}",
            row["left_out"],
            f"{row['seconds']:.1f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@app.command(help=help_text(__doc__))
def main(
    input: Annotated[list[str], typer.Option(help=".jsonl or .parquet with problem, answer and solution; repeatable")],
    output_dir: Annotated[Path, typer.Option(help="where verifier.json and verifier.md go")],
    timeout: Annotated[float, typer.Option(help="CPU seconds that one comparison may take", min=0.1)] = 5.0,
) -> None:
    rows = []
    with closing(Verifier(timeout=timeout)) as verifier:
        for source in input:
            problems = load_problems(source)
            started = time.monotonic()
            found = check_verifier(problems, verifier, source)
            rows.append({"input": source, **asdict(found), "seconds": round(time.monotonic() - started, 3)})
    with atomic_path(output_dir / "verifier.json") as path:
        path.write_text(json.dumps({"checks": rows, "timeout": timeout, **provenance()}, indent=2) + "\n")
    with atomic_path(output_dir / "verifier.md") as path:
        path.write_text(f"{table(rows)}\n{hardware_line()}.\n")
    typer.echo(table(rows))


if __name__ == "__main__":
    run_app(app)
