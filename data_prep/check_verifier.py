"""Check the verifier against reference solutions: does it accept the right answer, and refuse another one?

    python data_prep/check_verifier.py --input problems.jsonl more.parquet --output-dir results/verifier

Files have the fields problem, answer and solution.  Every solution is compared with its own answer and with the
answer of the next problem, where that is another text.  Writes verifier.json (with every wrong verdict) and
verifier.md into --output-dir.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.data.deepscaler import load_problems
from rlkv.evaluation.report.checks import Check, accepted, check_verifier, write_checks
from rlkv.evaluation.report.page import Page
from rlkv.utils.store import check_results
from rlkv.verifier.verifier import Verifier


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    input: tuple[str, ...]
    """.jsonl or .parquet files with problem, answer and solution"""
    output_dir: Path
    """where verifier.json and verifier.md go"""
    timeout: float = 5.0
    """CPU seconds that one comparison may take"""


def verifier_page(rows: list[Check]) -> Page:
    """The counts of :func:`check_verifier`, a row per ``input`` with its ``seconds``."""
    page = Page("Verifier")
    page.table(
        ["solutions of", "own answer accepted", "next problem's answer accepted", "left out", "seconds"],
        [
            [
                *(Path(row["input"]).name, accepted(row), f"{len(row['accepted'])} of {row['next']}"),
                *(str(row["left_out"]), f"{row['seconds']:.1f}"),
            ]
            for row in rows
        ],
    )
    return page


def main() -> None:
    config = parse(VerifierConfig, __doc__)
    check_results(config.output_dir, "verifier.json", ("verifier.md",), ("checks",))
    rows = []
    with closing(Verifier(timeout=config.timeout)) as verifier:
        for source in config.input:
            problems = load_problems(source)
            started = time.monotonic()
            found = check_verifier(problems, verifier, source)
            rows.append({"input": source, **found, "seconds": round(time.monotonic() - started, 3)})
    write_checks(config.output_dir, "verifier", {"checks": rows, "timeout": config.timeout}, verifier_page(rows))


if __name__ == "__main__":
    run_app(main)
