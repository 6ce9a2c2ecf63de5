"""The first method against each other one and its training variants, in pairs over the problems, and their costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import SPARSITY, Panel, curve
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, compare
from rlkv.evaluation.study.rankings import Ranking
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
from rlkv.utils.jsonl import read_log

# fields of the training log and of the re-ranking's summary, the better unit first: CPU time does not depend on what
# else the machine does
COST_FIELDS = {
    "training": (("CPU", "time/step_cpu_s"), ("wall", "time/step_s")),
    "re-ranking": (("CPU", "cpu_seconds"),),
}
COST_NOTE = (
    "Seconds of all optimizer steps (from the log next to the gates file), mean over seeds; CPU: processor time of the "
    "process without the verifier's helpers, wall: time on the clock, which other work on the machine makes longer. "
    "What came before (a curriculum, which DuoAttention does not need, gates to start from) is not included."
)


class Comparison(Analysis):
    """Paired differences at chosen sparsities."""

    name = "comparison"
    title = "Paired comparison"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions(study.rankings, study.config.levels("compare_at"))

    def settings(self, study: Study) -> Metrics:
        costs = {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files}
        return {"first": study.first.name, "costs": costs}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        rows = []
        for sparsity in study.config.ascending("compare_at"):
            first = study.runs(task, study.first, sparsity)
            for other in study.rankings[1:]:
                found = compare(first, study.runs(task, other, sparsity))
                rows.append({"sparsity": sparsity, "other": other.name, **found})
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
                accuracy_cell(row["second"]),
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
            f"and a two-sided sign-flip test. ▲: {first} is better, ▼: worse (p < 0.05), no mark: {SAME}. "
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
        return study.conditions(study.variants, study.config.levels("ablate_at"))

    def settings(self, study: Study) -> Metrics:
        return {
            "first": study.first.name,
            "sparsities": list(study.config.ascending("ablate_at")),
            "costs": {variant.name: cost_metrics(variant) for variant in study.variants},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        levels = study.config.ascending("ablate_at")
        first = [study.runs(task, study.first, sparsity) for sparsity in levels]
        return {
            of.name: [compare(study.runs(task, of, s), base) for s, base in zip(levels, first, strict=True)]
            for of in study.variants
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
                    difference_cell(of["difference"], last) if name != first else "",
                ]
        n = found[first][0]["first"]["n"]
        page.table(
            ["variant", *(text for level in levels(sparsities) for text in (f"{level}: accuracy", f"minus {first}"))],
            rows,
            f"{task}: greedy accuracy on {n} problems and the paired difference to {first} with its 95% interval. "
            f"{INTERVAL_NOTE} ▲: better than {first}, ▼: worse (paired permutation test, p < 0.05, not "
            f"corrected), no mark: {SAME}.",
        )
        curves = {name: curve(sparsities, [of["first"] for of in compared]) for name, compared in found.items()}
        panel = Panel(f"{task}: training ablations, 95% intervals", SPARSITY, curves)
        self.add_plot(page, folder, task, f"{task}: greedy accuracy on {n} problems, of each variant.", panel)

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        write_costs(page, metrics["costs"])


def cost_metrics(ranking: Ranking) -> Metrics:
    """Known seconds of each step and unit, mean and range over the seeds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file, gates in zip(ranking.files, ranking.gates, strict=True):
        log = Path(file).parent / "log.jsonl"
        training = read_log(log) if log.is_file() else []
        records = {"training": training, "re-ranking": [gates.training.get("reranked") or {}]}
        for step, fields in COST_FIELDS.items():
            for unit, field in fields:
                seconds: list[Any] = [record.get(field) for record in records[step]]
                if seconds and None not in seconds:
                    found[step, unit].append(float(sum(seconds)))
                    break
    steps = [
        {"step": step, "unit": unit, "mean": fmean(v), "low": min(v), "high": max(v), "n": len(v)}
        for (step, unit), v in found.items()
    ]
    return {"seeds": len(ranking.orders), "steps": steps}


def cost_text(metrics: Metrics) -> str:
    """One phrase, such as ``370 s CPU (350 to 390, 3 seeds) + 55 s wall re-ranking``; empty if nothing is known."""
    parts = []
    for step in metrics["steps"]:
        several = f" ({step['low']:.0f} to {step['high']:.0f}, {step['n']} seeds)" if step["n"] > 1 else ""
        what = "" if step["step"] == "training" else f" {step['step']}"
        parts.append(f"{step['mean']:.0f} s {step['unit']}{what}{several}")
    return " + ".join(parts)


def write_costs(page: Page, costs: dict[str, Metrics]) -> None:
    """Add the costs of each method as a table."""
    page.heading("What finding the heads took", level=3)
    rows = [[name, str(of["seeds"]), cost_text(of) or "unknown"] for name, of in costs.items()]
    page.table(["method", "seeds", "seconds"], rows, COST_NOTE)
