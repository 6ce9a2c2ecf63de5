"""The authors' own sweeps of sinks and window, next to one's own."""

from __future__ import annotations

import re

from rlkv.evaluation.measurements import Metrics
from rlkv.evaluation.report import Page, PublishedNumber, find_published
from rlkv.evaluation.window_grid import Grid

_METHOD = re.compile(r"rlkv@sink=(\d+),window=(\d+)")
AT = 0.6  # the sparsity of the authors' sweep
FACTORS = (1, 2, 4)


def published_sweeps() -> dict[tuple[str, str, str], dict[str, PublishedNumber]]:
    """By place, model and task: accuracy in percent at sparsity 0.6 by sizes ("16 + 64"), and of
    the full cache.
    """
    sweeps: dict[tuple[str, str, str], dict[str, PublishedNumber]] = {}
    for number in find_published():
        match = _METHOD.fullmatch(number.method)
        if match and number.sparsity == AT:
            key = (number.source.where, number.model, number.task)
            sweeps.setdefault(key, {})[f"{match[1]} + {match[2]}"] = number
    for number in find_published(method="full"):
        key = (number.source.where, number.model, number.task)
        if key in sweeps:
            sweeps[key]["full"] = number
    return sweeps


def write_published_sweeps(page: Page, model: str, grid: Grid, tasks: dict[str, Metrics]) -> None:
    """A table of the published sweeps and, with the same factors over the base sizes, one's own."""
    page.heading("The authors' sweep, and this one")
    place = min(range(len(grid.sparsities)), key=lambda i: abs(grid.sparsities[i] - AT))
    rows, sources = [], []
    for task, found in tasks.items():
        full = found["full"]
        cells = [_percent(full)]
        for factor in FACTORS:
            name = f"{factor * grid.base.sink} + {factor * grid.base.window}"
            of = found["cells"].get(name)
            cells.append("" if of is None else f"{name}: {_percent(of[place])}")
        rows.append([f"this study: {model}", task, f"{grid.sparsities[place]:g}", *cells])
    for (where, name, task), numbers in published_sweeps().items():
        source = next(iter(numbers.values())).source
        sources.append(f"{where}: {source.paper} (arXiv {source.arxiv}); {source.protocol}")
        sizes = [f"{factor * 16} + {factor * 64}" for factor in FACTORS]
        shown = [f"{of}: {numbers[of].value:.1f}" if of in numbers else "" for of in sizes]
        full_value = f"{numbers['full'].value:.1f}" if "full" in numbers else ""
        rows.append(
            [
                f"published: {name.rpartition('/')[2]} ({where.partition(',')[0]})",
                task,
                f"{AT:g}",
                full_value,
                *shown,
            ]
        )
    own = (grid.base.sink, grid.base.window)
    differ = (
        ""
        if own == (16, 64)
        else f" This study's base sizes are {grid.base}, the authors' 16 + 64."
    )
    page.table(
        ["model", "task", "s", "full cache", *(f"sizes x {factor}" for factor in FACTORS)],
        rows,
        "Accuracy in percent by sinks + window without a protected prompt; brackets: 95% "
        "intervals, which "
        f"nothing published has.{differ}",
    )
    page.bullets(list(dict.fromkeys(sources)))


def _percent(accuracy: Metrics) -> str:
    mean, low, high = (100 * accuracy[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"
