"""Pictures of a study: curves with intervals, grouped and stacked bars; a method has one colour in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkv.evaluation.run.cli_args import ORACLE
from rlkv.evaluation.study.rankings import RANDOM
from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 9.0, 4.2
FIXED_COLOURS = {ORACLE: "black", RANDOM: "0.55"}
MODE_COLOURS = {"repetitive": "#c44e52", "overlength": "#dd8452", "incorrect": "#8c8c8c"}

Point = tuple[float, float, float, float]  # x, mean, low, high


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per method; the oracle is black and random heads grey in every picture."""
    free = iter(range(1000))
    return {name: FIXED_COLOURS.get(name) or f"C{next(free) % 10}" for name in names}


@dataclass(frozen=True)
class Panel:
    """One pair of axes with a curve per name.

    Attributes:
        dashed: names whose curve is dashed (else the oracle and random heads are).
        reference: height of a dotted line, the full cache.
        limits: of the y axis.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: dict[str, list[Point]]
    dashed: frozenset[str] = frozenset((ORACLE, RANDOM))
    reference: float | None = None
    limits: tuple[float, float] | None = None
    colours: dict[str, str] = field(default_factory=dict)


def point(x: float, figures: dict[str, Any]) -> Point:
    """A point from figures with mean, low and high."""
    return x, figures["mean"], figures["low"], figures["high"]


def curves_picture(path: Path, panels: Sequence[Panel]) -> None:
    """Curves with intervals as error bars, side by side; points at one x are set apart a little."""
    figure = _figure(WIDTH if len(panels) == 1 else WIDTH + 3, HEIGHT)
    for axes, panel in zip(_axes(figure, len(panels)), panels, strict=True):
        chosen = panel.colours or colours(list(panel.curves))
        xs = sorted({x for points in panel.curves.values() for x, *_ in points})
        gap = min((b - a for a, b in pairwise(xs)), default=1.0)
        for place, (name, points) in enumerate(panel.curves.items()):
            if not points:
                continue
            shift = (place - (len(panel.curves) - 1) / 2) * gap * 0.05
            mean = [p[1] for p in points]
            axes.errorbar(
                [p[0] + shift for p in points],
                mean,
                yerr=_errors(points),
                fmt="o",
                linestyle="--" if name in panel.dashed else "-",
                markersize=4,
                capsize=2,
                linewidth=1.4,
                color=chosen[name],
                label=name,
            )
        if panel.reference is not None:
            axes.axhline(panel.reference, color="black", linewidth=0.8, linestyle=":", label="full cache")
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xticks=xs)
        axes.set_xticklabels([f"{x:g}" for x in xs])
        axes.set_title(panel.title, fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3)
        if panel.limits is not None:
            axes.set_ylim(*panel.limits)
    _legend(figure)
    save_figure(figure, path)


def stacked_picture(
    path: Path, panels: dict[str, dict[str, dict[str, float]]], ylabel: str, bar_colours: dict[str, str]
) -> None:
    """A panel per title, in it a bar per name, stacked from parts (0 to 1) in the order of ``bar_colours``."""
    figure = _figure(max(WIDTH, 2.2 * len(panels) + 1.5), HEIGHT + 0.6)
    axes_list = _axes(figure, len(panels), sharey=True)
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
    axes_list[0].set_ylabel(ylabel)
    _legend(figure)
    save_figure(figure, path)


def bars_picture(path: Path, title: str, ylabel: str, groups: Sequence[str], bars: dict[str, list[Point]]) -> None:
    """A group of bars per name in ``groups``, in it a bar with its interval per name in ``bars``."""
    figure = _figure(max(WIDTH, 0.3 * len(groups) * len(bars) + 3), HEIGHT)
    (axes,) = _axes(figure, 1)
    width = 0.8 / len(bars)
    for place, (name, points) in enumerate(bars.items()):
        xs = [group + (place - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        heights = [p[1] for p in points]
        axes.bar(
            xs, heights, width * 0.95, yerr=_errors(points), capsize=2, label=name, color=f"C{place % 10}", alpha=0.9
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.05)
    axes.set_title(title, fontsize=TITLE_SIZE)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _legend(figure)
    save_figure(figure, path)


def _errors(points: Sequence[Point]) -> list[list[float]]:
    """Lengths of the bars below and above the means; rounding must not make one negative."""
    return [[max(0.0, p[1] - p[2]) for p in points], [max(0.0, p[3] - p[1]) for p in points]]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: Figure, number: int, sharey: bool = False) -> list[Any]:
    return list(figure.subplots(1, number, squeeze=False, sharey=sharey)[0])


def _legend(figure: Figure) -> None:
    """One legend for all panels, beside them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(list(named.values()), list(named), loc="outside right upper", fontsize=TEXT_SIZE)
