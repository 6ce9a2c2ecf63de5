"""Training ablations (RLKV, figure 8): variants of the first method, each beside it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.heads.agreement import agreement
from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.study.base import Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.comparison import COST_NOTE, compare
from rlkv.evaluation.study.costs import cost_figures, cost_text
from rlkv.evaluation.study.gates import AGREEMENT_COLUMNS, AGREEMENT_NOTE, agreement_cells
from rlkv.evaluation.study.pictures import bars_picture, point
from rlkv.evaluation.study.rankings import Ranking
from rlkv.evaluation.study.text import (
    INTERVAL_NOTE,
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

    def cells(self, study: Study) -> Wanted:
        return study.cells([study.first, *study.ablations], study.options.ablate_at)

    def figures(self, study: Study) -> Figures:
        variants = [study.first, *study.ablations]
        tasks = {}
        for task in study.tasks:
            rows = {}
            for variant in variants:
                rows[variant.name] = [
                    # the variant minus the first method
                    compare(study.runs(task, variant, s), study.runs(task, study.first, s))
                    for s in study.options.ablate_at
                ]
            tasks[task] = rows
        return {
            "first": study.first.name,
            "sparsities": list(study.options.ablate_at),
            "gates": {variant.name: _gates(variant, study) for variant in variants},
            "tasks": tasks,
        }

    def findings(self, figures: Figures) -> list[str]:
        lines = []
        for task, rows in figures["tasks"].items():
            for i, sparsity in enumerate(figures["sparsities"]):
                parts = [
                    f"{name} {_against(found[i], name, figures['first'])}"
                    for name, found in rows.items()
                    if name != figures["first"]
                ]
                base = rows[figures["first"]][i]["first"]
                lines.append(
                    f"{task} at {sparsity:g}, n = {base['n']}, variants of {figures['first']} ({base['mean']:.3f}): "
                    f"{'; '.join(parts)}."
                )
        return lines

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        first, titles = figures["first"], levels(figures["sparsities"])
        for task, found in figures["tasks"].items():
            rows: list[list[Cell | str]] = []
            for name, compared in found.items():
                cells: list[Cell | str] = []
                for of in compared:
                    cells.append(accuracy_cell(of["first"]))
                    cells.append("" if name == first else _difference_cell(of))
                rows.append([name, *cells])
            columns = [text for title in titles for text in (f"{title}: accuracy", f"minus {first}")]
            n = next(iter(found.values()))[0]["first"]["n"]
            page.table(
                ["variant", *columns],
                rows,
                f"{task}: greedy accuracy on {n} problems and the paired difference to {first} with its 95% interval. "
                f"{INTERVAL_NOTE} Green: better than {first}, red: worse (paired permutation test, p < 0.05, not "
                "corrected), grey: not told apart.",
            )
            bars = {
                f"s = {sparsity:g}": [point(i, compared[at]["first"]) for i, compared in enumerate(found.values())]
                for at, sparsity in enumerate(figures["sparsities"])
            }
            picture = folder / f"ablations-{task.replace(':', '_')}.png"
            bars_picture(picture, f"{task}: training ablations, 95% intervals", "greedy accuracy", list(found), bars)
            page.picture(picture, f"{task}: greedy accuracy on {n} problems, of each variant.")
        page.table(
            ["variant", "seeds", "mean gate", *AGREEMENT_COLUMNS, "seconds to find"],
            [
                [
                    name,
                    str(of["cost"]["seeds"]),
                    _several([seed["mean"] for seed in of["seeds"]], "{:.3f}"),
                    *agreement_cells(of["agreement"]),
                    cost_text(of["cost"]) or "not known",
                ]
                for name, of in figures["gates"].items()
            ],
            f"Mean gate (and its range over seeds), mean agreement of the seeds with the oracle. {AGREEMENT_NOTE} "
            f"{COST_NOTE}",
        )


def _gates(ranking: Ranking, study: Study) -> Figures:
    truth = study.options.truth
    seeds = [
        {"mean": gates.alpha.mean().item(), "agreement": None if truth is None else agreement(gates, truth)}
        for gates in ranking.gates
    ]
    return {"seeds": seeds, "agreement": _mean_agreement(seeds), "cost": cost_figures(ranking)}


def _mean_agreement(seeds: list[Figures]) -> Figures | None:
    found = [seed["agreement"] for seed in seeds]
    if None in found:
        return None
    means: Figures = {}
    for name in AGREEMENT_NAMES:
        values = [each[name] for each in found if each[name] is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def _several(values: list[float], form: str) -> str:
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def _against(compared: Figures, name: str, first: str) -> str:
    text = verdict(compared["difference"], compared["same_heads"]) + seeds_of_sign(compared, name, first)
    return f"{compared['first']['mean']:.3f} ({text})"


def _difference_cell(compared: Figures) -> Cell:
    cell = difference_cell(compared["difference"])
    last = "same heads" if compared["same_heads"] else p_text(compared["difference"]["p_value"])
    return Cell(cell.text, cell.sign, f"{cell.note}\n{last}")
