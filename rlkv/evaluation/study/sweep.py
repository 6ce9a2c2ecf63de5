"""Sparsity sweep (RLKV, figure 5 and tables 4 to 6): every ranking at every sparsity, and what was published."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.report.published import PublishedNumber, find_published
from rlkv.evaluation.study.base import FULL, Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.outcomes import accuracy_of
from rlkv.evaluation.study.pictures import Panel, colours, curves_picture, point
from rlkv.evaluation.study.text import INTERVAL_NOTE, LEGEND, accuracy_cell, levels

ORIENTATION = ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "math500")  # shown where nothing was published
METHOD_NAMES = {"rlkv": "RLKV", "duo": "DuoAttention", "kvzip": "KVzip", "rkv": "R-KV", "h2o": "H2O", "rpc": "RPC"}
PERCENT = "%"


class Sweep(Analysis):
    """Accuracy under every ranking at every sparsity."""

    name: ClassVar[str] = "sweep"
    title: ClassVar[str] = "Accuracy against sparsity"

    def cells(self, study: Study) -> Wanted:
        return study.cells(study.rankings, study.options.sparsities)

    def figures(self, study: Study) -> Figures:
        tasks = {}
        for task in study.tasks:
            full = study.full(task)
            methods = {
                ranking.name: [
                    accuracy_of(study.runs(task, ranking, sparsity), full).to_dict()
                    for sparsity in study.options.sparsities
                ]
                for ranking in study.rankings
            }
            tasks[task] = {
                "full": accuracy_of([full]).to_dict(),
                "methods": methods,
                "published": published_rows(study.options.published, task),
            }
        return {
            "sparsities": list(study.options.sparsities),
            "runs": {ranking.name: ranking.run for ranking in study.rankings},
            "tasks": tasks,
        }

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        sparsities = figures["sparsities"]
        for task, found in figures["tasks"].items():
            full = found["full"]
            rows: list[list[Cell | str]] = [[FULL, *[accuracy_cell(full)] * len(sparsities)]]
            for name, accuracies in found["methods"].items():
                cells = [accuracy_cell(accuracy, figures["runs"][name]) for accuracy in accuracies]
                rows.append([name, *cells])
            shares = [_range([of[i]["kv_share"] for of in found["methods"].values()]) for i in range(len(sparsities))]
            rows.append(["KV held, of full", *shares])
            page.table(
                ["heads", *levels(sparsities)],
                rows,
                f"{task}: greedy accuracy on {full['n']} problems (1 = all right), in parentheses the difference to "
                f"the full cache. {INTERVAL_NOTE} {LEGEND} KV held: bytes of KV in use at the end of each text over "
                "the bytes of the full cache for the same tokens, from the lowest to the highest row.",
            )
            picture = folder / f"sweep-{task.replace(':', '_')}.png"
            curves = {
                name: [point(s, accuracy) for s, accuracy in zip(sparsities, accuracies, strict=True)]
                for name, accuracies in found["methods"].items()
            }
            title, label = f"{task}: accuracy, 95% intervals", "sparsity (share of KV heads that are compressible)"
            curves_picture(
                picture,
                [
                    Panel(
                        title,
                        label,
                        "greedy accuracy",
                        curves,
                        reference=full["mean"],
                        limits=(-0.03, 1.03),
                        colours=colours(list(curves)),
                    )
                ],
            )
            page.picture(picture, f"{task}: greedy accuracy against sparsity on {full['n']} problems, 95% intervals.")
            write_published(found["published"], page)


def published_rows(model: str | None, task: str) -> Figures | None:
    """The published accuracies of a model on a task, as shares; those for orientation where there are none.

    Returns:
        ``model``, ``task``, whether they are ``own`` (of the very model and task), ``sparsities``, ``sources``, and
        ``rows`` of method, source, and for each sparsity the accuracy and its difference to that source's full cache
        (None where the paper has no number); ``others``, sentences on the numbers in another layout.
    """
    for wanted_model, wanted_task in ((model, task), ORIENTATION):
        if wanted_model is None:
            continue
        found = list(filter(_by_sparsity, find_published(wanted_model, wanted_task)))
        rows = _rows(found)
        if rows:
            sparsities = sorted({n.sparsity for n in found if n.sparsity})
            sources = [
                f"{source.where}: {source.paper} (arXiv {source.arxiv}); {source.protocol}"
                for source in dict.fromkeys(n.source for n in found)
            ]
            return {
                "model": wanted_model,
                "task": wanted_task,
                "own": (wanted_model, wanted_task) == (model, task),
                "sparsities": sparsities,
                "sources": sources,
                "rows": [{**row, "values": [row["values"].get(s) for s in sparsities]} for row in rows],
                "others": [] if model is None else _others(model, task),
            }
    return None


def _by_sparsity(number: PublishedNumber) -> bool:
    return number.sparsity is not None and number.unit == PERCENT and "@" not in number.method


def _others(model: str, task: str) -> list[str]:
    """The published accuracies of a model on a task that do not fit a table by sparsity, a sentence for each."""
    return [
        f"{n.source.where}: {n.source.paper} (arXiv {n.source.arxiv}): {METHOD_NAMES.get(n.method, n.method)}"
        f"{'' if n.sparsity is None else f' at s = {n.sparsity:g}'}: {n.value:g} {n.unit}; {n.source.protocol}"
        for n in find_published(model, task)
        if not _by_sparsity(n)
    ]


def _rows(numbers: list[PublishedNumber]) -> list[Figures]:
    full = {(n.source.arxiv, n.source.where): n.value for n in numbers if n.method == "full"}
    rows: dict[tuple[str, str], Figures] = {}
    for n in numbers:
        if n.method == "full":
            continue
        # a table without a full-cache row is compared with the paper's other one
        reference = full.get((n.source.arxiv, n.source.where))
        if reference is None:
            reference = next((value for (arxiv, _), value in full.items() if arxiv == n.source.arxiv), None)
        row = rows.setdefault(
            (n.method, n.source.where),
            {"method": METHOD_NAMES.get(n.method, n.method), "where": n.source.where, "full": reference, "values": {}},
        )
        difference = None if reference is None else (n.value - reference) / 100
        row["values"][n.sparsity] = {"accuracy": n.value / 100, "difference": difference}
    for row in rows.values():
        row["full"] = None if row["full"] is None else row["full"] / 100
    return list(rows.values())


def write_published(published: Figures | None, page: Page) -> None:
    """A table of published numbers, marked as such."""
    if published is None:
        return
    page.heading("Published numbers, not measured here", level=3)
    if not published["own"]:
        page.paragraph(
            "This package holds no published accuracies by share of compressed heads or entries for this model and "
            f"task. For orientation only: {published['model']} on {published['task']}, another model or task."
        )
    rows = []
    for row in published["rows"]:
        cells = [_published_cell(value) for value in row["values"]]
        full = "" if row["full"] is None else f"{row['full']:.3f}"
        rows.append([f"{row['method']} (published, {row['where']})", full, *cells])
    page.table(
        ["method", "full cache", *levels(published["sparsities"])],
        rows,
        f"Published: {published['model']} on {published['task']}, accuracy as a share (printed in percent), in "
        f"parentheses the difference to the full cache; no intervals were published. H2O and R-KV drop tokens in all "
        "heads: there s is the share of entries.",
    )
    page.bullets(published["sources"])
    if published["others"]:
        page.paragraph("Also published for the measured model and task, without a sparsity or with other settings:")
        page.bullets(published["others"])


def _published_cell(value: Figures | None) -> str:
    if value is None:
        return "-"
    difference = "" if value["difference"] is None else f" ({value['difference']:+.3f})"
    return f"{value['accuracy']:.3f}{difference}"


def _range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"
