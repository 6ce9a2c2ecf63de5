"""The report of an evaluation: results.json, and a page with a table per task in the layout of
RLKV's tables 6 to 8.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from itertools import chain, count, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

from rlkv.evaluation.evaluate import FULL, RANDOM_HEADS, RESULTS, CompressionMethod, Evaluation
from rlkv.evaluation.metrics import (
    FEW_CHANGED,
    MODES,
    NGRAMS,
    Estimate,
    Floats,
    error_mode,
    mean_with_interval,
    ngram_entropy,
    paired_difference,
    problem_scores,
    ratio_with_interval,
    repetition_rate,
    sentence_redundancy,
    sign_test,
    smallest_provable_difference,
    strict_scores,
)
from rlkv.utils.files import TEXT_SIZE, TITLE_SIZE, save_figure, write_json, write_text
from rlkv.utils.runtime import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Summary = dict[str, Any]


def by_problem(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each problem, in the order of their keys."""
    groups = groupby(sorted(rows, key=itemgetter("key")), itemgetter("key"))
    return {key: list(samples) for key, samples in groups}


def summarize(
    task: str,
    method: str,
    rows: list[Row],
    full_rows: list[Row] | None,
    baseline_rows: list[Row] | None = None,
) -> Summary:
    """Accuracy with its interval, the difference to the full cache with its own, lengths, times,
    bytes, error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: no differences
            and error modes then.
        baseline_rows: of another method on the same problems: ``versus_baseline`` has the tests
            against it.
    """
    problems = by_problem(rows)
    accuracy = mean_with_interval(_scores(problems))
    summary: Summary = {
        "task": task,
        "method": method,
        "n": len(problems),
        "samples": len(rows) // len(problems),
        "accuracy": accuracy.mean,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        "smallest_provable_difference": smallest_provable_difference(len(problems)),
        **_samples(problems),
        **_cost(rows),
        **_texts(rows),
    }
    if full_rows is not None and method != FULL:
        full = by_problem(full_rows)
        if list(full) != list(problems):
            raise ValueError(
                f"{task}: {method} and the full cache were run on other problems: run both on the "
                "same"
            )
        summary |= {**_tests(_scores(full), _scores(problems)), **_versus_full(rows, full_rows)}
    if baseline_rows is not None:
        summary["versus_baseline"] = _tests(_scores(by_problem(baseline_rows)), _scores(problems))
    return summary


def _verdicts(problems: dict[str, list[Row]]) -> list[list[bool]]:
    return [[row["correct"] for row in samples] for samples in problems.values()]


def _scores(problems: dict[str, list[Row]]) -> Floats:
    """pass@1 of each problem."""
    return problem_scores(_verdicts(problems))


def _interval(of: Estimate) -> dict[str, float]:
    return {"mean": of.mean, "low": of.low, "high": of.high}


def pass_at(verdicts: list[list[bool]]) -> dict[str, dict[str, float]]:
    """pass@k for k = 1, 2, 4, ... up to the samples of each problem, with 95% intervals over
    problems.
    """
    powers = (2**i for i in range(min(map(len, verdicts)).bit_length()))
    return {str(k): _interval(mean_with_interval(problem_scores(verdicts, k))) for k in powers}


def _samples(problems: dict[str, list[Row]]) -> Row:
    """pass@k, strict accuracy, and the accuracy of the texts that ended by themselves (None if none
    did).
    """
    verdicts = _verdicts(problems)
    ended = [
        [row["correct"] for row in rows if row["finish_reason"] == "stop"]
        for rows in problems.values()
    ]
    right = ratio_with_interval(list(map(sum, ended)), list(map(len, ended)))
    return {
        "pass_at_k": pass_at(verdicts),
        "strict": _interval(mean_with_interval(strict_scores(verdicts))),
        "share_terminated": sum(map(len, ended)) / sum(map(len, verdicts)),
        "right_of_terminated": None if right is None else _interval(right),
    }


def _cost(rows: list[Row]) -> Row:
    """Output tokens, wall-clock time of decoding (summed over processes) and their quotient."""
    tokens, seconds = (
        sum(len(row["token_ids"]) for row in rows),
        sum(row["seconds"] for row in rows),
    )
    return {
        "mean_output_tokens": tokens / len(rows),
        "seconds": round(seconds, 2),
        "seconds_per_text": seconds / len(rows),
        "tokens_per_second": tokens / max(1e-9, seconds),
    }


def _tests(full: Floats, scores: Floats) -> Row:
    """Paired comparison of the scores of the same problems."""
    found, signs = paired_difference(full, scores), sign_test(full, scores)
    return {
        **{
            "difference": found.difference,
            "difference_low": found.low,
            "difference_high": found.high,
        },
        "p_value": found.p_value,
        **{
            "problems_better": signs.better,
            "problems_worse": signs.worse,
            "sign_p_value": signs.p_value,
        },
    }


def _texts(rows: list[Row]) -> Row:
    """How the texts repeat themselves, each a mean over texts, and how many were ended early for
    it.
    """
    return {
        "share_repetitive": fmean(row["repetitive"] for row in rows),
        "stopped_for_repetition": sum(row["finish_reason"] == "repetition" for row in rows),
        "share_at_limit": fmean(row["finish_reason"] == "length" for row in rows),
        "sentence_redundancy": fmean(sentence_redundancy(row["text"]) for row in rows),
        **{
            f"entropy_{n}_gram": fmean(ngram_entropy(row["token_ids"], n) for row in rows)
            for n in NGRAMS
        },
        **{
            f"repeated_{n}_grams": fmean(repetition_rate(row["token_ids"], n) for row in rows)
            for n in NGRAMS
        },
    }


def _versus_full(rows: list[Row], full_rows: list[Row]) -> Row:
    """Cost relative to the full cache; where that is right: error modes, and mean output tokens of
    both if both are.
    """
    solved = {
        (row["key"], row["sample"]): len(row["token_ids"]) for row in full_rows if row["correct"]
    }
    common = [
        (row, solved[unit]) for row in rows if (unit := (row["key"], row["sample"])) in solved
    ]
    both = [(len(row["token_ids"]), full) for row, full in common if row["correct"]]
    own, full = map(fmean, zip(*both, strict=True)) if both else (None, None)
    modes = [error_mode(row) for row, _ in common]
    cost, cost_full = _cost(rows), _cost(full_rows)
    return {
        "tokens_times_full": cost["mean_output_tokens"] / cost_full["mean_output_tokens"],
        "seconds_times_full": cost["seconds_per_text"] / max(1e-9, cost_full["seconds_per_text"]),
        **{"tokens_both_right": own, "full_tokens_both_right": full, "n_both_right": len(both)},
        "solved_in_full": len(solved),
        **{mode: modes.count(mode) for mode in MODES},
    }


Sign = Literal["better", "worse", "same", ""]
LEVEL = 0.05  # a paired test with a p value below it shows a significant difference
MARKS = {"better": " ▲", "worse": " ▼", "same": "", "": ""}
MARKS_LEGEND = "▲ better, ▼ worse"
# brackets alone are not a link, and an underscore within a word is not emphasis: numbers stay
# readable as text
_MARKUP = re.compile(
    r"[\\`*]|<(?=[a-z/!?])|\](?=[(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)", re.IGNORECASE
)
_FIRST = re.compile(r"^(\d*)([#>~]|[-+](?=[\s-]|$)|(?<=\d)[.)](?=\s|$))")
# the texts of a report were written by models: nothing in them is loaded or run
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 78rem; margin: 2rem auto; padding: 0 1.5rem; font: 15px/1.5 system-ui, sans-serif; }}
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


def sign_of(difference: float, p_value: float) -> Sign:
    """The sign of a difference to a reference:

    ``same`` where the paired test finds no significant difference.
    """
    if p_value >= LEVEL or difference == 0:
        return "same"
    return "better" if difference > 0 else "worse"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the mark of its ``sign``, then the lines of ``note``."""

    text: str
    sign: Sign = ""
    note: str = ""


class Heading(NamedTuple):
    text: str
    level: int


class Paragraph(NamedTuple):
    text: str
    strong: bool


class Bullets(NamedTuple):
    items: tuple[str, ...]


class Code(NamedTuple):
    text: str


class Table(NamedTuple):
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str


class Picture(NamedTuple):
    path: Path
    caption: str


Block = Heading | Paragraph | Bullets | Code | Table | Picture


@dataclass
class Page:
    """A title and blocks, in the order in which they were added."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section (level 2, listed at the top of the HTML page) or a part of one (level 3)."""
        self.blocks.append(Heading(text, level))

    def paragraph(self, text: str, strong: bool = False) -> None:
        self.blocks.append(Paragraph(text, strong))

    def bullets(self, items: Sequence[str]) -> None:
        self.blocks.append(Bullets(tuple(items)))

    def code(self, text: str) -> None:
        """Add a command or a file, as it is."""
        self.blocks.append(Code(text))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], caption: str = ""
    ) -> None:
        """Add a table; the first cell of a row names it, a ``str`` is a cell without a sign."""
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(
                    f"table {caption!r}: a row has {len(row)} cells for {len(columns)} columns"
                )
        cells = tuple(
            tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows
        )
        self.blocks.append(Table(tuple(columns), cells, caption))

    def records(
        self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], caption: str = ""
    ) -> None:
        """Add a table of ``rows``; ``columns``: the format of a cell by its title, empty where a
        row lacks a value.
        """

        def cell(form: str, row: Mapping[str, Any]) -> str:
            try:
                return form.format(**row)
            except (KeyError, TypeError):
                return ""

        self.table(
            list(columns), [[cell(form, row) for form in columns.values()] for row in rows], caption
        )

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG file, which must exist when an HTML page is made."""
        self.blocks.append(Picture(path, caption))

    def markdown(self, folder: Path) -> str:
        """The page with links to its pictures from ``folder``."""
        parts = [f"# {_line(self.title)}", *(_markdown(block, folder) for block in self.blocks)]
        return "\n\n".join(parts) + "\n"

    def write(self, path: Path) -> None:
        """Write the Markdown atomically."""
        write_text(path, self.markdown(path.parent))

    def write_report(self, folder: Path) -> None:
        """Write ``report.md``, and ``report.html`` made from it."""
        self.write(folder / "report.md")
        write_text(folder / "report.html", html_page(self.markdown(folder), folder))


def html_page(text: str, folder: Path) -> str:
    """Return Markdown as one HTML file, with its pictures (PNG files, linked from ``folder``)
    embedded.

    HTML in the Markdown is shown as text.  Sections are listed under the title.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    title = ""
    sections = []
    for token, content in itertools.pairwise(tokens):
        if token.type != "heading_open":
            continue
        words = escape("".join(child.content for child in content.children or ()))
        if token.tag == "h1":
            title = words
        elif token.tag == "h2":
            sections.append(words)
            token.attrSet("id", f"section-{len(sections)}")
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                picture = (folder / unquote(str(child.attrs["src"]))).read_bytes()
                child.attrSet("src", f"data:image/png;base64,{base64.b64encode(picture).decode()}")
    body = parser.renderer.render(tokens, parser.options, {})
    links = (
        f'<li><a href="#section-{i}">{words}</a></li>' for i, words in enumerate(sections, start=1)
    )
    before, end, after = body.partition("</h1>\n")
    return f"{_HEAD.format(title=title)}{before}{end}<nav><ul>{''.join(links)}</ul></nav>\n{after}</body>\n</html>\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_line(text)}"
        case Paragraph(text, strong):
            return f"**{_line(text)}**" if strong else _line(text)
        case Bullets(items):
            return "\n".join(f"- {_line(item)}" for item in items)
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Picture(path, caption):
            return f"![{_line(caption)}](<{os.path.relpath(path, folder)}>)\n\n*{_line(caption)}*"
        case Table(columns, rows, caption):
            lines = ["| " + " | ".join(map(_cell, columns)) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(map(_marked, row)) + " |" for row in rows]
            return "\n".join([f"{_line(caption)}\n", *lines] if caption else lines)


def _marked(cell: Cell) -> str:
    note = "; ".join(cell.note.splitlines())
    return _cell(cell.text) + MARKS[cell.sign] + (f" {_cell(note)}" if note else "")


def _line(text: str) -> str:
    """``text`` on one line; what Markdown or HTML would read as markup is escaped."""
    text = " ".join(text.split())
    return _FIRST.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", text), count=1)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def provenance_facts(origin: dict[str, Any]) -> list[str]:
    """A sentence each on hardware, versions and time, from :func:`rlkv.utils.runtime.provenance`."""
    machine = origin["hardware"]
    return [
        f"Hardware: {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch "
        "threads, "
        f"GPU {', '.join(machine['gpus']) or 'none'}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in origin['versions'].items())}.",
        f"Finished {origin['finished']}.",
    ]


FULL_CACHE, ORACLE, RANDOM = "full cache", "oracle (measured)", "random heads"  # in tables too
FIXED_STYLES = {
    ORACLE: {"color": "black", "linestyle": "--"},
    RANDOM: {"color": "0.55", "linestyle": "--"},
}
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
    figure, axes_list = _figure(
        WIDTH if len(panels) == 1 else WIDTH + 3, HEIGHT, len(panels), sharey
    )
    free, names = count(), dict.fromkeys(name for panel in panels for name in panel.curves)
    styles = {
        name: FIXED_STYLES.get(name) or _style(next(free)) for name in names
    }  # one legend for all panels
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
            axes.axhline(
                panel.reference, color="black", linewidth=0.8, linestyle=":", label=FULL_CACHE
            )
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


def plot_stacked(
    path: Path, panels: dict[str, dict[str, dict[str, float]]], bar_colours: dict[str, str]
) -> Path:
    """A panel per title, in it a bar per name, stacked from shares of problems in the order of
    ``bar_colours``.
    """
    figure, axes_list = _figure(
        max(WIDTH, 2.2 * len(panels) + 1.5), HEIGHT + 0.6, len(panels), sharey=True
    )
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
    """Lengths of the bars below and above the means, not negative by rounding.

    None where no point has an interval.
    """
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


@dataclass(frozen=True)
class Source:
    """Where a number stands, and how it was measured there."""

    paper: str
    arxiv: str
    where: str
    protocol: str


@dataclass(frozen=True)
class PublishedNumber:
    """One number; accuracies are percentages.

    ``sparsity`` is the share of KV heads (head methods) or of entries (token dropping) that is
    compressed, 0 for the full cache, None where the table has none.
    """

    source: Source
    metric: str
    unit: str
    model: str
    task: str
    method: str
    sparsity: float | None
    value: float


@cache
def published_numbers() -> tuple[PublishedNumber, ...]:
    """All of them, in the order of the file."""
    content = json.loads((files("rlkv.evaluation") / "published.json").read_text(encoding="utf-8"))
    sources = {name: Source(**fields) for name, fields in content["sources"].items()}
    return tuple(
        PublishedNumber(
            sources[table["source"]],
            table["metric"],
            table["unit"],
            table["model"],
            task,
            method,
            sparsity,
            value,
        )
        for table in content["tables"]
        for task, methods in table["rows"].items()
        for method, values in methods.items()
        for sparsity, value in zip(table["sparsities"], values, strict=True)
    )


def find_published(
    model: str | None = None,
    task: str | None = None,
    method: str | None = None,
    metric: str = "accuracy",
) -> list[PublishedNumber]:
    """The numbers of a metric, for a model, a task or a method where one is named.

    Empty if nothing was published.
    """
    wanted = {"model": model, "task": task, "method": method}
    return [
        number
        for number in published_numbers()
        if number.metric == metric
        and all(value in (None, getattr(number, field)) for field, value in wanted.items())
    ]


def published_name(model: str) -> str | None:
    """The model of the papers whose name ends as this one (a hub id or a folder) does."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    known = {
        number.model.rpartition("/")[2].lower(): number.model for number in published_numbers()
    }
    return known.get(last)


def write_published(page: Page, model: str, task: str) -> None:
    """Add the published accuracies of a model on a task, marked as such.

    Nothing if there are none.
    """
    name = published_name(model)
    numbers = find_published(name, task) if name else []
    if not numbers:
        return
    page.heading("Published numbers, not measured here", level=3)
    sources = list(dict.fromkeys(number.source for number in numbers))
    sparsities = sorted({n.sparsity for n in numbers if n.sparsity is not None})
    rows = []
    methods = dict.fromkeys((n.source, n.method) for n in numbers)
    for source, method in sorted(methods, key=lambda pair: sources.index(pair[0])):
        values = {
            n.sparsity: f"{n.value:.1f}"
            for n in numbers
            if (n.source, n.method) == (source, method)
        }
        cells = [values.get(s, "") for s in (*sparsities, None)]
        rows.append(
            ["full cache" if method == "full" else method, *cells, f"[{sources.index(source) + 1}]"]
        )
    page.table(
        ["method", *(f"s = {s:g}" for s in sparsities), "without s", "source"],
        rows,
        f"{name} on {task}, accuracy in percent as published; no intervals were published. s: "
        "share of KV heads, or of "
        "entries where tokens are dropped in all heads; s = 0 is the full cache.",
    )
    page.bullets(
        [
            f"[{i}] {s.paper} (arXiv {s.arxiv}), {s.where}: {s.protocol}"
            for i, s in enumerate(sources, start=1)
        ]
    )


# a task whose smallest provable difference is larger proves little: the report says so in bold
COARSE = 0.05
HOW_TO_READ = (
    "Accuracy is pass@1 in percent, with its 95% interval for the full cache. For a method, in "
    "parentheses: the "
    "difference to the full cache in points, with its 95% interval (bootstrap over problems, "
    "paired); * where a paired "
    f"permutation test gives p < 0.05 ({MARKS_LEGEND}). {FEW_CHANGED} "
    "The p values are not corrected for the number of comparisons. KV: bytes of KV in use at the "
    "end of each text, "
    "over the bytes of the full cache for the same tokens. s: share of KV heads that are "
    "compressible."
)


def write_report(folder: Path, done: Evaluation) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html``."""
    full, baseline = (
        {task: rows for (task, method), rows in done.rows.items() if method == name}
        for name in (FULL, done.config["baseline"])
    )
    summaries = [
        summarize(
            task,
            method,
            rows,
            full.get(task),
            None if rows is baseline.get(task) else baseline.get(task),
        )
        for (task, method), rows in done.rows.items()
    ]
    origin = provenance()
    write_json(folder / RESULTS, {"config": done.config, **origin, "results": summaries})
    evaluation_page(done.methods, summaries, origin, done.config).write_report(folder)


def evaluation_page(
    methods: list[CompressionMethod],
    summaries: list[Summary],
    origin: dict[str, Any],
    config: dict[str, Any],
) -> Page:
    """The whole report, from :func:`summarize` of every task with every method.

    ``origin`` is of :func:`rlkv.utils.runtime.provenance`; published numbers are those of the model
    in ``config``.
    """
    page = Page(f"Evaluation of {config['model']}")
    page.paragraph(HOW_TO_READ)
    if any(method.ranking == RANDOM_HEADS for method in methods):
        page.paragraph(
            f"{RANDOM_HEADS} is one draw of heads (seed {config['seed']}): its intervals are over "
            "problems and say "
            "nothing about other draws."
        )
    for task in dict.fromkeys(s["task"] for s in summaries):
        found = {s["method"]: s for s in summaries if s["task"] == task}
        page.heading(task)
        _what_it_proves(page, next(iter(found.values())))
        _accuracy_table(page, task, methods, found)
        _samples_table(page, found)
        _paired_table(
            page, "the full cache", {name: s for name, s in found.items() if "difference" in s}
        )
        versus = {
            name: {**s, **s["versus_baseline"]}
            for name, s in found.items()
            if "versus_baseline" in s
        }
        _paired_table(page, config["baseline"], versus)
        write_published(page, config["model"], task)
        _mode_table(page, found)
        _cost_table(page, found)
        _text_table(page, found)
    page.heading("How it was run")
    page.code(origin["command"])
    page.bullets([*_settings(config), *provenance_facts(origin)])
    return page


def _what_it_proves(page: Page, summary: Summary) -> None:
    n, least = summary["n"], summary["smallest_provable_difference"]
    if least is None:
        text = (
            f"{n} problems prove nothing: no difference between two methods could be called "
            "significant."
        )
        return page.paragraph(text, strong=True)
    text = (
        f"{n} problems: at least {round(least * n)} must change, all in one direction, for a "
        "difference between two "
        "methods to be called significant (sign test, p < 0.05)"
    )
    if summary["samples"] == 1:
        text += f", which is a difference of {100 * least:.1f} points"
    page.paragraph(
        text + (": this task proves little." if least > COARSE else "."), strong=least > COARSE
    )


def _accuracy_table(
    page: Page, task: str, methods: list[CompressionMethod], found: dict[str, Summary]
) -> None:
    """Rankings of heads down, sparsities across.

    Methods without a sparsity get a table of their own.
    """
    others = [m.name for m in methods if m.sparsity is None and m.name != FULL]
    full: list[list[Cell | str]] = (
        [[FULL_CACHE, _measured_cell(found[FULL])]] if FULL in found else []
    )
    groups: dict[str, dict[float, Cell]] = defaultdict(dict)
    for method in methods:
        if method.sparsity is not None:
            groups[_group(method)][method.sparsity] = _measured_cell(found[method.name])
    if groups or not others:
        levels = sorted({0.0, *chain(*groups.values())})
        rows = [[*row, *[""] * (len(levels) - 1)] for row in full]
        rows += [[group, *(own.get(s, "") for s in levels)] for group, own in groups.items()]
        columns = ["heads", *(f"s = {s:g}" for s in levels)]
        page.table(columns, rows, f"{task}, measured: which heads stay full, by sparsity.")
    if others:
        rows = full + [[name, _measured_cell(found[name])] for name in others]
        page.table(["method", "accuracy"], rows, f"{task}, measured: policies in all heads.")


def _group(method: CompressionMethod) -> str:
    """The row of a method: its name without the sparsity."""
    policies = [part for part in method.name.split("+") if part.partition("@")[0] != method.ranking]
    return "+".join([str(method.ranking), *policies])


def _percent(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _measured_cell(summary: Summary) -> Cell:
    share = summary["kv_bytes"] / summary["kv_bytes_full"]
    if "difference" not in summary:
        text = _percent(summary["accuracy"], summary["ci_low"], summary["ci_high"])
        return Cell(text if summary["method"] == FULL else f"{text} KV {share:.0%}")
    change, low, high = (
        100 * summary[name] for name in ("difference", "difference_low", "difference_high")
    )
    sign = sign_of(change, summary["p_value"])
    mark = "" if sign == "same" else "*"
    text = (
        f"{100 * summary['accuracy']:.1f} ({change:+.1f}{mark} [{low:+.1f}, {high:+.1f}]) KV "
        f"{share:.0%}"
    )
    return Cell(text, sign)


def _samples_table(page: Page, found: dict[str, Summary]) -> None:
    def cell(interval: dict[str, float] | None) -> str:
        return _percent(**interval) if interval else "none"

    first = next(iter(found.values()))
    several = first["samples"] > 1
    page.table(
        [
            *("method", *(f"pass@{k}" for k in first["pass_at_k"])),
            *([f"all {first['samples']} right"] if several else []),
            *("terminated texts", "right of these"),
        ],
        [
            [
                *(name, *map(cell, s["pass_at_k"].values())),
                *([cell(s["strict"])] if several else []),
                *(f"{100 * s['share_terminated']:.1f}", cell(s["right_of_terminated"])),
            ]
            for name, s in found.items()
        ],
        f"In percent, from {first['samples']} samples of each problem, with 95% intervals over "
        "problems (Wilson where "
        "all scores are 0 or 1, else bootstrap). pass@1 is the mean over problems of the mean over "
        "samples, pass@k the "
        "probability that one of k is right, without bias (arXiv 2107.03374, equation 1). All "
        "right: strict accuracy. "
        "Terminated: texts that end by themselves, neither at the limit nor for repetition; the "
        "last column is the "
        "accuracy among these alone.",
    )


def _paired_table(page: Page, reference: str, tested: dict[str, Summary]) -> None:
    if not tested:
        return
    page.table(
        [
            "method",
            "difference in points",
            "problems better, worse",
            "p, sign test",
            "p, flip test",
        ],
        [
            [
                s["method"],
                f"{_points(s['difference'])} [{_points(s['difference_low'])}, "
                f"{_points(s['difference_high'])}]",
                f"{s['problems_better']}, {s['problems_worse']} of {s['n']}",
                f"{s['sign_p_value']:.3g}",
                f"{s['p_value']:.3g}",
            ]
            for s in tested.values()
        ],
        f"Against {reference}, on the scores (means over samples) of the same problems: paired "
        "bootstrap; exact sign "
        "test, which ignores how much a problem changed; sign-flip permutation test, which does "
        "not.",
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _cost_table(page: Page, found: dict[str, Summary]) -> None:
    columns = {
        **{
            "method": "{method}",
            "output tokens": "{mean_output_tokens:.0f}",
            "times full": "{tokens_times_full:.2f}",
        },
        **{"seconds per text": "{seconds_per_text:.2f}", "seconds": "{seconds:.0f}"},
        **{
            "seconds, times full": "{seconds_times_full:.2f}",
            "tokens/s": "{tokens_per_second:.1f}",
        },
    }
    page.records(
        found.values(),
        columns,
        "Mean output tokens of a text; wall-clock time of decoding, per text and in all (the sum "
        "over processes); "
        "tokens per second. A method with more tokens per second takes longer if its texts are "
        "longer.",
    )


def _mode_table(page: Page, found: dict[str, Summary]) -> None:
    caption = (
        "Error modes on the samples that the full cache solves (their number is in the first "
        "column): repetitive, else "
        "cut at the limit (overlength), else incorrect. Ended early: texts that were stopped for "
        "repetition. Mean "
        "output tokens of the method and the full cache over the samples that both solve."
    )
    if any(s["samples"] > 1 for s in found.values()):
        caption += (
            " Sample i of a problem is paired with the full cache's sample i, another draw: "
            "chance counts too."
        )
    columns = {
        **{
            "method": "{method}",
            "solved by full": "{solved_in_full}",
            **{mode: f"{{{mode}}}" for mode in MODES},
        },
        "ended early": "{stopped_for_repetition}",
        "tokens, both right": "{tokens_both_right:.0f}, full {full_tokens_both_right:.0f} (n = "
        "{n_both_right})",
    }
    page.records(found.values(), columns, caption)


def _text_table(page: Page, found: dict[str, Summary]) -> None:
    columns = {
        "method": "{method}",
        **{f"entropy, {n}-grams": f"{{entropy_{n}_gram:.2f}}" for n in NGRAMS},
        **{f"repeated {n}-grams": f"{{repeated_{n}_grams:.3f}}" for n in NGRAMS},
        "repeated sentences": "{sentence_redundancy:.3f}",
        "repetitive texts": "{share_repetitive:.3f}",
    }
    page.records(
        found.values(),
        columns,
        "Means over texts: entropy of n-grams of tokens in bits (arXiv 2505.13866, equation 1; it "
        "grows with the "
        "length of a text), share of n-grams and of sentences that occurred before in their text; "
        "share of repetitive "
        "texts.",
    )


def _settings(config: dict[str, Any]) -> list[str]:
    """The options, one sentence each."""
    limits = ", ".join(f"{task} {tokens:,}" for task, tokens in config["max_new_tokens"].items())
    samples = ", ".join(f"{task} {number}" for task, number in config["num_samples"].items())
    how = "Greedy decoding"
    if config["temperature"] > 0:
        how = (
            f"Samples of each problem: {samples}; temperature {config['temperature']:g}, top-p "
            f"{config['top_p']:g}, top-k {config['top_k'] or 'unlimited'}, seed {config['seed']}"
        )
    first = (
        f"the prompt (at least {config['sink']})" if config["protect_prompt"] else config["sink"]
    )
    window, distinct = config["repetition"]
    prompts = {
        "full": "in full by all heads",
        "local": "through them, as in training",
        "published": "in full by all heads, their last 50 tokens decoded through them, as in the "
        "evaluation of RLKV",
    }
    stopped = "such texts are ended there" if config["stop_repetitive"] else "such texts continue"
    return [
        f"{how}; new tokens at most: {limits}; {config['batch_size']} texts at once; "
        f"{config['dtype']}.",
        f"Without a policy, compressible heads keep {first} + {config['window']} entries. Prompts "
        "are read "
        f"{prompts[config['prefill']]}; template of maths tasks: "
        f"{config['template'] or 'their own'}.",
        f"Repetitive: {window} tokens hold fewer than {distinct} distinct ones; {stopped}.",
        f"{config['processes']} process{'es' if config['processes'] > 1 else ''}.",
        *([f"Programs were shut in by {config['sandbox']}."] if "sandbox" in config else []),
    ]
