"""A study from its cells to the files: measure, analyse, ``results.json``, ``report.md``, ``report.html``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlkv.evaluation.report.html_page import Page
from rlkv.evaluation.report.markdown_page import write_markdown
from rlkv.evaluation.stats.metrics import FEW_CHANGED
from rlkv.evaluation.study.ablations import Ablations
from rlkv.evaluation.study.base import Analysis, Figures, Study
from rlkv.evaluation.study.bench import OnProgress
from rlkv.evaluation.study.budget import Budget
from rlkv.evaluation.study.comparison import Comparison
from rlkv.evaluation.study.gates import GateDistribution
from rlkv.evaluation.study.lengths import Lengths
from rlkv.evaluation.study.modes import ErrorModes
from rlkv.evaluation.study.sensitivity import Sensitivity
from rlkv.evaluation.study.sweep import Sweep
from rlkv.evaluation.study.text import SEEDS_FIXED
from rlkv.evaluation.study.threshold import NearLossless
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import provenance

MEASURED = "measured.json"
NOT_SAID = "its file does not say"
ANALYSES: dict[str, type[Analysis]] = {
    kind.name: kind
    for kind in (
        Sweep,
        Comparison,
        NearLossless,
        Sensitivity,
        ErrorModes,
        Lengths,
        Budget,
        GateDistribution,
        Ablations,
    )
}


def choose_analyses(names: Sequence[str] | None, has_ablations: bool) -> list[Analysis]:
    """The analyses ``names`` in the order of the report; None: all that can be done.

    Raises:
        ValueError: for an unknown name, and for ablations without gates of any.
    """
    if names is None:
        names = [name for name in ANALYSES if has_ablations or name != Ablations.name]
    for name in names:
        if name not in ANALYSES:
            raise ValueError(f"--analyses: there is no analysis {name!r}: choose from {', '.join(ANALYSES)}")
    if Ablations.name in names and not has_ablations:
        raise ValueError("--analyses names ablations, but no gates of any are given: add --ablation NAME=FILE")
    return [kind() for name, kind in ANALYSES.items() if name in names]


def measure_cells(
    study: Study, analyses: Sequence[Analysis], on_progress: OnProgress, on_stage: Callable[[str], None]
) -> None:
    """Measure what the analyses need.

    ``on_stage`` is called with what comes next, ``on_progress`` as of :meth:`Bench.measure`.
    """
    on_stage("the full cache")
    study.bench.measure(study.full_cells(), on_progress)
    on_stage("all other cells")
    study.bench.measure((wanted for analysis in analyses for wanted in analysis.cells(study)), on_progress)


def run_study(
    study: Study, analyses: Sequence[Analysis], on_progress: OnProgress, on_stage: Callable[[str], None]
) -> dict[str, Figures]:
    """The figures of the analyses by name; as :func:`measure_cells` for the rest."""
    measure_cells(study, analyses, on_progress, on_stage)
    on_stage("figures")
    return {analysis.name: analysis.figures(study) for analysis in analyses}


def write_measured(folder: Path, study: Study) -> None:
    """``measured.json``, which says that every cell is there, for a process that only measures."""
    with atomic_path(folder / MEASURED) as path:
        path.write_text(json.dumps({"cells": study.bench.describe(), **provenance()}, indent=1) + "\n")


def write_report(
    folder: Path,
    title: str,
    study: Study,
    analyses: Sequence[Analysis],
    figures: dict[str, Figures],
    config: dict[str, Any],
    facts: dict[str, Any],
    seconds: float,
) -> None:
    """All files of a study but its rows.

    Args:
        config: the options of the run; facts: :func:`rlkv.utils.provenance.provenance`.
        seconds: wall-clock time of this run; that of the cells counts what earlier runs measured too.
    """
    cells = study.bench.describe()
    measured = sum(cell["seconds"] for cell in cells)
    findings = {analysis.name: analysis.findings(figures[analysis.name]) for analysis in analyses}
    content = {
        "config": config,
        **facts,
        "seconds": {"this run, wall": round(seconds, 1), "decoding of all cells, wall": round(measured, 1)},
        "full_cache": {
            task: {"accuracy": float(study.full(task).correct.mean()), "n": int(study.full(task).correct.size)}
            for task in study.tasks
        },
        "training": _training(study),
        "findings": findings,
        "findings_note": SEEDS_FIXED,
        "analyses": figures,
        "cells": cells,
    }
    with atomic_path(folder / "results.json") as path:
        path.write_text(json.dumps(content, indent=1) + "\n")
    page = Page(title)
    page.heading("What the study finds")
    for task in study.tasks:
        full = study.full(task)
        page.paragraph(
            f"{task}: {full.correct.size} problems, of which the full cache solves {int(full.correct.sum())} "
            f"({full.correct.mean():.3f}), decoded greedily. {len(cells)} different cells were measured.",
        )
    page.bullets([line for lines in findings.values() for line in lines] or ["No analysis that was asked for has any."])
    page.paragraph(
        "Every sentence above is made from the figures below by fixed rules: 'better' and 'worse' stand where a paired "
        "permutation test gives p < 0.05 (not corrected for the number of tests), 'not told apart' everywhere else. "
        f"{FEW_CHANGED} {SEEDS_FIXED}"
    )
    for analysis in analyses:
        page.heading(analysis.title)
        analysis.write(figures[analysis.name], page, folder)
    page.heading("How it was measured")
    _write_facts(page, config, facts, seconds, measured)
    _write_training(page, content["training"])
    write_markdown(page, folder / "report.md")
    page.write(folder / "report.html")


def _write_facts(page: Page, config: dict[str, Any], facts: dict[str, Any], seconds: float, measured: float) -> None:
    page.code(facts["command"])
    machine = facts["hardware"]
    where = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    page.bullets(
        [
            f"{machine['cores']} cores of {machine['cpu']}, {machine['torch_threads']} torch threads, {where}.",
            f"{versions}.",
            f"This run took {seconds:.0f} s of wall time; decoding all cells, also those of earlier runs and of "
            f"other processes, {measured:.0f} s.",
            f"Finished {facts['finished']}.",
        ]
    )
    page.table(["option", "value"], [[name, _value(value)] for name, value in config.items()], "Configuration")


def _training(study: Study) -> dict[str, list[dict[str, Any]]]:
    """For each name and seed what its gates file says of its training, without lists."""
    return {
        ranking.name: [
            {key: value for key, value in gates.training.items() if not isinstance(value, list | dict)}
            for gates in ranking.gates
        ]
        for ranking in [*study.rankings, *study.ablations]
        if ranking.gates
    }


def _write_training(page: Page, training: dict[str, list[dict[str, Any]]]) -> None:
    """The first name's settings, and where each other one's differ."""
    (first, base), *others = ((name, seeds[0]) for name, seeds in training.items())
    rows = [[first, _settings(base) or NOT_SAID]]
    for name, settings in others:
        shown = _settings(settings) or NOT_SAID
        if settings and settings.get("method") == base.get("method"):
            differing = {key: value for key, value in settings.items() if base.get(key) != value}
            shown = _settings(differing) or f"as {first}"
        rows.append([name, shown])
    page.table(
        ["gates", "training"],
        rows,
        f"How the heads were found, as the gates files of the first seeds say; of methods that train as {first} does, "
        "what differs.",
    )


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
