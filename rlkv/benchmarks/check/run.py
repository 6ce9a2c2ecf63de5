"""The check-up: all checks in order, a line of progress for each, and files after each.

Without tyro, which parses the command line, the same runs from Python:
``run_checks(CheckConfig())``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlkv.benchmarks.check import (
    cached,
    decode_kernel,
    decoding,
    evicting,
    local_attention,
    mixed,
    sampling,
    update,
)
from rlkv.benchmarks.check.config import CheckConfig
from rlkv.benchmarks.check.kernels import KERNELS
from rlkv.benchmarks.check.one import Check, Setting, device_error, run_one
from rlkv.evaluation.report import Page, provenance_facts
from rlkv.models.loading import resolve_device
from rlkv.utils.files import write_json
from rlkv.utils.runtime import provenance

# what finds the most per minute comes first; a kernel that breaks the device breaks nothing after
# it
CHECKS: Sequence[Check] = (
    local_attention.CHECK,
    mixed.CHECK,
    cached.CHECK,
    evicting.CHECK,
    update.CHECK,
    sampling.CHECK,
    decoding.CHECK,
    decode_kernel.CHECK,
    *KERNELS,
)
COLUMNS = {
    "check": "{check}",
    "shows": "{shows}",
    "outcome": "{outcome}",
    "s": "{seconds:.1f}",
    "peak GiB": "{peak_gib:.1f}",
    "graphs": "{compiled_graphs}",
    "figures": "{shown}",
    "reason": "{reason}",
}


def chosen(only: Sequence[str], checks: Sequence[Check]) -> list[Check]:
    """The checks named in ``only``, in their order, all if it is empty.

    ValueError for a name that none has.
    """
    names = [check.name for check in checks]
    for name in only:
        if name not in names:
            raise ValueError(f"there is no check {name!r}: choose from {', '.join(names)}")
    return [check for check in checks if not only or check.name in only]


def run_checks(config: CheckConfig, checks: Sequence[Check] = CHECKS) -> int:
    """Run the chosen checks and write check.json and check.md after each; the exit code: 1 if one
    failed.
    """
    todo, setting = chosen(config.only, checks), Setting(resolve_device(config.device))
    results: list[dict[str, Any]] = []
    broken = ""
    for number, check in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {check.name}: {check.shows}", flush=True)
        row = _not_run(check, broken) if broken else run_one(check, setting)
        if not broken and (error := device_error(setting)):
            broken = f"the GPU computes no more since {check.name} ({error})"
            row |= {"outcome": "fails", "reason": "; ".join(filter(None, [row["reason"], broken]))}
        results.append(row)
        print(
            f"    {row['outcome']} after {row['seconds']:.1f} s {row['reason']}".rstrip(),
            flush=True,
        )
        write_results(config, results, len(todo))
    failed = sum(row["outcome"] == "fails" for row in results)
    print(f"{failed} of {len(results)} checks failed; written to {config.output_dir}")
    return int(failed > 0)


def _not_run(check: Check, reason: str) -> dict[str, Any]:
    row = {"check": check.name, "shows": check.shows, "outcome": "cannot run", "seconds": 0.0}
    return row | {
        "reason": f"{reason}: --only {check.name}",
        "figures": {},
        "details": [],
        "traceback": "",
    }


def write_results(config: CheckConfig, results: list[dict[str, Any]], total: int) -> None:
    """check.json, and check.md with one table."""
    origin = provenance()
    write_json(
        config.output_dir / "check.json", {"config": asdict(config), **origin, "results": results}
    )
    page = Page("rlkv-bench check")
    counts = [
        f"{sum(row['outcome'] == o for row in results)} {o}"
        for o in ("passes", "fails", "cannot run")
    ]
    page.paragraph(f"{len(results)} of {total} checks: {', '.join(counts)}.")
    page.code(origin["command"])
    page.bullets(provenance_facts(origin))
    page.records([row | {"shown": _shown(row["figures"])} for row in results], COLUMNS)
    page.write(config.output_dir / "check.md")


def _shown(figures: dict[str, Any]) -> str:
    values = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in figures.items()
    }
    return "; ".join(f"{name} {value}" for name, value in values.items())
