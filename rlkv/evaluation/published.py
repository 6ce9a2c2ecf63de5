"""Numbers of the papers, which reports show next to measured ones, marked as such."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlkv.evaluation.report import FULL_CACHE, Page, levels
from rlkv.utils.files import read_json


@dataclass(frozen=True)
class Source:
    """The place of a number, and the setting that it was measured in."""

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
    method: str
    sparsity: float | None
    value: float


@cache
def published_tables() -> dict[str, Any]:
    """Return ``published.json``: the sources by name, and the tables with rows by task."""
    content: dict[str, Any] = read_json(Path(__file__).with_name("published.json"))
    return content


def find_published(model: str, task: str, metric: str = "accuracy") -> list[PublishedNumber]:
    """Return the numbers of a metric for a model on a task."""
    found = []
    for table in published_tables()["tables"]:
        if table["model"] != model or table["metric"] != metric:
            continue
        source = Source(**published_tables()["sources"][table["source"]])
        for method, values in table["rows"].get(task, {}).items():
            for sparsity, value in zip(table["sparsities"], values, strict=True):
                found.append(PublishedNumber(source, method, sparsity, value))
    return found


def published_name(model: str, data: str | Path | None) -> str | None:
    """Return the model of the papers whose name ends as this one (a hub id or a folder) does.

    None where ``data`` is a file: it may hold any problems.
    """
    if data is not None and not Path(data).is_dir():
        return None
    last = model.rstrip("/").rpartition("/")[2].lower()
    for table in published_tables()["tables"]:
        if table["model"].rpartition("/")[2].lower() == last:
            return str(table["model"])
    return None


def write_published(page: Page, name: str | None, task: str) -> None:
    """Add the published accuracies of a model on a task, if there are any, marked as such.

    name: of :func:`published_name`.
    """
    numbers = find_published(name, task) if name else []
    if not numbers:
        return
    page.heading("Published numbers, not measured here", level=3)
    sources = list(dict.fromkeys(number.source for number in numbers))
    sparsities = sorted({n.sparsity for n in numbers if n.sparsity is not None})
    methods: dict[tuple[int, str], dict[float | None, str]] = {}
    for number in numbers:
        values = methods.setdefault((sources.index(number.source) + 1, number.method), {})
        values[number.sparsity] = f"{number.value:.1f}"
    rows = []
    for (source, method), values in sorted(methods.items(), key=lambda item: item[0][0]):
        cells = [values.get(sparsity, "") for sparsity in (*sparsities, None)]
        rows.append([FULL_CACHE if method == "full" else method, *cells, f"[{source}]"])
    page.table(
        ["method", *levels(sparsities), "without s", "source"],
        rows,
        f"{name} on {task}, accuracy in percent as published, without intervals. s: share of KV "
        "heads, or of entries where tokens are dropped in all heads; s = 0 is the full cache.",
    )
    cited = []
    for place, of in enumerate(sources, start=1):
        cited.append(f"[{place}] {of.paper} (arXiv {of.arxiv}), {of.where}: {of.protocol}")
    page.bullets(cited)
