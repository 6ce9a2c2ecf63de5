"""Numbers that papers published, as data with their sources, to print next to your own run; never mixed with it.

``published.json`` holds only what was read in a paper's text or its authors' result files.  Models and tasks have the
names that they have here; methods are named by family (``rlkv``, ``duo``, ``kvzip``, ``rkv``, ``h2o``, ``rpc``,
``full``), with ``@`` and settings where a table compares settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Source:
    """Where a number stands, and how it was measured there."""

    paper: str
    arxiv: str
    where: str
    protocol: str


@dataclass(frozen=True)
class PublishedNumber:
    """One number.

    ``sparsity`` is the share of KV heads (head methods) or of entries (token dropping) that is compressed, 0 for the
    full cache, None where the table has none.  Accuracies are percentages.
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
    content = json.loads((files("rlkv.evaluation.report") / "published.json").read_text())
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
    return [
        number
        for number in published_numbers()
        if number.metric == metric
        and model in (None, number.model)
        and task in (None, number.task)
        and method in (None, number.method)
    ]
