"""Gate distributions (RLKV, figure 3): sorted gates, histograms and heat maps of several rankings."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlkv.evaluation.report.page import Page
from rlkv.evaluation.report.plots import Panel, plot_curves
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.rankings import Ranking, agreement
from rlkv.evaluation.study.text import NOT_AVAILABLE
from rlkv.gates.plots import COLORS
from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, save_figure

HEAT_MAPS = 4  # side by side
BETWEEN = (0.1, 0.9)  # gates in here are neither closed nor open


def seeds_metrics(ranking: Ranking, study: Study) -> list[Metrics]:
    """For each seed: mean, shares, the heads shared with the first method's first seed, agreement with the oracle."""
    levels, rows = study.config.ascending("compare_at"), []
    for seed, gates in enumerate(ranking.gates):
        alpha = gates.alpha
        shared = {s: ranking.allocations(s)[seed].overlap(study.first.allocations(s)[0]) for s in levels}
        rows.append(
            {
                "file": Path(ranking.files[seed]).name,
                "alpha": [[round(value, 6) for value in row] for row in alpha.tolist()],
                "mean": alpha.mean().item(),
                "at_0": int((alpha == 0).sum()),
                "at_1": int((alpha == 1).sum()),
                "between": int(((alpha > BETWEEN[0]) & (alpha < BETWEEN[1])).sum()),
                "heads": alpha.numel(),
                "overlap_with_first": [{"sparsity": s, "share": share} for s, share in shared.items()],
                "agreement": None if study.truth is None else agreement(gates, study.truth),
            }
        )
    return rows


class GateDistribution(Analysis):
    """The gates of every method, variant and seed; nothing is decoded for them."""

    name = "gates"
    title = "Gates"

    def conditions(self, study: Study) -> ConditionRequests:
        return ()

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {}

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        """Gates do not depend on a task."""

    def metrics(self, study: Study) -> Metrics:
        methods = {ranking.name: seeds_metrics(ranking, study) for ranking in study.rankings if ranking.gates}
        variants = {ranking.name: seeds_metrics(ranking, study) for ranking in study.ablations}
        return {"first": study.first.name, "methods": methods, "variants": variants, "tasks": {}}

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        rows = [
            _row(name if len(seeds) == 1 else f"{name}, seed {i}", seed)
            for name, seeds in [*metrics["methods"].items(), *metrics["variants"].items()]
            for i, seed in enumerate(seeds)
        ]
        first = metrics["methods"][metrics["first"]][0]
        overlaps = [f"full heads shared at {o['sparsity']:g}" for o in first["overlap_with_first"]]
        agreements = ["oracle's full heads at 0.5", "correlation with elimination", "correlation with single heads"]
        page.table(
            ["gates", "mean", "at 0", f"{BETWEEN[0]:g} to {BETWEEN[1]:g}", "at 1", *overlaps, *agreements],
            rows,
            f"The gates of {first['heads']} KV heads: mean, and numbers of heads at exactly 0, in between, and at "
            f"exactly 1. Shared: share of the full heads that {metrics['first']} (first seed) keeps full too. Oracle: "
            "the measured elimination; the share of its full heads at sparsity 0.5 that the gates keep too, and "
            "Spearman correlations of the gates with the order of elimination and with the accuracy that each head "
            "alone costs.",
        )
        first_alphas = {name: seeds[0]["alpha"] for name, seeds in metrics["methods"].items()}
        caption = "Gates in ascending order and their histogram: first seed of each method."
        page.picture(plot_distributions(first_alphas, folder / "gates.png"), caption)
        plot_heat_maps(first_alphas, folder / "heat-maps.png")
        page.picture(folder / "heat-maps.png", "Gates by layer and KV head: first seed of each method.")


def _row(label: str, seed: Metrics) -> list[str]:
    shared = [f"{overlap['share']:.0%}" for overlap in seed["overlap_with_first"]]
    agrees, shown = seed["agreement"], [NOT_AVAILABLE] * 3
    if agrees is not None:
        values = (agrees["spearman_elimination"], agrees["spearman_single_head"])
        shown = [f"{agrees['overlap_at_0.5']:.0%}", *(NOT_AVAILABLE if v is None else f"{v:.2f}" for v in values)]
    return [label, f"{seed['mean']:.3f}", *(str(seed[name]) for name in ("at_0", "between", "at_1")), *shared, *shown]


def plot_distributions(alphas: dict[str, list[list[float]]], path: Path) -> Path:
    """Sorted gates and a histogram in ten bins, a curve per method."""
    ordered, histogram = {}, {}
    for name, alpha in alphas.items():
        values = sorted(chain(*alpha))
        ordered[name] = [(rank, value, value, value) for rank, value in enumerate(values, start=1)]
        counts = np.histogram(values, bins=10, range=(0, 1))[0].tolist()
        histogram[name] = [((place + 0.5) / 10, n, n, n) for place, n in enumerate(counts)]
    lines = {name: {"marker": ""} for name in alphas}
    steps = {name: {"marker": "", "drawstyle": "steps-mid"} for name in alphas}
    return plot_curves(
        path,
        Panel("Gates in ascending order", "KV heads, by gate", ordered, "gate", lines, ticks=False),
        Panel("Histogram", "gate", histogram, "KV heads", steps, limits=None, ticks=False),
    )


def plot_heat_maps(alphas: dict[str, list[list[float]]], path: Path) -> None:
    """A heat map per method: layers across, KV heads down, colours from 0 to 1."""
    from matplotlib.figure import Figure

    columns = min(HEAT_MAPS, len(alphas))
    lines = -(-len(alphas) // columns)
    first = next(iter(alphas.values()))
    width, height = max(2.2, 0.16 * len(first) + 0.8), max(1.8, 0.16 * len(first[0]) + 0.9)
    figure = Figure(figsize=(columns * width + 1.2, lines * height), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    image: Any = None
    for axes, (name, alpha) in zip(grid, alphas.items(), strict=False):
        by_head = list(zip(*alpha, strict=True))
        image = axes.imshow(by_head, vmin=0, vmax=1, cmap=COLORS, aspect="auto", interpolation="nearest")
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.set_xlabel("layer", fontsize=TEXT_SIZE)
        axes.set_ylabel("KV head", fontsize=TEXT_SIZE)
        axes.tick_params(labelsize=TEXT_SIZE)
    for axes in grid[len(alphas) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, label="gate", ticks=[0, 0.5, 1], shrink=0.8)
    save_figure(figure, path)
