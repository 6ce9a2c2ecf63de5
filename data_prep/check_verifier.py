"""Check the verifier against reference solutions: does it accept the right answer, and refuse
another one?

    python data_prep/check_verifier.py --input problems.jsonl more.parquet --output-dir results/verifier
    python data_prep/check_verifier.py --pairs pairs.jsonl --output-dir results/verifier

Files have the fields problem, answer and solution.  Every solution is compared with its own answer
and with the answer of the next problem, where that is another text.  Pairs have the fields text,
gold, right and kind.  Writes verifier.json (with every wrong verdict) and verifier.md into
--output-dir.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.app import parse, run_app
from rlkv.data.problems import load_problems, read_rows
from rlkv.evaluation.checks import (
    Check,
    accepted,
    check_pairs,
    check_verifier,
    share_of,
    write_checks,
)
from rlkv.evaluation.report import Page
from rlkv.utils.store import Row, check_results
from rlkv.verifier import Verifier


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    input: tuple[str, ...] = ()
    """.jsonl or .parquet files with problem, answer and solution"""
    pairs: tuple[str, ...] = ()
    """.jsonl or .parquet files with text, gold, right (true or false) and kind"""
    output_dir: Path
    """where verifier.json and verifier.md go"""
    timeout: float = 5.0
    """CPU seconds that one comparison may take"""


def load_pairs(source: str) -> list[Row]:
    """The rows of a file of pairs; ValueError if one lacks a field."""
    rows = []
    for where, row in read_rows(source):
        if not {"text", "gold", "right", "kind"} <= row.keys() or not isinstance(
            row["right"], bool
        ):
            raise ValueError(
                f"{where}: expected the fields text, gold, kind, and right, which is true or false"
            )
        rows.append(row)
    return rows


def pairs_table(page: Page, counts: list[Check]) -> None:
    """The counts of :func:`check_pairs`."""
    lines = []
    for count in counts:
        right = share_of(count["right"] - len(count["refused"]), count["right"])
        wrong = share_of(count["wrong"] - len(count["accepted"]), count["wrong"])
        lines.append([count["kind"], right, wrong])
    page.table(["kind", "right ones accepted", "wrong ones refused"], lines)


def verifier_table(page: Page, rows: list[Check]) -> None:
    """The counts of :func:`check_verifier`, a row per ``input`` with its ``seconds``."""
    page.table(
        [
            "solutions of",
            "own answer accepted",
            "next problem's answer accepted",
            "left out",
            "seconds",
        ],
        [
            [
                *(
                    Path(row["input"]).name,
                    accepted(row),
                    f"{len(row['accepted'])} of {row['next']}",
                ),
                *(str(row["left_out"]), f"{row['seconds']:.1f}"),
            ]
            for row in rows
        ],
    )


def main() -> None:
    config = parse(VerifierConfig, __doc__)
    if not config.input and not config.pairs:
        raise ValueError("there is nothing to check: pass --input or --pairs")
    pairs = [load_pairs(source) for source in config.pairs]  # its errors come first
    check_results(config.output_dir, "verifier.json", ("verifier.md",), ("checks",))
    rows = []
    page = Page("Verifier")
    with closing(Verifier(timeout=config.timeout)) as verifier:
        for source in config.input:
            problems = load_problems(source)
            started = time.monotonic()
            found = check_verifier(problems, verifier, source)
            rows.append({"input": source, **found, "seconds": round(time.monotonic() - started, 3)})
        kinds = [check_pairs(file, verifier) for file in pairs]
    if rows:
        verifier_table(page, rows)
    for counts in kinds:
        pairs_table(page, counts)
    content = {"checks": rows, "pairs": kinds, "timeout": config.timeout}
    write_checks(config.output_dir, "verifier", content, page)


if __name__ == "__main__":
    run_app(main)
