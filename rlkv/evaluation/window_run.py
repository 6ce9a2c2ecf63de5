"""A window study from its options to the files."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.measurements import Measurements, Metrics, Sizes
from rlkv.evaluation.report import FULL_CACHE, Page, provenance_facts
from rlkv.evaluation.study import study_tasks
from rlkv.evaluation.tasks.registry import find_tasks
from rlkv.evaluation.window_config import WindowConfig
from rlkv.evaluation.window_grid import Grid
from rlkv.evaluation.window_metrics import candidates, task_metrics
from rlkv.evaluation.window_published import FACTORS, write_published_sweeps
from rlkv.evaluation.window_recommend import choose, recommend
from rlkv.evaluation.window_report import findings, write_task
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.files import write_json
from rlkv.utils.runtime import provenance
from rlkv.utils.store import check_results


def load_grid(config: WindowConfig) -> Grid:
    """Everything that the options name, read and checked before anything is written."""
    find_tasks(config.tasks, config.data)  # a wrong name is refused before the model is loaded
    gates = HeadGates.load(config.gates)
    cache = config.cache_settings({"": gates})
    model, tokenizer = config.load()
    gates.check_model(model.config)
    base = Sizes(cache.sink, cache.window)
    sinks = config.sinks or tuple(factor * base.sink for factor in FACTORS)
    windows = config.windows or tuple(factor * base.window for factor in FACTORS)
    tasks = study_tasks(config, cache, [gates], tokenizer)
    measurements = Measurements(
        model, tokenizer, tasks, config.output_dir / "rows", {"model": config.model}
    )
    return Grid(
        gates,
        measurements,
        EntrySize.of(model),
        base,
        tuple(sorted({base.sink, *sinks})),
        tuple(sorted({base.window, *windows})),
        tuple(sorted(set(config.sparsities))),
    )


def run_window_study(config: WindowConfig) -> list[str]:
    """Measure, report, and write the gates if asked for; the findings.

    Raises:
        ValueError: if gates are to be written but no setting is recommended; the report is there by
            then.
    """
    started = time.monotonic()
    check_results(
        config.output_dir, "results.json", ("report.html", "report.md"), ("recommendation",)
    )
    grid = load_grid(config)
    measurements, tasks = grid.measurements, list(grid.measurements.tasks)
    # the full cache first: bytes are counted on its texts
    measurements.measure(FULL_CACHE, [(FULL_CACHE, grid.full_condition(task)) for task in tasks])
    measurements.measure("settings", grid.conditions())
    full = {task: grid.full(task).correct for task in tasks}
    settings, rule = candidates(grid), (full, config.margin, config.byte_budget)
    alone = [choose([of for of in settings if of.sparsity == s], *rule) for s in grid.sparsities]
    metrics: Metrics = {
        "base": str(grid.base),
        "sparsities": list(grid.sparsities),
        "margin": config.margin,
        "byte_budget": config.byte_budget,
        "tasks": {task: task_metrics(grid, task) for task in tasks},
        "recommendation": recommend(settings, *rule),
        "by_sparsity": [None if of is None else str(of.sizes) for of in alone],
    }
    lines = findings(metrics)
    _write_report(config, grid, metrics, lines, time.monotonic() - started)
    if config.write_gates is not None:
        _write_gates(config, config.write_gates, grid, metrics)
    return lines


def _write_gates(config: WindowConfig, file: Path, grid: Grid, metrics: Metrics) -> None:
    found = metrics["recommendation"]
    if found is None:
        raise ValueError(
            f"no setting is recommended, so {file} is not written: allow more with --margin, or "
            "give a --byte-budget"
        )
    summary = {
        name: found[name] for name in ("name", "sparsity", "accuracy", "full", "share", "held_out")
    }
    sizes = Sizes(**found["sizes"])
    replace(
        grid.gates,
        # another prompt may be shorter than those of the study
        deploy_sink=max(sizes.sink, grid.base.sink) if sizes.protect_prompt else sizes.sink,
        deploy_window=sizes.window,
        deploy_protect_prompt=sizes.protect_prompt,
        training={**grid.gates.training, "window_study": {**summary, "margin": config.margin}},
    ).save(file)


def _write_report(
    config: WindowConfig, grid: Grid, metrics: Metrics, lines: list[str], seconds: float
) -> None:
    folder, conditions = config.output_dir, grid.measurements.describe()
    measured = sum(condition["seconds"] for condition in conditions)
    content = {
        "config": asdict(config),
        **provenance(),
        "seconds": {
            "this run, wall": round(seconds, 1),
            "decoding of all conditions, wall": round(measured, 1),
        },
        "findings": lines,
        **metrics,
        "conditions": conditions,
    }
    write_json(folder / "results.json", content)
    name = ModelShape.from_config(grid.measurements.model.config).model_id
    page = Page(f"Sinks, window and prompt: {name}")
    page.heading("What the study finds")
    page.bullets(lines)
    for task, found in metrics["tasks"].items():
        write_task(task, found, metrics, page, folder)
    write_published_sweeps(page, name, grid, metrics["tasks"])
    page.heading("How it was measured")
    page.code(content["command"])
    took = (
        f"{len(conditions)} conditions; decoding took {measured:.0f} s of wall time, all runs "
        "and processes together."
    )
    page.bullets([*provenance_facts(content), took])
    page.write_report(folder)
