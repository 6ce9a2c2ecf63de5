"""Plots as PNG files: curves with intervals and stacked bars; a method looks the same in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL_CACHE, ORACLE, RANDOM = "full cache", "oracle (measured)", "random heads"  # in tables too
FIXED_STYLES = {ORACLE: {"color": "black", "linestyle": "--"}, RANDOM: {"color": "0.55", "linestyle": "--"}}
WIDTH, HEIGHT = 9.0, 4.2
SPARSITY = "sparsity (share of KV heads that are compressible)"
ACCURACY, ACCURACY_LIMITS = "greedy accuracy", (-0.03, 1.03)

Point = tuple[float, float, float, float]  # x, mean, low, high
Styles = Mapping[str, Mapping[str, Any]]  # options of matplotlib for each name


@dataclass(frozen=True)
class Panel:
    """One pair of axes with a curve per name.

    Attributes:
        styles: options of matplotlib by name; default: a colour per name.
        reference: height of a dotted line, the full cache.
        ticks: the x values are labelled one by one.
        log: both axes are logarithmic.
    """

    title: str
    xlabel: str
    curves: Mapping[str, Sequence[Point]]
    ylabel: str = ACCURACY
    styles: Styles = field(default_factory=dict)
    reference: float | None = None
    limits: tuple[float, float] | None = ACCURACY_LIMITS
    ticks: bool = True
    log: bool = False


def point(x: float, metrics: dict[str, Any]) -> Point:
    """A point from metrics with mean, low and high."""
    return x, metrics["mean"], metrics["low"], metrics["high"]


def curve(xs: Iterable[float], metrics: Iterable[dict[str, Any]]) -> list[Point]:
    """A point for each x."""
    return [point(x, of) for x, of in zip(xs, metrics, strict=True)]


def plot_curves(path: Path, *panels: Panel, title: str = "", sharey: bool = False) -> Path:
    """Curves with intervals as error bars, side by side; points at one x are set apart a little."""
    figure, axes_list = _figure(WIDTH if len(panels) == 1 else WIDTH + 3, HEIGHT, len(panels), sharey)
    free, names = count(), dict.fromkeys(name for panel in panels for name in panel.curves)
    styles = {name: FIXED_STYLES.get(name) or _style(next(free)) for name in names}  # one legend for all panels
    for axes, panel in zip(axes_list, panels, strict=True):
        xs = sorted({x for points in panel.curves.values() for x, *_ in points})
        even = panel.ticks and not panel.log
        gap = min((b - a for a, b in pairwise(xs)), default=1.0) if even else 0.0
        if panel.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for place, (name, points) in enumerate(panel.curves.items()):
            shift = (place - (len(panel.curves) - 1) / 2) * gap * 0.05
            style = {"marker": "o", "linestyle": "-", **styles[name], **panel.styles.get(name, {})}
            ys, errors = [p[1] for p in points], _errors(points)
            style |= {"markersize": 4, "capsize": 2, "linewidth": 1.4, "label": name}
            axes.errorbar([p[0] + shift for p in points], ys, yerr=errors, **style)
        if panel.reference is not None:
            axes.axhline(panel.reference, color="black", linewidth=0.8, linestyle=":", label=FULL_CACHE)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        if panel.ticks:
            axes.set_xticks(xs, [f"{x:g}" if x < 1000 else f"{x:,.0f}" for x in xs])
        if panel.limits is not None:
            axes.set_ylim(*panel.limits)
        axes.set_title(panel.title, fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3)
    if title:
        figure.suptitle(textwrap.fill(title, 100), fontsize=TITLE_SIZE)
    return _save(figure, path)


def plot_stacked(path: Path, panels: dict[str, dict[str, dict[str, float]]], bar_colours: dict[str, str]) -> Path:
    """A panel per title, in it a bar per name, stacked from shares of problems in the order of ``bar_colours``."""
    figure, axes_list = _figure(max(WIDTH, 2.2 * len(panels) + 1.5), HEIGHT + 0.6, len(panels), sharey=True)
    for axes, (title, bars) in zip(axes_list, panels.items(), strict=True):
        bottom = [0.0] * len(bars)
        for part, colour in bar_colours.items():
            heights = [parts[part] for parts in bars.values()]
            axes.bar(range(len(bars)), heights, bottom=bottom, color=colour, label=part, width=0.8)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(bars)), list(bars), rotation=90, fontsize=TEXT_SIZE)
        axes.set_title(title, fontsize=TITLE_SIZE)
        axes.set_ylim(0, 1.02)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    axes_list[0].set_ylabel("share of problems")
    return _save(figure, path)


def _style(number: int) -> dict[str, str]:
    """Ten colours, and another marker where they begin again."""
    return {"color": f"C{number % 10}", "marker": "os^D"[number // 10 % 4]}


def _errors(points: Sequence[Point]) -> list[list[float]] | None:
    """Lengths of the bars below and above the means, not negative by rounding; None where no point has an interval."""
    if all(low == high for _, _, low, high in points):
        return None
    return [[max(0.0, p[1] - p[2]) for p in points], [max(0.0, p[3] - p[1]) for p in points]]


def _figure(width: float, height: float, panels: int, sharey: bool) -> tuple[Figure, list[Any]]:
    """A figure and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])


def _save(figure: Figure, path: Path) -> Path:
    """With one legend for all panels, next to them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(list(named.values()), list(named), loc="outside right upper", fontsize=TEXT_SIZE)
    save_figure(figure, path)
    return path
