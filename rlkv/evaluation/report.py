"""Parts of reports: pages in Markdown and HTML, number formats, plots."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import COLORS
from rlkv.utils.files import TEXT_SIZE, TITLE_SIZE, new_figure, save_figure, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = dict[str, Any]  # JSON-able

LEVEL = 0.05  # a paired test with a p value below it shows a significant difference
NOT_AVAILABLE = "n/a"
FULL_CACHE = "full cache"
ORACLE = "oracle (measured)"
RANDOM = "random heads"

# --- pages

# Characters that Markdown or HTML would read as markup.  Brackets alone are not a link, and an
# underscore within a word is not emphasis, so that numbers and names stay readable as text.
_MARKUP = re.compile(
    r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE
)
_FIRST = re.compile(r"^(\d*)([#>~]|[-+](?=[\s-]|$)|(?<=\d)[.)](?=\s|$))")
# Models wrote the texts of a report: the policy keeps a browser from loading or running anything.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="{policy}">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 78rem; margin: 2rem auto; padding: 0 1.5rem;
 font: 15px/1.5 system-ui, sans-serif; }}
p, li {{ max-width: 60rem; }}
nav ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1rem; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem; }}
th, td {{ padding: .35rem .7rem; border: 1px solid #8886; text-align: left; vertical-align: top; }}
pre {{ padding: .75rem; border: 1px solid #8886; white-space: pre-wrap; overflow-wrap: anywhere; }}
img {{ max-width: 100%; background: #fff; }}
</style>
</head>
<body>
"""


def escaped(text: str) -> str:
    """Return ``text`` on one line, with what Markdown or HTML would read as markup escaped."""
    line = " ".join(text.split())
    return _FIRST.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line), count=1)


class Page:
    """A page in Markdown, written part by part.

    Every text but code is escaped, so that it reads as it was given.
    """

    def __init__(self, title: str) -> None:
        self.parts = [f"# {escaped(title)}"]

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section; the HTML page lists those of level 2 under its title."""
        self.parts.append(f"{'#' * level} {escaped(text)}")

    def paragraph(self, text: str, strong: bool = False) -> None:
        self.parts.append(f"**{escaped(text)}**" if strong else escaped(text))

    def bullets(self, items: Iterable[str]) -> None:
        self.parts.append("\n".join(f"- {escaped(item)}" for item in items))

    def code(self, text: str) -> None:
        """Add a command or a text of a model, as it is."""
        longest = max(map(len, re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        self.parts.append(f"{fence}\n{text}\n{fence}")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = ""
    ) -> None:
        """Add a table; the first cell of a row names it.

        Raises:
            ValueError: if a row has more or fewer cells than there are columns.
        """
        lines = [_row(columns), "|" + "---|" * len(columns)]
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(
                    f"table {caption!r}: a row has {len(row)} cells for {len(columns)} columns"
                )
            lines.append(_row(row))
        if caption:
            self.paragraph(caption)
        self.parts.append("\n".join(lines))

    def records(
        self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], caption: str = ""
    ) -> None:
        """Add a table of dicts.

        ``columns`` has the format of a cell by the title of its column; a cell stays empty where a
        row lacks a value.
        """

        def cell(form: str, row: Mapping[str, Any]) -> str:
            try:
                return form.format(**row)
            except (KeyError, TypeError):
                return ""

        cells = [[cell(form, row) for form in columns.values()] for row in rows]
        self.table(list(columns), cells, caption)

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG file, which lies in the folder that the page is written to."""
        self.parts.append(f"![{escaped(caption)}](<{path.name}>)\n\n*{escaped(caption)}*")

    def markdown(self) -> str:
        """Return the whole text."""
        return "\n\n".join(self.parts) + "\n"

    def write(self, path: Path) -> None:
        """Write the Markdown atomically."""
        write_text(path, self.markdown())

    def write_report(self, folder: Path) -> None:
        """Write ``report.md``, and ``report.html`` made from it."""
        self.write(folder / "report.md")
        write_text(folder / "report.html", html_page(self.markdown(), folder))


def _row(cells: Sequence[str]) -> str:
    escaped_cells = (escaped(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped_cells)} |"


def html_page(text: str, folder: Path) -> str:
    """Return Markdown as one HTML file that loads nothing.

    HTML in the Markdown is shown as text, PNG files of ``folder`` are embedded, and sections are
    listed under the title.
    """
    from markdown_it import MarkdownIt

    def embed(image: re.Match[str]) -> str:
        picture = (folder / unquote(unescape(image[1]))).read_bytes()
        return f'<img src="data:image/png;base64,{base64.b64encode(picture).decode()}"'

    # below, a tag is one of Markdown: those in the text are escaped
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub('<img src="([^"]*)"', embed, body)
    links = ""
    for number, words in enumerate(re.findall("<h2>(.*)</h2>", body), start=1):
        links += f'<li><a href="#section-{number}">{words}</a></li>'
        body = body.replace("<h2>", f'<h2 id="section-{number}">', 1)
    title, end, rest = body.partition("</h1>\n")
    head = _HEAD.format(policy=PAGE_POLICY, title=title.removeprefix("<h1>"))
    return f"{head}{title}{end}<nav><ul>{links}</ul></nav>\n{rest}</body>\n</html>\n"


def provenance_facts(origin: Metrics) -> list[str]:
    """Return a sentence each on hardware, versions and time.

    origin: what :func:`rlkv.utils.runtime.provenance` returns.
    """
    machine = origin["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    return [
        f"Hardware: {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch "
        f"threads, GPU {', '.join(machine['gpus']) or 'none'}.",
        f"Versions: {versions}.",
        f"Finished {origin['finished']}.",
    ]


# --- number formats: the same figure looks the same in every table

AGAINST_FULL = (
    f"in parentheses the paired difference to the full cache (▲ ▼: p < {LEVEL:g}, uncorrected)"
)
INTERVALS = "brackets: 95% intervals over problems"


def mark(difference: float, p_value: float) -> str:
    """Return ▲ or ▼ for a significant difference, else nothing."""
    if p_value >= LEVEL or difference == 0:
        return ""
    return " ▲" if difference > 0 else " ▼"


def interval(metrics: Metrics, digits: int = 2) -> str:
    return f"[{metrics['low']:.{digits}f}, {metrics['high']:.{digits}f}]"


def estimate(metrics: Metrics, digits: int = 2) -> str:
    """Write a mean with its interval."""
    return f"{metrics['mean']:.{digits}f} {interval(metrics, digits)}"


def p_number(p_value: float) -> str:
    """Write a p-value; one below the level does not read as the level."""
    if p_value < 0.001:
        return "< 0.001"
    text = f"{p_value:.3f}"
    return f"< {LEVEL:g}" if p_value < LEVEL == float(text) else text


def levels(sparsities: Iterable[float]) -> list[str]:
    """Return a column title for each sparsity."""
    return [f"s = {value:g}" for value in sparsities]


def table_rows(methods: Mapping[str, Iterable[Any]], cell: Callable[[Any], str]) -> list[list[str]]:
    """Return a row for each method, with a cell for each of its numbers."""
    return [[name, *map(cell, numbers)] for name, numbers in methods.items()]


def difference_cell(test: Metrics, sign: int = 1) -> str:
    """Write a paired difference with its mark and interval; ``sign`` -1: lower is better."""
    found = mark(sign * test["difference"], test["p_value"])
    return f"{test['difference']:+.3f}{found} [{test['low']:+.2f}, {test['high']:+.2f}]"


def accuracy_cell(accuracy: Metrics) -> str:
    """Write accuracy, its difference to the full cache with a mark, its interval, and the seeds.

    accuracy: what :func:`rlkv.evaluation.measurements.accuracy_of` returns.
    """
    text = f"{accuracy['mean']:.3f}"
    test = accuracy["versus_full"]
    if test is not None:
        text += f" ({test['difference']:+.3f}){mark(test['difference'], test['p_value'])}"
    text += f" {interval(accuracy)}"
    seeds = seeds_text(accuracy)
    return f"{text}; {seeds}" if seeds else text


def seeds_text(accuracy: Metrics) -> str:
    """Write how many seeds or draws a mean has, how many differ, and their range; nothing for one.

    Seeds that keep the same heads are one measurement, since decoding is greedy.
    """
    seeds = accuracy["seeds"]
    if accuracy["draws"] > 1:
        return f"{accuracy['draws']} draws, which share the problems"
    if len(seeds) == 1:
        return ""
    text = f"{len(seeds)} seeds"
    distinct = accuracy["distinct"]
    if distinct < len(seeds):
        text += f", {distinct} set{'' if distinct == 1 else 's'} of heads"
    if distinct == 1:
        return text
    low, high = f"{min(seeds):.2f}", f"{max(seeds):.2f}"
    return f"{text}: {low} to {high}" if low != high else f"{text}: all {low}"


# --- plots

FIXED_STYLES = {
    FULL_CACHE: {"color": "black", "linestyle": ":", "marker": ""},
    ORACLE: {"color": "black", "linestyle": "--"},
    RANDOM: {"color": "0.55", "linestyle": "--"},
}
WIDTH = 9.0
HEIGHT = 4.2
LEGEND_WIDTH = 32  # letters: names of methods with options are long
WIDEST = 14.0  # inches of heat maps side by side
SPARSITY = "sparsity (share of KV heads compressed)"
ACCURACY = "greedy accuracy"
ACCURACY_LIMITS = (-0.03, 1.03)
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


def point(x: float, metrics: Metrics) -> Point:
    """Return a point from metrics with mean, low and high."""
    return x, metrics["mean"], metrics["low"], metrics["high"]


def curve(xs: Iterable[float], metrics: Iterable[Metrics]) -> list[Point]:
    """Return a point for each x."""
    return [point(x, of) for x, of in zip(xs, metrics, strict=True)]


def curves_of(
    xs: Sequence[float], methods: Mapping[str, Sequence[Metrics]]
) -> dict[str, list[Point]]:
    """Return a curve for each method through its accuracies."""
    return {name: curve(xs, accuracies) for name, accuracies in methods.items()}


def plot_curves(path: Path, *panels: Panel, title: str = "", sharey: bool = False) -> Path:
    """Plot curves side by side, with their intervals as error bars.

    Points of several curves at one x are set apart a little.
    """
    width = WIDTH if len(panels) == 1 else WIDTH + 3
    figure, axes_list = new_figure(width, HEIGHT, len(panels), sharey=sharey)
    styles: dict[str, Mapping[str, Any]] = dict(FIXED_STYLES)  # one legend for all panels
    names = dict.fromkeys(chain.from_iterable(panel.curves for panel in panels))
    for number, name in enumerate(name for name in names if name not in FIXED_STYLES):
        # ten colors, with another marker where they begin again
        styles[name] = {"color": f"C{number % 10}", "marker": "os^D"[number // 10 % 4]}
    for axes, panel in zip(axes_list, panels, strict=True):
        _draw(axes, panel, styles)
    if title:
        figure.suptitle(textwrap.fill(title, 100), fontsize=TITLE_SIZE)
    return _save(figure, path)


def _draw(axes: Any, panel: Panel, styles: Styles) -> None:
    xs = sorted({x for points in panel.curves.values() for x, *_ in points})
    gap = 0.0
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    elif panel.ticks:
        gap = min((b - a for a, b in pairwise(xs)), default=1.0)
    for place, (name, points) in enumerate(panel.curves.items()):
        shift = (place - (len(panel.curves) - 1) / 2) * gap * 0.05
        errors = None
        if any(low != high for *_, low, high in points):
            # rounding may leave a mean outside its interval by 1e-17, which matplotlib refuses
            below = [max(0.0, mean - low) for _, mean, low, _ in points]
            above = [max(0.0, high - mean) for _, mean, _, high in points]
            errors = [below, above]
        style = {"marker": "o", "linestyle": "-", **styles[name], **panel.styles.get(name, {})}
        axes.errorbar(
            [x + shift for x, *_ in points],
            [mean for _, mean, *_ in points],
            yerr=errors,
            label=name,
            markersize=4,
            capsize=2,
            linewidth=1.4,
            **style,
        )
    if panel.reference is not None:
        line = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
        axes.axhline(panel.reference, label=FULL_CACHE, **line)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.ticks:
        axes.set_xticks(xs, [f"{x:g}" if x < 1000 else f"{x:,.0f}" for x in xs])
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.title, fontsize=TITLE_SIZE)
    axes.grid(alpha=0.3)


def plot_stacked(
    path: Path, panels: dict[str, dict[str, dict[str, float]]], bar_colors: dict[str, str]
) -> Path:
    """Plot a panel per title with a bar per name, stacked in the order of ``bar_colors``."""
    width = max(WIDTH, 2.2 * len(panels) + 1.5)
    figure, axes_list = new_figure(width, HEIGHT + 0.6, len(panels), sharey=True)
    for axes, (title, bars) in zip(axes_list, panels.items(), strict=True):
        bottom = [0.0] * len(bars)
        for part, color in bar_colors.items():
            heights = [parts[part] for parts in bars.values()]
            axes.bar(range(len(bars)), heights, bottom=bottom, color=color, label=part, width=0.8)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(bars)), list(bars), rotation=90, fontsize=TEXT_SIZE)
        axes.set_title(title, fontsize=TITLE_SIZE)
        axes.set_ylim(0, 1.02)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    axes_list[0].set_ylabel("share of problems")
    return _save(figure, path)


def plot_heat_maps(path: Path, methods: Mapping[str, HeadGates]) -> Path:
    """Plot the gates of each method: layers across, KV heads down, colors from 0 to 1.

    Places without a gate stay white.
    """
    from matplotlib.ticker import MaxNLocator

    layers, heads = next(iter(methods.values())).alpha.shape
    width = max(2.2, 0.16 * layers + 0.8)
    columns = max(1, min(int(WIDEST // width), len(methods)))
    lines = -(-len(methods) // columns)
    height = max(1.8, 0.16 * heads + 0.9)
    figure, grid = new_figure(columns * width + 1.2, lines * height, columns, lines)
    style: dict[str, Any] = {"vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    image: Any = None
    for axes, (name, gates) in zip(grid, methods.items(), strict=False):
        shown = gates.alpha.masked_fill(~gates.gated, float("nan"))
        image = axes.imshow(shown.T.numpy(), cmap=COLORS, **style)
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.set_xlabel("layer", fontsize=TEXT_SIZE)
        axes.set_ylabel("KV head", fontsize=TEXT_SIZE)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=TEXT_SIZE)
    for axes in grid[len(methods) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, label="gate", ticks=[0, 0.5, 1], shrink=0.8)
    save_figure(figure, path)
    return path


def _save(figure: Figure, path: Path) -> Path:
    """Write a figure with one legend for all panels next to them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    labels = [textwrap.fill(label, LEGEND_WIDTH) for label in named]
    figure.legend(list(named.values()), labels, loc="outside right upper", fontsize=TEXT_SIZE)
    save_figure(figure, path)
    return path
