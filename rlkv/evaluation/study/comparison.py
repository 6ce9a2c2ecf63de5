"""The first method against each other one, in pairs over the problems, and what finding the heads took."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.stats.metrics import paired_difference
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.costs import COST_NOTE, cost_metrics, cost_text
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, Outcome, accuracy_of, mean_scores
from rlkv.evaluation.study.text import SAME, accuracy_cell, difference_cell, p_number, seeds_of_sign, verdict


class Comparison(Analysis):
    """Paired differences at chosen sparsities."""

    name: ClassVar[str] = "comparison"
    title: ClassVar[str] = "Paired comparison"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions(study.rankings, study.config.ascending("compare_at"))

    def settings(self, study: Study) -> Metrics:
        return {
            "first": study.first.name,
            "costs": {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        rows = []
        for sparsity in study.config.ascending("compare_at"):
            first = study.runs(task, study.first, sparsity)
            for other in study.rankings[1:]:
                found = compare(first, study.runs(task, other, sparsity))
                rows.append({"sparsity": sparsity, "other": other.name, "run": other.run, **found})
        return {"rows": rows}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines = []
        for sparsity in dict.fromkeys(row["sparsity"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["sparsity"] == sparsity]
            others = "; ".join(_against(row, metrics["first"]) for row in rows)
            first = rows[0]["first"]
            measured = f"{metrics['first']} {first['mean']:.3f}"
            lines.append(f"{task} at {sparsity:g}, n = {first['n']}: {measured} against {others}.")
        return lines

    def findings(self, metrics: Metrics) -> list[str]:
        known = [f"{name} {text}" for name, cost in metrics["costs"].items() if (text := cost_text(cost))]
        costs = [f"Finding the heads took: {'; '.join(known)}."] if known else []
        return super().findings(metrics) + costs

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        first = metrics["first"]
        rows: list[list[Cell | str]] = [
            [
                f"s = {row['sparsity']:g}: {row['other']}",
                accuracy_cell(row["first"]),
                accuracy_cell(row["second"], row["run"]),
                difference_cell(row["difference"]),
                p_number(row["difference"]["p_value"]),
                f"{row['difference']['changed']} of {row['difference']['n']}",
                "yes" if row["same_heads"] else "no",
            ]
            for row in found["rows"]
        ]
        page.table(
            ["against", first, "the other", f"{first} minus the other", "p", "problems that differ", "same heads"],
            rows,
            f"{task}: accuracy, mean over seeds; difference with its 95% interval (paired bootstrap over problems) "
            f"and a two-sided sign-flip test. Green: {first} is better, red: worse (p < 0.05), grey: {SAME}. "
            f"The table makes {len(rows)} tests, whose p values are not corrected for their number.",
        )

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        page.heading("What finding the heads took", level=3)
        costs = [[name, str(of["seeds"]), cost_text(of) or "unknown"] for name, of in metrics["costs"].items()]
        page.table(["method", "seeds", "seconds"], costs, COST_NOTE)


def _against(row: Metrics, first: str) -> str:
    seeds = seeds_of_sign(row, first, row["other"])
    return f"{row['other']} {row['second']['mean']:.3f} ({verdict(row['difference'], row['same_heads'])}{seeds})"


def compare(first: list[Outcome], second: list[Outcome]) -> Metrics:
    """Both accuracies and the paired difference, first minus second.

    ``per_seed`` has the difference of each set of heads to the other's mean over seeds, seeds with the same heads once.
    """
    means = [float(mean_scores(runs).mean()) for runs in (first, second)]
    distinct = [{run.key: float(run.correct.mean()) for run in runs}.values() for runs in (first, second)]
    test = paired_difference(mean_scores(second), mean_scores(first))
    return {
        "first": accuracy_of(first),
        "second": accuracy_of(second),
        "difference": {name: getattr(test, name) for name in ("difference", "low", "high", "p_value", "n", "changed")},
        "per_seed": {
            "first": [accuracy - means[1] for accuracy in distinct[0]],
            "second": [means[0] - accuracy for accuracy in distinct[1]],
        },
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": {run.key for run in first} == {run.key for run in second} and not test.changed,
    }
