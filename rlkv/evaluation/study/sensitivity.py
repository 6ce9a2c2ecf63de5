"""Head sensitivity (RLKV, figure 7): compress only the heads that a ranking holds to be needed most.

The faster accuracy falls, the better the ranking knows which heads reasoning needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from rlkv.evaluation.report.html_page import Cell, Page, sign_of
from rlkv.evaluation.stats.metrics import mean_with_interval, paired_difference
from rlkv.evaluation.study.base import Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.bench import Cell as BenchCell
from rlkv.evaluation.study.outcomes import Floats, Outcome, accuracy_of, mean_scores
from rlkv.evaluation.study.pictures import Panel, curves_picture, point
from rlkv.evaluation.study.rankings import Ranking
from rlkv.evaluation.study.text import INTERVAL_NOTE, LEGEND, accuracy_cell, difference_cell, interval, p_text, plural

FEW_HEADS = 64  # up to which single heads are counted, above it shares of all heads
NUMBERS = (1, 2, 3, 4, 6, 8)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)


def default_top_heads(total: int) -> tuple[int, ...]:
    """How many of ``total`` heads to compress from the top: 1 to 8 of a small model, 1% to 20% of a large one."""
    if total <= FEW_HEADS:
        return tuple(n for n in NUMBERS if n < total)
    return tuple(sorted({max(1, round(share * total)) for share in SHARES}))


class Sensitivity(Analysis):
    """Accuracy when only the most needed heads of each ranking are compressible."""

    name: ClassVar[str] = "sensitivity"
    title: ClassVar[str] = "Head sensitivity"

    def cells(self, study: Study) -> Wanted:
        for ranking in study.rankings:
            for task in study.tasks:
                for heads in study.options.top_heads:
                    for allocation in ranking.without_top(heads):
                        yield f"{ranking.name}, top {heads} gone", BenchCell(task, allocation)

    def figures(self, study: Study) -> Figures:
        tasks = {}
        for task in study.tasks:
            full = study.full(task)
            methods = {}
            first_scores = _mean_over_counts(study, task, study.first)
            for ranking in study.rankings:
                scores = _mean_over_counts(study, task, ranking)
                test = paired_difference(first_scores, scores)
                methods[ranking.name] = {
                    "by_heads": [
                        accuracy_of(_runs(study, task, ranking, heads), full).to_dict()
                        for heads in study.options.top_heads
                    ],
                    "mean_over_heads": _estimate(scores),
                    "versus_first": {
                        name: getattr(test, name) for name in ("difference", "low", "high", "p_value", "n")
                    },
                }
            tasks[task] = {"full": accuracy_of([full]).to_dict(), "methods": methods}
        shape = study.first.shape
        return {
            "first": study.first.name,
            "top_heads": list(study.options.top_heads),
            "total_heads": shape[0] * shape[1],
            "runs": {ranking.name: ranking.run for ranking in study.rankings},
            "tasks": tasks,
        }

    def findings(self, figures: Figures) -> list[str]:
        lines = []
        counts = ", ".join(map(str, figures["top_heads"]))
        for task, found in figures["tasks"].items():
            means = ", ".join(
                f"{name} {of['mean_over_heads']['mean']:.3f}"
                for name, of in sorted(found["methods"].items(), key=lambda item: item[1]["mean_over_heads"]["mean"])
            )
            lines.append(
                f"{task}: mean accuracy when only the most needed {counts} of {figures['total_heads']} heads are "
                f"compressed (lower: the ranking knows better which heads are needed; tests below): {means}."
            )
        return lines

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        first, counts, total = figures["first"], figures["top_heads"], figures["total_heads"]
        for task, found in figures["tasks"].items():
            rows: list[list[Cell | str]] = []
            for name, of in found["methods"].items():
                test, mean = of["versus_first"], of["mean_over_heads"]
                against: Cell | str = ""
                if name != first:
                    # a ranking whose accuracy falls less than the first one's is the worse one
                    sign = sign_of(-test["difference"], test["p_value"])
                    cell = difference_cell(test)
                    against = Cell(cell.text, sign, f"{cell.note}\n{p_text(test['p_value'])}")
                cells = [accuracy_cell(accuracy, figures["runs"][name]) for accuracy in of["by_heads"]]
                rows.append([name, *cells, Cell(f"{mean['mean']:.3f}", "", interval(mean)), against])
            page.table(
                ["heads", *(plural(n, "head") for n in counts), "mean", f"mean minus {first}'s"],
                rows,
                f"{task}: greedy accuracy on {found['full']['n']} problems when only so many of the {total} heads are "
                f"compressed, those that the ranking puts last. {INTERVAL_NOTE} {LEGEND} Last column: green where "
                f"accuracy falls faster than under {first}, red where it falls slower.",
            )
            picture = folder / f"sensitivity-{task.replace(':', '_')}.png"
            curves = {
                name: [point(n, accuracy) for n, accuracy in zip(counts, of["by_heads"], strict=True)]
                for name, of in found["methods"].items()
            }
            label = f"compressed heads of {total}, the most needed ones first"
            panel = Panel(
                f"{task}: the faster it falls, the better the ranking",
                label,
                "greedy accuracy",
                curves,
                reference=found["full"]["mean"],
                limits=(-0.03, 1.03),
            )
            curves_picture(picture, [panel])
            page.picture(picture, f"{task}: accuracy when only the most needed heads are compressed, 95% intervals.")


def _runs(study: Study, task: str, ranking: Ranking, heads: int) -> list[Outcome]:
    return [study.bench.outcome(BenchCell(task, allocation)) for allocation in ranking.without_top(heads)]


def _mean_over_counts(study: Study, task: str, ranking: Ranking) -> Floats:
    """Accuracy of each problem, mean over seeds and numbers of heads."""
    return np.mean([mean_scores(_runs(study, task, ranking, heads)) for heads in study.options.top_heads], axis=0)


def _estimate(scores: Floats) -> Figures:
    found = mean_with_interval(scores)
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
