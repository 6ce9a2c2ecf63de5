"""Error modes (RLKV, figure 9): how answers fail under each ranking where the full cache is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.stats.error_modes import MODES
from rlkv.evaluation.stats.metrics import mean_with_interval
from rlkv.evaluation.study.base import Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.outcomes import Floats, Outcome
from rlkv.evaluation.study.pictures import MODE_COLOURS, stacked_picture
from rlkv.evaluation.study.text import estimate, levels


def mode_shares(runs: Sequence[Outcome], full: Outcome) -> Figures | None:
    """The share of each error mode among the problems that the full cache solves, with intervals; None without any."""
    solved = full.correct == 1
    if not solved.any():
        return None
    return {mode: asdict(mean_with_interval(_occurs(runs, mode)[solved])) for mode in MODES}


def _occurs(runs: Sequence[Outcome], mode: str) -> Floats:
    return np.mean([[float(found == mode) for found in run.modes] for run in runs], axis=0)


class ErrorModes(Analysis):
    """Repetitive, overlength and incorrect answers per ranking and sparsity."""

    name: ClassVar[str] = "modes"
    title: ClassVar[str] = "Error modes"

    def cells(self, study: Study) -> Wanted:
        return study.cells(study.rankings, study.options.sparsities)

    def figures(self, study: Study) -> Figures:
        tasks = {}
        for task in study.tasks:
            full = study.full(task)
            tasks[task] = {
                "solved": int(full.correct.sum()),
                "n": int(full.correct.size),
                "methods": {
                    ranking.name: [mode_shares(study.runs(task, ranking, s), full) for s in study.options.sparsities]
                    for ranking in study.rankings
                },
            }
        rule = next(iter(study.bench.tasks.values())).settings.rule
        return {"sparsities": list(study.options.sparsities), "rule": asdict(rule), "tasks": tasks}

    def findings(self, figures: Figures) -> list[str]:
        lines = []
        for task, found in figures["tasks"].items():
            if not found["solved"]:
                continue
            name, shares = next(iter(found["methods"].items()))
            sparsity, of = figures["sparsities"][-1], shares[-1]
            parts = ", ".join(f"{mode} {estimate(of[mode])}" for mode in MODES)
            lines.append(
                f"{task}: of the {found['solved']} problems that the full cache solves, {name} at {sparsity:g} fails "
                f"as follows (shares): {parts}."
            )
        return lines

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        rule = figures["rule"]
        for task, found in figures["tasks"].items():
            if not found["solved"]:
                page.paragraph(f"{task}: the full cache solves no problem, so there are no error modes to count.")
                continue
            page.table(
                ["heads", *levels(figures["sparsities"])],
                [[name, *map(_cell, of)] for name, of in found["methods"].items()],
                f"{task}: share that fails, of the {found['solved']} of {found['n']} problems that the full cache "
                "solves (mean over seeds); below, how it fails, with 95% intervals over problems. Repetitive: fewer "
                f"than {rule['distinct']} distinct tokens in a stretch of {rule['window']}; overlength: cut at the "
                "limit; incorrect: the rest. The first that fits counts.",
            )
            picture = folder / f"modes-{task.replace(':', '_')}.png"
            panels = {
                f"s = {sparsity:g}": {
                    name: {mode: of[i][mode]["mean"] for mode in MODES} for name, of in found["methods"].items()
                }
                for i, sparsity in enumerate(figures["sparsities"])
            }
            stacked_picture(picture, panels, "share of problems", MODE_COLOURS)
            page.picture(
                picture,
                f"{task}: error modes among the {found['solved']} problems that the full cache solves, per sparsity.",
            )


def _cell(shares: Figures) -> Cell:
    failing = sum(shares[mode]["mean"] for mode in MODES)
    return Cell(f"{failing:.3f}", "", "\n".join(f"{mode} {estimate(shares[mode])}" for mode in MODES))
