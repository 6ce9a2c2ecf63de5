"""Training ablations (RLKV, figure 8): variants of the first method, each compared with it."""

from __future__ import annotations

from pathlib import Path

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import plot_bars, point
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.costs import cost_metrics, write_costs
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, compare
from rlkv.evaluation.study.text import INTERVAL_NOTE, SAME, accuracy_cell, against, difference_cell, levels, p_text


class Ablations(Analysis):
    """Accuracy of each variant, with the paired difference to the first method, and what it cost."""

    name = "ablations"
    title = "Training ablations"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions([study.first, *study.ablations], study.config.ascending("ablate_at"))

    def settings(self, study: Study) -> Metrics:
        return {
            "first": study.first.name,
            "sparsities": list(study.config.ascending("ablate_at")),
            "costs": {variant.name: cost_metrics(variant) for variant in [study.first, *study.ablations]},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {
            # the variant minus the first method
            variant.name: [
                compare(study.runs(task, variant, s), study.runs(task, study.first, s))
                for s in study.config.ascending("ablate_at")
            ]
            for variant in [study.first, *study.ablations]
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines, first = [], metrics["first"]
        for i, sparsity in enumerate(metrics["sparsities"]):
            variants = [f"{name} {against(rows[i], 'first', name, first)}" for name, rows in found.items()][1:]
            base = found[first][i]["first"]
            measured = f"n = {base['n']}, variants of {first} ({base['mean']:.3f})"
            lines.append(f"{task} at {sparsity:g}, {measured}: {'; '.join(variants)}.")
        return lines

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        first, titles = metrics["first"], levels(metrics["sparsities"])
        rows: list[list[Cell | str]] = []
        for name, compared in found.items():
            pairs = [(accuracy_cell(of["first"]), "" if name == first else _difference(of)) for of in compared]
            rows.append([name, *(cell for pair in pairs for cell in pair)])
        columns = [text for title in titles for text in (f"{title}: accuracy", f"minus {first}")]
        n = found[first][0]["first"]["n"]
        page.table(
            ["variant", *columns],
            rows,
            f"{task}: greedy accuracy on {n} problems and the paired difference to {first} with its 95% interval. "
            f"{INTERVAL_NOTE} Green: better than {first}, red: worse (paired permutation test, p < 0.05, not "
            f"corrected), grey: {SAME}.",
        )
        bars = {
            title: [point(i, compared[at]["first"]) for i, compared in enumerate(found.values())]
            for at, title in enumerate(titles)
        }
        heading = f"{task}: training ablations, 95% intervals"
        plot = plot_bars(self.plot_file(folder, task), heading, list(found), bars)
        page.picture(plot, f"{task}: greedy accuracy on {n} problems, of each variant.")

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        write_costs(page, metrics["costs"])


def _difference(compared: Metrics) -> Cell:
    last = "same heads" if compared["same_heads"] else p_text(compared["difference"]["p_value"])
    return difference_cell(compared["difference"], last)
