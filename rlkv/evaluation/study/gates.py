"""Gate distributions (RLKV, figure 3): sorted gates, histograms and heat maps of several rankings side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from rlkv.evaluation.heads.agreement import agreement
from rlkv.evaluation.report.html_page import Page
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.measurements import ConditionRequests
from rlkv.evaluation.study.outcomes import Metrics
from rlkv.evaluation.study.plots import colours
from rlkv.evaluation.study.rankings import Ranking
from rlkv.evaluation.study.text import NOT_AVAILABLE
from rlkv.gates.plots import COLORS
from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, save_figure

COLUMNS = 4  # heat maps side by side
BETWEEN = (0.1, 0.9)  # gates in here are neither closed nor open
AGREEMENT_COLUMNS = ("oracle's full heads at 0.5", "correlation with elimination", "correlation with single heads")
AGREEMENT_NOTE = (
    "Oracle: the measured elimination; the share of its full heads at sparsity 0.5 that the gates keep too, and "
    "Spearman correlations of the gates with the order of elimination and with the accuracy that each head alone costs."
)


def seeds_metrics(ranking: Ranking, study: Study) -> list[Metrics]:
    """For each seed: mean, shares, the heads shared with the first method's first seed, agreement with the oracle."""
    levels, rows = study.config.ascending("compare_at"), []
    for seed, gates in enumerate(ranking.gates):
        alpha = gates.alpha
        shared = [ranking.allocations(s)[seed].overlap(study.first.allocations(s)[0]) for s in levels]
        rows.append(
            {
                "file": Path(ranking.files[seed]).name,
                "alpha": [[round(value, 6) for value in row] for row in alpha.tolist()],
                "mean": alpha.mean().item(),
                "at_0": int((alpha == 0).sum()),
                "at_1": int((alpha == 1).sum()),
                "between": int(((alpha > BETWEEN[0]) & (alpha < BETWEEN[1])).sum()),
                "heads": alpha.numel(),
                "overlap_with_first": [
                    {"sparsity": s, "share": share} for s, share in zip(levels, shared, strict=True)
                ],
                "agreement": None if study.truth is None else agreement(gates, study.truth),
            }
        )
    return rows


class GateDistribution(Analysis):
    """The gates of every method and seed; nothing is decoded for them."""

    name: ClassVar[str] = "gates"
    title: ClassVar[str] = "Gates"

    def conditions(self, study: Study) -> ConditionRequests:
        return ()

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {}

    def metrics(self, study: Study) -> Metrics:
        methods = {ranking.name: seeds_metrics(ranking, study) for ranking in study.rankings if ranking.gates}
        return {"first": study.first.name, "methods": methods, "tasks": {}}

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        rows = []
        seeds = [(name, i, seed) for name, found in metrics["methods"].items() for i, seed in enumerate(found)]
        for name, i, seed in seeds:
            label = name if len(metrics["methods"][name]) == 1 else f"{name}, seed {i}"
            shared = [f"{overlap['share']:.0%}" for overlap in seed["overlap_with_first"]]
            numbers = [str(seed["at_0"]), str(seed["between"]), str(seed["at_1"])]
            rows.append([label, f"{seed['mean']:.3f}", *numbers, *shared, *agreement_cells(seed["agreement"])])
        overlaps = [f"full heads shared at {o['sparsity']:g}" for o in seeds[0][2]["overlap_with_first"]]
        page.table(
            ["gates", "mean", "at 0", f"{BETWEEN[0]:g} to {BETWEEN[1]:g}", "at 1", *overlaps, *AGREEMENT_COLUMNS],
            rows,
            f"The gates of {seeds[0][2]['heads']} KV heads: mean, and numbers of heads at exactly 0, in between, and "
            f"at exactly 1. Shared: share of the full heads that {metrics['first']} (first seed) keeps full too. "
            f"{AGREEMENT_NOTE}",
        )
        plot_distributions(metrics["methods"], folder / "gates.png")
        page.picture(
            folder / "gates.png",
            "Gates in ascending order and their histogram: first seed of each method (others thin).",
        )
        alphas = {name: found[0]["alpha"] for name, found in metrics["methods"].items()}
        plot_heat_maps(alphas, folder / "heat-maps.png")
        page.picture(folder / "heat-maps.png", "Gates by layer and KV head: first seed of each method.")


def agreement_cells(found: Metrics | None) -> list[str]:
    """The agreement with the oracle in the order of :data:`AGREEMENT_COLUMNS`."""
    if found is None:
        return [NOT_AVAILABLE] * len(AGREEMENT_COLUMNS)
    values = (found["spearman_elimination"], found["spearman_single_head"])
    return [f"{found['overlap_at_0.5']:.0%}", *(NOT_AVAILABLE if v is None else f"{v:.2f}" for v in values)]


def plot_distributions(methods: dict[str, list[Metrics]], path: Path) -> None:
    """Sorted gates of every seed (the first one thick), and histograms of the first seeds as outlines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    ordered, histogram = figure.subplots(1, 2)
    chosen = colours(list(methods))
    for name, seeds in methods.items():
        for i, seed in enumerate(seeds):
            values = sorted(value for row in seed["alpha"] for value in row)
            style: dict[str, Any] = {"linewidth": 2.0, "label": name} if i == 0 else {"linewidth": 0.6, "alpha": 0.7}
            ordered.plot(range(1, len(values) + 1), values, color=chosen[name], **style)
            if i == 0:
                bins = [b / 10 for b in range(11)]
                histogram.hist(values, bins=bins, histtype="step", color=chosen[name], linewidth=1.6)
    ordered.set(xlabel="KV heads, by gate", ylabel="gate", ylim=(-0.02, 1.02))
    histogram.set(xlabel="gate", ylabel="KV heads")
    for axes, title in ((ordered, "Gates in ascending order"), (histogram, "Histogram (first seeds)")):
        axes.set_title(title, fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3)
    figure.legend(*ordered.get_legend_handles_labels(), loc="outside right upper", fontsize=TEXT_SIZE)
    save_figure(figure, path)


def plot_heat_maps(alphas: dict[str, list[list[float]]], path: Path) -> None:
    """A heat map per method: layers across, KV heads down, colours from 0 to 1."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(alphas))
    lines = -(-len(alphas) // columns)
    layers, heads = len(next(iter(alphas.values()))), len(next(iter(alphas.values()))[0])
    width, height = max(2.2, 0.16 * layers + 0.8), max(1.8, 0.16 * heads + 0.9)
    figure = Figure(figsize=(columns * width + 1.2, lines * height), layout="constrained")
    grid = [axes for row in figure.subplots(lines, columns, squeeze=False) for axes in row]
    image: Any = None
    for axes, (name, alpha) in zip(grid, alphas.items(), strict=False):
        turned = [list(column) for column in zip(*alpha, strict=True)]
        image = axes.imshow(turned, vmin=0, vmax=1, cmap=COLORS, aspect="auto", interpolation="nearest")
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.set_xlabel("layer", fontsize=TEXT_SIZE)
        axes.set_ylabel("KV head", fontsize=TEXT_SIZE)
        axes.tick_params(labelsize=TEXT_SIZE)
    for axes in grid[len(alphas) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, label="gate", ticks=[0, 0.5, 1], shrink=0.8)
    save_figure(figure, path)
