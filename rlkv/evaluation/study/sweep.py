"""Sparsity sweep (RLKV, figure 5 and tables 4 to 6): every ranking at every sparsity, and what was published."""

from __future__ import annotations

from pathlib import Path

from rlkv.evaluation.report.page import Page
from rlkv.evaluation.report.plots import SPARSITY, Panel, curve, plot_curves
from rlkv.evaluation.report.published import write_published
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.costs import cost_metrics, cost_text
from rlkv.evaluation.study.outcomes import Metrics, accuracy_of
from rlkv.evaluation.study.text import BYTES_NOTE, INTERVAL_NOTE, LEGEND, accuracy_cell, levels


class Sweep(Analysis):
    """Accuracy under every ranking at every sparsity."""

    name = "sweep"
    title = "Accuracy against sparsity"

    def settings(self, study: Study) -> Metrics:
        return {
            **super().settings(study),
            "published": study.published,
            "runs": {ranking.name: ranking.run for ranking in study.rankings},
            "costs": {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {"full": accuracy_of([study.full(task)]), "methods": study.sweep(task, accuracy_of)}

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        write_table(page, task, found, metrics)
        full, sparsities = found["full"], metrics["sparsities"]
        curves = {name: curve(sparsities, accuracies) for name, accuracies in found["methods"].items()}
        panel = Panel(f"{task}: accuracy, 95% intervals", SPARSITY, curves, reference=full["mean"])
        caption = f"{task}: greedy accuracy against sparsity on {full['n']} problems, 95% intervals."
        page.picture(plot_curves(self.plot_file(folder, task), panel), caption)
        if metrics["published"]:
            write_published(page, metrics["published"], task)


def write_table(page: Page, task: str, found: Metrics, metrics: Metrics) -> None:
    """Methods down, sparsities across, and what finding the heads took."""
    full, methods = accuracy_cell(found["full"]), found["methods"]
    rows = [
        [
            name,
            full,
            *(accuracy_cell(accuracy, metrics["runs"][name]) for accuracy in accuracies),
            cost_text(metrics["costs"].get(name, {"steps": []})),
        ]
        for name, accuracies in methods.items()
    ]
    held = [_share_range([of["kv_share"] for of in column]) for column in zip(*methods.values(), strict=True)]
    page.table(
        ["heads", "s = 0", *levels(metrics["sparsities"]), "seconds to find"],
        [*rows, ["KV held, of full", "100%", *held, ""]],
        f"{task}: greedy accuracy on {found['full']['n']} problems (1 = all right), in parentheses the difference to "
        f"the full cache (s = 0). {INTERVAL_NOTE} {LEGEND} {BYTES_NOTE}, from the lowest to the highest row.",
    )


def _share_range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"
