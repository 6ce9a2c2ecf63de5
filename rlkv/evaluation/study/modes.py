"""Error modes (RLKV, figure 9): how answers fail under each ranking where the full cache is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import plot_stacked
from rlkv.evaluation.stats.error_modes import MODES
from rlkv.evaluation.stats.metrics import mean_with_interval
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.outcomes import Metrics, Outcome
from rlkv.evaluation.study.text import estimate, levels

COLOURS = {"repetitive": "#c44e52", "overlength": "#dd8452", "incorrect": "#8c8c8c"}


def mode_shares(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """The share of each error mode among the problems that the full cache solves, with intervals; None without any."""
    solved = full.correct == 1
    if not solved.any():
        return None
    occurs = {mode: np.mean([[found == mode for found in run.modes] for run in runs], axis=0) for mode in MODES}
    return {mode: asdict(mean_with_interval(scores[solved])) for mode, scores in occurs.items()}


class ErrorModes(Analysis):
    """Repetitive, overlength and incorrect answers per ranking and sparsity."""

    name = "modes"
    title = "Error modes"

    def settings(self, study: Study) -> Metrics:
        return {**super().settings(study), "rule": asdict(study.config.rule)}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        right, methods = study.full(task).correct, study.sweep(task, mode_shares)
        return {"solved": int(right.sum()), "n": int(right.size), "methods": methods}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        if not found["solved"]:
            return []
        shares = found["methods"][metrics["first"]][-1]
        parts = ", ".join(f"{mode} {estimate(shares[mode])}" for mode in MODES)
        return [
            f"{task}: of the {found['solved']} problems that the full cache solves, {metrics['first']} at "
            f"{metrics['sparsities'][-1]:g} fails as follows (shares): {parts}."
        ]

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        if not found["solved"]:
            page.paragraph(f"{task}: the full cache solves no problem, so there are no error modes to count.")
            return
        rule, solved = metrics["rule"], f"the {found['solved']} of {found['n']} problems that the full cache solves"
        page.table(
            ["heads", *levels(metrics["sparsities"])],
            [[name, *map(_cell, of)] for name, of in found["methods"].items()],
            f"{task}: share that fails, of {solved} (mean over seeds); below, how it fails, with 95% intervals over "
            f"problems. Repetitive: fewer than {rule['distinct']} distinct tokens in a stretch of {rule['window']}; "
            "overlength: cut at the limit; incorrect: the rest. The first that fits counts.",
        )
        panels = {
            f"s = {sparsity:g}": {
                name: {mode: of[i][mode]["mean"] for mode in MODES} for name, of in found["methods"].items()
            }
            for i, sparsity in enumerate(metrics["sparsities"])
        }
        plot = plot_stacked(self.plot_file(folder, task), panels, "share of problems", COLOURS)
        page.picture(plot, f"{task}: error modes among {solved}, per sparsity.")


def _cell(shares: Metrics) -> Cell:
    failing = sum(shares[mode]["mean"] for mode in MODES)
    return Cell(f"{failing:.3f}", "", "\n".join(f"{mode} {estimate(shares[mode])}" for mode in MODES))
