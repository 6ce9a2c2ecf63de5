"""Two training runs that differ in who samples: do they rank the heads alike, and how long do their rollouts take?"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from rlkv.gates.head_gates import HeadGates
from rlkv.training.loggers import GATES_LOG, LOG, read_log

COLUMNS = ("rollout", "update", "step", "step_cpu")  # seconds of a step, the last in CPU time


def seconds_per_step(folder: Path) -> dict[str, float]:
    """Median seconds of a step's parts; the first step is left out, which warms up and compiles.

    Raises:
        ValueError: if the run has fewer than two steps.
    """
    records = read_log(folder / LOG)[1:]
    if not records:
        raise ValueError(f"{folder} has fewer than two steps: nothing to compare after the first one")
    return {name: statistics.median(record[f"time/{name}_s"] for record in records) for name in COLUMNS}


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Two runs of the same seed, each an output folder of ``train/grpo_gates.py``.

    Returns:
        ``steps``; ``spearman`` of the means of the gates over training; ``final_difference``, the
        largest of the gates; ``equal_steps``, how many first steps had the same rewards and lengths; largest
        difference of log-probabilities in each run; seconds per step of each.
    """
    gates = [HeadGates.load(folder / "gates.safetensors") for folder in (first, second)]
    logs = [read_log(folder / LOG) for folder in (first, second)]
    same = [
        all(a[key] == b[key] for key in ("reward/mean", "response/length_mean")) for a, b in zip(*logs, strict=True)
    ]
    paths = [torch.tensor([r["alpha"] for r in read_log(folder / GATES_LOG)]) for folder in (first, second)]
    return {
        "steps": len(same),
        "spearman": float(spearmanr(*(one.mean_alpha.flatten() for one in gates)).statistic),
        "final_difference": (paths[0][-1] - paths[1][-1]).abs().max().item(),
        "equal_steps": same.index(False) if False in same else len(same),
        "logprob_diff_max": [max(record["rollout/logprob_diff_max"] for record in log) for log in logs],
        "seconds": [seconds_per_step(folder) for folder in (first, second)],
    }


def to_table(rows: dict[int, dict[str, Any]], names: tuple[str, str], hardware: str) -> str:
    """Markdown: a row per seed, seconds of both engines side by side."""
    lines = [
        f"### Who samples: {names[0]} and {names[1]}, the same runs otherwise",
        "",
        f"| seed | Spearman of the ranking | largest difference of a gate | steps with equal rollouts "
        f"| max difference of log-probabilities, {names[1]} | {names[0]}: rollout, update, CPU s per step "
        f"| {names[1]}: rollout, update, CPU s per step |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, row in rows.items():
        times = [f"{part['rollout']:.2f}, {part['update']:.2f}, {part['step_cpu']:.2f}" for part in row["seconds"]]
        equal = f"{row['equal_steps']} of {row['steps']}"
        lines.append(
            f"| {seed} | {row['spearman']:.3f} | {row['final_difference']:.1e} | {equal} "
            f"| {row['logprob_diff_max'][1]:.1e} | {times[0]} | {times[1]} |"
        )
    lines += [
        "",
        "Ranking: the mean of every gate over the training. Equal rollouts: the first steps up to which rewards and "
        "lengths are the same (the draws belong to the rows, so two engines give the same tokens until rounding flips "
        "one). Seconds: medians over the steps without the first; rollout and update by the clock, which other work on "
        f"the machine slows down, and the whole step in CPU time. {hardware}",
    ]
    return "\n".join(lines) + "\n"
