"""Training ablations (RLKV, figure 8): variants of the first method, each compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.heads.agreement import agreement
from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.study.base import Analysis, Study, file_name
from rlkv.evaluation.study.comparison import compare
from rlkv.evaluation.study.costs import COST_NOTE, cost_metrics, cost_text
from rlkv.evaluation.study.gates import AGREEMENT_COLUMNS, AGREEMENT_NOTE, agreement_cells
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.plots import plot_bars, point
from rlkv.evaluation.study.rankings import Ranking
from rlkv.evaluation.study.text import (
    INTERVAL_NOTE,
    SAME,
    accuracy_cell,
    difference_cell,
    levels,
    p_text,
    seeds_of_sign,
    verdict,
)

AGREEMENT_NAMES = ("spearman_single_head", "spearman_elimination", "overlap_at_0.5")


class Ablations(Analysis):
    """Accuracy of each variant, with the paired difference to the first method; its gates, and what it cost."""

    name: ClassVar[str] = "ablations"
    title: ClassVar[str] = "Training ablations"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions([study.first, *study.ablations], study.config.ascending("ablate_at"))

    def settings(self, study: Study) -> Metrics:
        return {
            "first": study.first.name,
            "sparsities": list(study.config.ascending("ablate_at")),
            "gates": {variant.name: _gates(variant, study) for variant in [study.first, *study.ablations]},
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
            others = [(name, rows[i]) for name, rows in found.items() if name != first]
            parts = "; ".join(f"{name} {_against(row, name, first)}" for name, row in others)
            base = found[first][i]["first"]
            measured = f"{first} ({base['mean']:.3f})"
            lines.append(f"{task} at {sparsity:g}, n = {base['n']}, variants of {measured}: {parts}.")
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
        plot = folder / file_name("ablations", task)
        plot_bars(plot, f"{task}: training ablations, 95% intervals", list(found), bars)
        page.picture(plot, f"{task}: greedy accuracy on {n} problems, of each variant.")

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        rows = []
        for name, of in metrics["gates"].items():
            means = [f"{seed['mean']:.3f}" for seed in of["seeds"]]
            shown = means[0] if len(means) == 1 else f"{min(means)} to {max(means)}"
            cost = cost_text(of["cost"]) or "unknown"
            rows.append([name, str(of["cost"]["seeds"]), shown, *agreement_cells(of["agreement"]), cost])
        page.table(
            ["variant", "seeds", "mean gate", *AGREEMENT_COLUMNS, "seconds to find"],
            rows,
            f"Mean gate (its range over seeds), mean agreement of the seeds with the oracle. {AGREEMENT_NOTE} "
            f"{COST_NOTE}",
        )


def _gates(ranking: Ranking, study: Study) -> Metrics:
    truth = study.truth
    seeds = [
        {"mean": gates.alpha.mean().item(), "agreement": None if truth is None else agreement(gates, truth)}
        for gates in ranking.gates
    ]
    return {"seeds": seeds, "agreement": _mean_agreement(seeds), "cost": cost_metrics(ranking)}


def _mean_agreement(seeds: list[Metrics]) -> Metrics | None:
    found = [seed["agreement"] for seed in seeds]
    if None in found:
        return None
    columns = {name: [each[name] for each in found if each[name] is not None] for name in AGREEMENT_NAMES}
    return {name: sum(values) / len(values) if values else None for name, values in columns.items()}


def _against(compared: Metrics, name: str, first: str) -> str:
    text = verdict(compared["difference"], compared["same_heads"]) + seeds_of_sign(compared, name, first)
    return f"{compared['first']['mean']:.3f} ({text})"


def _difference(compared: Metrics) -> Cell:
    last = "same heads" if compared["same_heads"] else p_text(compared["difference"]["p_value"])
    return difference_cell(compared["difference"], last)
