"""Results as files: ``results.json``, a Markdown table and the accuracy-against-sparsity picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkv.evaluation.heads.measure import HeadResult
from rlkv.utils.atomic import atomic_path
from rlkv.utils.figures import TEXT_SIZE, curve_figure, save_figure
from rlkv.utils.provenance import hardware_line, provenance

BYTES_NOTE = (
    "KV held: bytes of KV entries in use at the end of each text (mean of the rows above), over the bytes that the "
    "full cache would hold for the same tokens."
)


def write_results(
    path: Path,
    rows: Sequence[HeadResult],
    config: dict[str, Any],
    agreements: dict[str, dict[str, float | None]] | None = None,
    seconds: dict[str, list[float]] | None = None,
) -> None:
    """``{"rows": [...], "config": ..., "versions": ..., "hardware": ...}``, written in one move.

    ``seconds``: what each run of a method took to find its heads.
    """
    content = {
        "rows": [row.to_dict() for row in rows],
        "config": config,
        "agreement_with_oracle": agreements or {},
        "identification_seconds": seconds or {},
        **provenance(),
    }
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def _cells(rows: Sequence[HeadResult], method: str, sparsity: float) -> list[HeadResult]:
    # at sparsity 0 every method is the full cache
    return [r for r in rows if r.sparsity == sparsity and (r.method == method or sparsity == 0)]


def training_seconds(gates_file: str, field: str = "time/step_s") -> float | None:
    """Seconds of all optimizer steps, from the log beside a gates file; None if there is none, or it lacks ``field``.

    ``time/step_s`` is wall-clock time, ``time/step_cpu_s`` the time that the process spent on its processors.
    """
    log = Path(gates_file).parent / "log.jsonl"
    if not log.is_file():
        return None
    found = [json.loads(line).get(field) for line in log.read_text().splitlines()]
    return None if not found or None in found else float(sum(found))


def markdown_table(rows: Sequence[HeadResult], title: str, seconds: dict[str, list[float]] | None = None) -> str:
    """Methods down, sparsities across: accuracy with its 95% interval; several draws or runs as mean and range.

    ``seconds``, of a method's runs, adds a column with their mean.
    """
    methods = list(dict.fromkeys(r.method for r in rows if r.sparsity > 0))
    sparsities = sorted({r.sparsity for r in rows})
    columns = ["heads", *(f"s = {s:g}" for s in sparsities), *(["seconds to find"] if seconds else [])]
    lines = [f"### {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for method in methods:
        cells = []
        for sparsity in sparsities:
            found = _cells(rows, method, sparsity)
            if not found:
                cells.append("")
            elif len(found) == 1:
                cells.append(f"{found[0].accuracy:.3f} [{found[0].ci_low:.2f}, {found[0].ci_high:.2f}]")
            else:
                values = [r.accuracy for r in found]
                cells.append(f"{np.mean(values):.3f} ({len(values)} draws: {min(values):.2f} to {max(values):.2f})")
        if seconds:
            cells.append(f"{np.mean(seconds[method]):.0f}" if method in seconds else "")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    ratios = []
    for sparsity in sparsities:
        held = [r.kv_bytes / r.kv_bytes_full for r in rows if r.sparsity == sparsity]
        ratios.append(f"{100 * np.mean(held):.0f}%")
    lines.append("| *KV held, of full* | " + " | ".join([*ratios, *([""] if seconds else [])]) + " |")
    n = max(r.n for r in rows)
    lines += ["", f"Greedy accuracy on {n} problems, 95% Wilson intervals. {BYTES_NOTE} {hardware_line()}."]
    if seconds:
        lines[-1] += " Seconds to find: wall-clock time of all optimizer steps of a run (mean of runs)."
    return "\n".join(lines) + "\n"


def plot_accuracy(rows: Sequence[HeadResult], path: Path, title: str) -> None:
    """Accuracy against sparsity: intervals as error bars; draws of a random method as a band from min to max."""
    sparsity_axis = "sparsity (share of KV heads that are compressible)"
    figure, axes = curve_figure(title, sparsity_axis, "greedy accuracy")
    for i, method in enumerate(dict.fromkeys(r.method for r in rows if r.sparsity > 0)):
        points = sorted({r.sparsity for r in rows if r.method == method} | {0.0})
        cells = [_cells(rows, method, s) for s in points]
        means = [float(np.mean([r.accuracy for r in cell])) for cell in cells]
        if any(len(cell) > 1 for cell in cells):
            axes.plot(points, means, "o--", color=f"C{i}", label=f"{method} (mean and range of draws)")
            low, high = ([pick(r.accuracy for r in cell) for cell in cells] for pick in (min, max))
            axes.fill_between(points, low, high, color=f"C{i}", alpha=0.15)
        else:
            bars = [[m - c[0].ci_low for m, c in zip(means, cells, strict=True)]]
            bars.append([c[0].ci_high - m for m, c in zip(means, cells, strict=True)])
            axes.errorbar(points, means, yerr=bars, fmt="o-", capsize=3, color=f"C{i}", label=method)
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=TEXT_SIZE)
    save_figure(figure, path)
