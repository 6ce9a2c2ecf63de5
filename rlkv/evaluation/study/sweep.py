"""Sparsity sweep (RLKV, figure 5 and tables 4 to 6): every ranking at every sparsity, and what was published."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.report.eval_page import published_table
from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.study.base import Analysis, Study, file_name
from rlkv.evaluation.study.costs import cost_metrics, cost_text
from rlkv.evaluation.study.outcomes import Metrics, accuracy_of
from rlkv.evaluation.study.plots import SPARSITY, Panel, curve, plot_curves
from rlkv.evaluation.study.rankings import FULL_CACHE
from rlkv.evaluation.study.text import (
    BYTES_NOTE,
    INTERVAL_NOTE,
    LEGEND,
    accuracy_cell,
    interval,
    levels,
    seeds_text,
)


class Sweep(Analysis):
    """Accuracy under every ranking at every sparsity."""

    name: ClassVar[str] = "sweep"
    title: ClassVar[str] = "Accuracy against sparsity"

    def settings(self, study: Study) -> Metrics:
        return {
            **super().settings(study),
            "published": study.published,
            "runs": {ranking.name: ranking.run for ranking in study.rankings},
            "costs": {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        methods = {
            ranking.name: [accuracy_of(study.runs(task, ranking, s), full) for s in study.sparsities]
            for ranking in study.rankings
        }
        return {"full": accuracy_of([full]), "methods": methods}

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        full, sparsities = found["full"], metrics["sparsities"]
        rows: list[list[Cell | str]] = [[FULL_CACHE, *[accuracy_cell(full)] * len(sparsities)]]
        for name, accuracies in found["methods"].items():
            rows.append([name, *(accuracy_cell(accuracy, metrics["runs"][name]) for accuracy in accuracies)])
        page.table(
            ["heads", *levels(sparsities)],
            [*rows, ["KV held, of full", *_held(found, sparsities)]],
            f"{task}: greedy accuracy on {full['n']} problems (1 = all right), in parentheses the difference to the "
            f"full cache. {INTERVAL_NOTE} {LEGEND} {BYTES_NOTE}, from the lowest to the highest row.",
        )
        plot = folder / file_name("sweep", task)
        curves = {name: curve(sparsities, accuracies) for name, accuracies in found["methods"].items()}
        plot_curves(plot, Panel(f"{task}: accuracy, 95% intervals", SPARSITY, curves, reference=full["mean"]))
        page.picture(plot, f"{task}: greedy accuracy against sparsity on {full['n']} problems, 95% intervals.")
        if metrics["published"]:
            published_table(page, metrics["published"], task)


def summary_page(title: str, metrics: Metrics, hardware: str) -> Page:
    """The page of ``table.md``: methods down, sparsities across, nothing else."""
    page, sparsities = Page(title), metrics["sparsities"]
    for task, found in metrics["tasks"].items():
        rows: list[list[Cell | str]] = []
        for name, accuracies in found["methods"].items():
            cells = [_summary_cell(of, metrics["runs"][name]) for of in (found["full"], *accuracies)]
            rows.append([name, *cells, cost_text(metrics["costs"].get(name, {"steps": []}))])
        page.table(
            ["heads", "s = 0", *levels(sparsities), "seconds to find"],
            [*rows, ["KV held, of full", "100%", *_held(found, sparsities), ""]],
            f"{task}: greedy accuracy on {found['full']['n']} problems with 95% intervals over problems; of several "
            f"runs the mean, and their range. {BYTES_NOTE}, from the lowest to the highest row. {hardware}.",
        )
    return page


def _summary_cell(accuracy: Metrics, run: str) -> str:
    parts = (f"{accuracy['mean']:.3f} {interval(accuracy)}", seeds_text(accuracy, run))
    return "; ".join(part for part in parts if part)


def _held(found: Metrics, sparsities: list[float]) -> list[str]:
    columns = [[of[i]["kv_share"] for of in found["methods"].values()] for i in range(len(sparsities))]
    ranges = [(f"{min(shares):.0%}", f"{max(shares):.0%}") for shares in columns]
    return [low if low == high else f"{low} to {high}" for low, high in ranges]
