"""The numbers of a window study: accuracy and bytes of every setting, and what the same bytes buy
in three ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations

import numpy as np

from rlkv.evaluation.measurements import Metrics, accuracy_of
from rlkv.evaluation.metrics import Floats, paired_difference
from rlkv.evaluation.window_grid import HEADS, PROMPT, WINDOW, Grid, Step
from rlkv.evaluation.window_recommend import Candidate

WAYS = (PROMPT, WINDOW, HEADS)


def task_metrics(grid: Grid, task: str) -> Metrics:
    """All numbers of one task."""
    full = grid.full(task)
    cells = {
        str(sizes): [
            {
                **accuracy_of([grid.outcome(task, sizes, s)], full),
                "share": grid.share(task, sizes, s),
            }
            for s in grid.sparsities
        ]
        for sizes in grid.sizes
    }
    steps = grid.steps(task)
    return {
        "full": accuracy_of([full]),
        "cells": cells,
        "steps": [_step(grid, task, step) for step in steps],
        "pooled": _pooled(grid, task, [step for step in steps if None not in step.ways.values()]),
    }


def candidates(grid: Grid) -> list[Candidate]:
    """Every setting of the grid with its scores."""
    tasks = list(grid.measurements.tasks)
    return [
        Candidate(
            sizes,
            sparsity,
            {task: grid.outcome(task, sizes, sparsity).correct for task in tasks},
            {task: grid.share(task, sizes, sparsity) for task in tasks},
        )
        for sizes in grid.sizes
        for sparsity in grid.sparsities
    ]


def _step(grid: Grid, task: str, step: Step) -> Metrics:
    full, base = grid.full(task), grid.outcome(task, grid.base, step.sparsity)
    base_share, ways = grid.share(task, grid.base, step.sparsity), {}
    for name, way in step.ways.items():
        if way is not None:
            outcome, share = grid.outcome(task, *way), grid.share(task, *way)
            gain = _gain(base.correct, outcome.correct, share - base_share)
            kept = {"sizes": str(way[0]), "sparsity": way[1], "share": share}
            ways[name] = {**kept, "accuracy": accuracy_of([outcome], full), **gain}
    scores = {
        name: grid.outcome(task, *way).correct for name, way in step.ways.items() if way is not None
    }
    return {
        "sparsity": step.sparsity,
        "base": {
            "sizes": str(grid.base),
            "share": base_share,
            "accuracy": accuracy_of([base], full),
        },
        "ways": ways,
        "pairs": _pairs(scores),
    }


def _pooled(grid: Grid, task: str, steps: list[Step]) -> Metrics | None:
    """Of each problem the mean over the steps at which there is every way.

    None without such steps.
    """
    if not steps:
        return None
    base = np.mean([grid.outcome(task, grid.base, step.sparsity).correct for step in steps], axis=0)
    base_share = float(np.mean([grid.share(task, grid.base, step.sparsity) for step in steps]))
    scores, ways = {}, {}
    for name in WAYS:
        of_steps = [way for step in steps if (way := step.ways[name]) is not None]
        scores[name] = np.mean([grid.outcome(task, *way).correct for way in of_steps], axis=0)
        share = float(np.mean([grid.share(task, *way) for way in of_steps]))
        ways[name] = {"share": share, **_gain(base, scores[name], share - base_share)}
    return {"steps": len(steps), "base_share": base_share, "ways": ways, "pairs": _pairs(scores)}


def _gain(base: Floats, scores: Floats, added: float) -> Metrics:
    """The gain in accuracy, and in points per percent of the full cache's bytes.

    None where no bytes were ``added``.
    """
    test = paired_difference(base, scores)
    points = {"mean": test.difference, "low": test.low, "high": test.high}
    rate = {name: value / added for name, value in points.items()} if added > 0 else None
    return {"gain": asdict(test), "per_percent": rate}


def _pairs(scores: Mapping[str, Floats]) -> list[Metrics]:
    """Paired differences of each two ways, first minus second."""
    pairs = combinations([name for name in WAYS if name in scores], 2)
    return [
        {"first": a, "second": b, "difference": asdict(paired_difference(scores[b], scores[a]))}
        for a, b in pairs
    ]
