"""The first method against each other one, in pairs over the problems, and what finding the heads took."""

from __future__ import annotations

from pathlib import Path

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.costs import cost_metrics, cost_text, write_costs
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, compare
from rlkv.evaluation.study.text import SAME, accuracy_cell, against, difference_cell, p_number


class Comparison(Analysis):
    """Paired differences at chosen sparsities."""

    name = "comparison"
    title = "Paired comparison"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions(study.rankings, study.config.ascending("compare_at"))

    def settings(self, study: Study) -> Metrics:
        costs = {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files}
        return {"first": study.first.name, "costs": costs}

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
            name, first = metrics["first"], rows[0]["first"]
            others = "; ".join(f"{row['other']} {against(row, 'second', name, row['other'])}" for row in rows)
            lines.append(f"{task} at {sparsity:g}, n = {first['n']}: {name} {first['mean']:.3f} against {others}.")
        return lines

    def findings(self, metrics: Metrics) -> list[str]:
        known = [f"{name} {text}" for name, cost in metrics["costs"].items() if (text := cost_text(cost))]
        return super().findings(metrics) + ([f"Finding the heads took: {'; '.join(known)}."] if known else [])

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
        write_costs(page, metrics["costs"])
