"""Numbers that papers published, as data with their sources, to print next to your own run; never mixed with it.

``published.json`` holds only what was read in a paper's text or its authors' result files.  Methods are named by family
(``rlkv``, ``duo``, ``kvzip``, ``rkv``, ``h2o``, ``rpc``, ``full``), with ``@`` and settings where a table has several.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rlkv.evaluation.report.page import Page


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

    ``sparsity`` is the share of KV heads (head methods) or of entries (token dropping) that is compressed, 0 for the
    full cache, None where the table has none.
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
    content = json.loads((files("rlkv.evaluation.report") / "published.json").read_text(encoding="utf-8"))
    sources = {name: Source(**fields) for name, fields in content["sources"].items()}
    return tuple(
        PublishedNumber(
            sources[table["source"]], table["metric"], table["unit"], table["model"], task, method, sparsity, value
        )
        for table in content["tables"]
        for task, methods in table["rows"].items()
        for method, values in methods.items()
        for sparsity, value in zip(table["sparsities"], values, strict=True)
    )


def find_published(
    model: str | None = None, task: str | None = None, method: str | None = None, metric: str = "accuracy"
) -> list[PublishedNumber]:
    """The numbers of a metric, for a model, a task or a method where one is named; empty if nothing was published."""
    wanted = {"model": model, "task": task, "method": method}
    return [
        number
        for number in published_numbers()
        if number.metric == metric and all(value in (None, getattr(number, field)) for field, value in wanted.items())
    ]


def published_name(model: str) -> str | None:
    """The model of the papers whose name ends as this one (a hub id or a folder) does."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    known = {number.model.rpartition("/")[2].lower(): number.model for number in published_numbers()}
    return known.get(last)


def write_published(page: Page, model: str, task: str) -> None:
    """Add the published accuracies of a model on a task, marked as such; nothing if there are none."""
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
        values = {n.sparsity: f"{n.value:.1f}" for n in numbers if (n.source, n.method) == (source, method)}
        cells = [values.get(s, "") for s in (*sparsities, None)]
        rows.append(["full cache" if method == "full" else method, *cells, f"[{sources.index(source) + 1}]"])
    page.table(
        ["method", *(f"s = {s:g}" for s in sparsities), "without s", "source"],
        rows,
        f"{name} on {task}, accuracy in percent as published; no intervals were published. s: share of KV heads, or of "
        "entries where tokens are dropped in all heads; s = 0 is the full cache.",
    )
    page.bullets(
        [f"[{i}] {s.paper} (arXiv {s.arxiv}), {s.where}: {s.protocol}" for i, s in enumerate(sources, start=1)]
    )
