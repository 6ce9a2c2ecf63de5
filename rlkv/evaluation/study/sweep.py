"""Accuracy under every ranking (RLKV): by sparsity (figure 5, tables 4 to 6), and without its top heads (figure 7)."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import SPARSITY, Panel, curve
from rlkv.evaluation.report.published import write_published
from rlkv.evaluation.stats.metrics import mean_with_interval, paired_difference
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.comparison import cost_metrics, cost_text
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics, accuracy_of, mean_scores
from rlkv.evaluation.study.text import (
    BYTES_NOTE,
    INTERVAL_NOTE,
    LEGEND,
    accuracy_cell,
    difference_cell,
    interval,
    levels,
    p_text,
    plural,
)

FEW_HEADS = 64  # up to which single heads are counted, above it shares of all heads
NUMBERS = (1, 2, 3, 4, 6, 8)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)


class Sweep(Analysis):
    """Accuracy under every ranking at every sparsity."""

    name = "sweep"
    title = "Accuracy against sparsity"

    def settings(self, study: Study) -> Metrics:
        return {
            **super().settings(study),
            "published": study.published,
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
        self.add_plot(page, folder, task, caption, panel)
        if metrics["published"]:
            write_published(page, metrics["published"], task)


def write_table(page: Page, task: str, found: Metrics, metrics: Metrics) -> None:
    """Methods down, sparsities across, and what finding the heads took."""
    full, methods = accuracy_cell(found["full"]), found["methods"]
    rows = [
        [
            name,
            full,
            *map(accuracy_cell, accuracies),
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


def top_heads(values: tuple[float, ...], total: int) -> tuple[int, ...]:
    """How many of ``total`` heads to compress from the top: whole numbers, or shares of all heads if below 1.

    By default 1 to 8 heads of a small model, 1% to 20% of a large one.
    """
    found = set()
    for value in values or (NUMBERS if total <= FEW_HEADS else SHARES):
        if not 0 <= value <= total and values:
            raise ValueError(f"--top-heads {value:g} is outside 0 to {total}")
        if value == 0:
            raise ValueError("--top-heads: 0 heads are the full cache: give 1 or more, or a share above 0")
        if value >= 1 and value != int(value):
            raise ValueError(f"--top-heads: {value:g} is neither a whole number nor a share below 1")
        found.add(int(value) if value >= 1 else max(1, round(value * total)))
    return tuple(sorted(n for n in found if values or n < total))


class Sensitivity(Analysis):
    """Accuracy when only the most needed heads of each ranking are compressible."""

    name = "sensitivity"
    title = "Head sensitivity"

    def conditions(self, study: Study) -> ConditionRequests:
        for ranking, task, heads in product(study.rankings, study.tasks, study.top_heads):
            for condition in study.seeds(task, ranking, ranking.without_top(heads)):
                yield f"{ranking.name}, top {heads} gone", condition

    def settings(self, study: Study) -> Metrics:
        total = study.first.shape[0] * study.first.shape[1]
        return {**super().settings(study), "top_heads": list(study.top_heads), "total_heads": total}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        runs = {
            ranking.name: [
                study.measurements.outcomes(study.seeds(task, ranking, ranking.without_top(heads)))
                for heads in study.top_heads
            ]
            for ranking in study.rankings
        }
        # of each problem, mean over seeds and numbers of heads
        scores = {name: np.mean([mean_scores(of) for of in by_heads], axis=0) for name, by_heads in runs.items()}
        methods = {
            name: {
                "by_heads": [accuracy_of(of, full) for of in by_heads],
                "mean_over_heads": asdict(mean_with_interval(scores[name])),
                "versus_first": asdict(paired_difference(scores[study.first.name], scores[name])),
            }
            for name, by_heads in runs.items()
        }
        return {"full": accuracy_of([full]), "methods": methods}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        means = sorted((of["mean_over_heads"]["mean"], name) for name, of in found["methods"].items())
        counts = ", ".join(map(str, metrics["top_heads"]))
        return [
            f"{task}: mean accuracy when only the most needed {counts} of {metrics['total_heads']} heads are "
            "compressed (lower: the ranking knows better which heads are needed; tests below): "
            f"{', '.join(f'{name} {mean:.3f}' for mean, name in means)}."
        ]

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        first, counts, total = metrics["first"], metrics["top_heads"], metrics["total_heads"]
        rows: list[list[Cell | str]] = []
        for name, of in found["methods"].items():
            test, mean = of["versus_first"], of["mean_over_heads"]
            # a ranking whose accuracy falls less than the first one's is the worse one
            against = "" if name == first else difference_cell(test, p_text(test["p_value"]), sign=-1)
            cells = map(accuracy_cell, of["by_heads"])
            rows.append([name, *cells, Cell(f"{mean['mean']:.3f}", "", interval(mean)), against])
        page.table(
            ["heads", *(plural(n, "head") for n in counts), "mean", f"mean minus {first}'s"],
            rows,
            f"{task}: greedy accuracy on {found['full']['n']} problems when only so many of the {total} heads are "
            f"compressed, those that the ranking puts last. {INTERVAL_NOTE} {LEGEND} Last column: ▲ where accuracy "
            f"falls faster than under {first}, ▼ where it falls slower.",
        )
        curves = {name: curve(counts, of["by_heads"]) for name, of in found["methods"].items()}
        label = f"compressed heads of {total}, the most needed ones first"
        title = f"{task}: the faster it falls, the better the ranking"
        panel = Panel(title, label, curves, reference=found["full"]["mean"])
        caption = f"{task}: accuracy when only the most needed heads are compressed, 95% intervals."
        self.add_plot(page, folder, task, caption, panel)
