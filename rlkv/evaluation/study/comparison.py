"""The first method against each other one and its training variants, in pairs over the problems, and their costs."""

from __future__ import annotations

from pathlib import Path

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import SPARSITY, Panel, curve, plot_curves
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.costs import cost_metrics, cost_text, write_costs
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, compare
from rlkv.evaluation.study.text import (
    INTERVAL_NOTE,
    SAME,
    accuracy_cell,
    against,
    difference_cell,
    levels,
    p_number,
    p_text,
)


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


class Ablations(Analysis):
    """Training ablations (RLKV, figure 8): each variant minus the first method, and what it cost."""

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
        first, sparsities = metrics["first"], metrics["sparsities"]
        rows: list[list[Cell | str]] = []
        for name, compared in found.items():
            rows.append([name])
            for of in compared:
                last = "same heads" if of["same_heads"] else p_text(of["difference"]["p_value"])
                rows[-1] += [
                    accuracy_cell(of["first"]),
                    "" if name == first else difference_cell(of["difference"], last),
                ]
        n = found[first][0]["first"]["n"]
        page.table(
            ["variant", *(text for level in levels(sparsities) for text in (f"{level}: accuracy", f"minus {first}"))],
            rows,
            f"{task}: greedy accuracy on {n} problems and the paired difference to {first} with its 95% interval. "
            f"{INTERVAL_NOTE} Green: better than {first}, red: worse (paired permutation test, p < 0.05, not "
            f"corrected), grey: {SAME}.",
        )
        curves = {name: curve(sparsities, [of["first"] for of in compared]) for name, compared in found.items()}
        panel = Panel(f"{task}: training ablations, 95% intervals", SPARSITY, curves)
        page.picture(
            plot_curves(self.plot_file(folder, task), panel),
            f"{task}: greedy accuracy on {n} problems, of each variant.",
        )

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        write_costs(page, metrics["costs"])
