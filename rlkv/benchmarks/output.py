"""What every benchmark writes: NAME.json, NAME.md and NAME.png."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlkv.utils.atomic import atomic_path
from rlkv.utils.figures import TITLE_SIZE, save_figure
from rlkv.utils.provenance import provenance


@dataclass(frozen=True)
class Line:
    """One line of a panel: ``y`` at each ``x``, with bars from ``low`` to ``high`` if they are given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Mapping[str, str] = field(default_factory=dict)  # of matplotlib


@dataclass(frozen=True)
class Plot:
    """Panels side by side, with one y axis if ``shared``; ``log``: both axes are logarithmic."""

    panels: Mapping[str, Sequence[Line]]
    xlabel: str
    ylabel: str
    log: bool = False
    shared: bool = False
    base: float | None = None  # a horizontal line


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table of ``rows``; ``columns``: the format of a cell by the column's head; None becomes empty."""

    def cell(form: str, row: Mapping[str, Any]) -> str:
        try:
            return form.format(**row)
        except TypeError:
            return ""

    lines = [[cell(form, row) for form in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *lines))


def write_result(
    folder: Path, name: str, title: str, config: Any, results: list[dict[str, Any]], page: str, plot: Plot, **facts: Any
) -> None:
    """Write a benchmark's files and print its page.

    Args:
        config: the dataclass with all options.
        facts: what else the JSON file carries; ``versions`` are added to the installed ones.
    """
    found = provenance()
    found["versions"] |= facts.pop("versions", {})
    content = {"config": asdict(config), **facts, **found, "results": results}
    with atomic_path(folder / f"{name}.json") as path:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    with atomic_path(folder / f"{name}.md") as path:
        path.write_text(f"{title}; torch {found['versions']['torch']}\n\n{page}\n")
    _draw(plot, title, folder / f"{name}.png")
    print(f"{title}\n\n{page}\n\nwritten to {folder}")


def _draw(plot: Plot, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(plot.panels), 3.8), layout="constrained")
    every = figure.subplots(1, len(plot.panels), squeeze=False, sharey=plot.shared)[0]
    for axes, (name, lines) in zip(every, plot.panels.items(), strict=True):
        if plot.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        if plot.base is not None:
            axes.axhline(plot.base, color="grey", linewidth=0.8)
        for line in lines:
            spans = zip(line.y, line.low, line.high, strict=True) if line.low else ()
            bars = list(zip(*((y - low, high - y) for y, low, high in spans), strict=True)) or None
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, **line.style}
            axes.errorbar(line.x, line.y, yerr=bars, label=line.label, **style)
        ticks = sorted({x for line in lines for x in line.x})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(plot.xlabel)
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7, handlelength=3.2)
    every[0].set_ylabel(plot.ylabel)
    figure.suptitle(textwrap.fill(title, 60 * len(plot.panels)), fontsize=TITLE_SIZE)
    save_figure(figure, path)
