"""What the filter job leaves behind: the curriculum as Parquet and JSONL, the report as JSON and Markdown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlkv.data.curriculum import Selection
from rlkv.data.filtering import STATUSES, Outcome
from rlkv.utils.atomic import atomic_path
from rlkv.utils.extras import require
from rlkv.utils.provenance import hardware_line, provenance
from rlkv.utils.store import Row


def write_curriculum(folder: Path, rows: list[Row]) -> None:
    """``curriculum.jsonl`` and ``curriculum.parquet``: problem, answer, output, output_tokens, bucket."""
    arrow, parquet = require("pyarrow", "train"), require("pyarrow.parquet", "train")
    with atomic_path(folder / "curriculum.jsonl") as path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, count = arrow.string(), arrow.int64()
    fields = {"problem": text, "answer": text, "output": text, "output_tokens": count, "bucket": text}
    with atomic_path(folder / "curriculum.parquet") as path:
        parquet.write_table(arrow.Table.from_pylist(rows, schema=arrow.schema(fields.items())), path)


def notes(outcome: Outcome, selection: Selection) -> list[str]:
    """What a reader must not miss: nothing solved, short buckets, outputs outside all buckets."""
    solved, loaded = outcome.counts["correct"], len(outcome.status)
    if not solved:
        return [f"None of the {loaded} problems was solved: the curriculum is empty and there is nothing to train on."]
    found = []
    for fill in selection.fills:
        if fill.short > 0:
            line = f"Bucket {fill.bucket.name} is short: {fill.bucket.wanted} wanted, {fill.taken} there, all taken"
            filled = f"; {fill.filled_from_others} came from other buckets in their place"
            found.append(line + (filled if fill.filled_from_others else "") + ".")
    if selection.outside:
        found.append(
            f"{selection.outside} solved problems have an output length outside all buckets and were left out."
        )
    return found


def build_report(outcome: Outcome, selection: Selection, config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The report as JSON-able values; ``seconds`` is the wall time of the run that finished the job."""
    buckets = []
    for fill in map(asdict, selection.fills):
        buckets.append({**fill.pop("bucket"), **fill})
    return {
        "loaded": len(outcome.status),
        **outcome.counts,
        "outside_buckets": selection.outside,
        "selected": len(selection.chosen),
        "buckets": buckets,
        "notes": notes(outcome, selection),
        "config": config,
        "seconds": round(seconds, 3),
        **provenance(),
    }


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["# Curriculum", "", *report["notes"]]
    if report["notes"]:
        lines.append("")
    lines += ["| | problems |", "|---|---|", f"| loaded | {report['loaded']} |"]
    lines += [f"| {status}: {meaning} | {report[status]} |" for status, meaning in STATUSES.items()]
    lines += [
        f"| solved, outside all buckets | {report['outside_buckets']} |",
        f"| selected | {report['selected']} |",
        "",
    ]
    lines += ["| output tokens | wanted | available | taken | filled from others |", "|---|---|---|---|---|"]
    for b in report["buckets"]:
        cells = [f"{b['low']} < n <= {b['high']}", b["wanted"], b["available"], b["taken"], b["filled_from_others"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    config = ", ".join(f"{key} {value}" for key, value in report["config"].items())
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += ["", f"Settings: {config}.", "", f"{packages}; {hardware_line()}; last run {report['seconds']:.1f} s."]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """``report.json`` and ``report.md``."""
    with atomic_path(folder / "report.json") as path:
        path.write_text(json.dumps(report, indent=2) + "\n")
    with atomic_path(folder / "report.md") as path:
        path.write_text(markdown(report))
