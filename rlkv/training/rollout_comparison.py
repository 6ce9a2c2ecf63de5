"""Two training runs that differ in the engine that samples: do they rank the heads alike, and how long do they take?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from rlkv.data.deepscaler import Problem, write_problems
from rlkv.gates.head_gates import HeadGates
from rlkv.tiny.task import longest_solution, problems
from rlkv.training.loggers import GATES_LOG, LOG, read_log
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import hardware_line, provenance

COLUMNS = ("rollout", "update", "step", "step_cpu")  # seconds of a step, the last in CPU time
ENGINES = ("hf", "vllm")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Training runs of the tiny model, twice per seed."""

    output: Path
    """folder for results.json and table.md"""
    runs: Path = Path("outputs/compare_rollouts")
    """folder for the training runs"""
    steps: int = 40
    """optimizer steps of a run"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """one pair of runs each"""
    num_problems: int = 320
    """new problems to train on"""
    max_definitions: int = 6
    """longest problems: so many definitions"""

    def check(self) -> None:
        """Raise ValueError for impossible settings."""
        if self.steps < 2 or self.num_problems < 16:
            raise ValueError("--steps must be at least 2 and --num-problems at least 16")


def train(config: CompareConfig, engine: str, seed: int, curriculum: Path) -> Path:
    """The folder of one run, made in a process of its own unless it is finished.

    Raises:
        ValueError: if the run fails.
    """
    folder = config.runs / f"{engine}-{seed}-{config.steps}-{config.max_definitions}"
    options = {
        "config": "tiny",
        "curriculum": curriculum,
        "output_dir": folder,
        "seed": seed,
        "use_cpu": "true",
        "max_steps": config.steps,
        "max_completion_length": longest_solution(config.max_definitions) + 20,
        "image_steps": 0,
        "rollout": engine,
        "rollout_kv_gib": 0.5,
    }
    command = [sys.executable, "-m", "rlkv.cli.train"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if not (folder / "summary.json").exists() and subprocess.run(command).returncode:
        raise ValueError(f"the run in {folder} failed: its message is above")
    return folder


def compare_engines(config: CompareConfig) -> str:
    """All runs, then ``results.json`` and ``table.md``; returns the table."""
    curriculum = config.runs / f"problems-{config.num_problems}-{config.max_definitions}.jsonl"
    drawn = problems(config.num_problems, 0, max_definitions=config.max_definitions)
    write_problems(curriculum, [Problem(**p) for p in drawn])
    rows = {}
    for seed in config.seeds:
        first, second = (train(config, engine, seed, curriculum) for engine in ENGINES)
        rows[seed] = compare(first, second)
        print(f"seed {seed}: {json.dumps(rows[seed])}", flush=True)
    settings = {**asdict(config), "output": str(config.output), "runs": str(config.runs)}
    with atomic_path(config.output / "results.json") as partial:
        partial.write_text(
            json.dumps({"engines": ENGINES, "config": settings, "seeds": rows, **provenance()}, indent=2)
        )
    table = to_table(rows, ENGINES, hardware_line() + ".")
    with atomic_path(config.output / "table.md") as partial:
        partial.write_text(table)
    return table


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
    """Two runs of the same seed, each an output folder of ``rlkv-train``.

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
    first, second = names
    header = ["seed", "Spearman of the ranking", "largest difference of a gate", "steps with equal rollouts"]
    header += [f"max difference of log-probabilities, {second}"]
    header += [f"{name}: rollout, update, CPU s per step" for name in names]
    lines = [f"### Sampling with {first} and {second}, otherwise the same runs", ""]
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for seed, row in rows.items():
        times = [f"{part['rollout']:.2f}, {part['update']:.2f}, {part['step_cpu']:.2f}" for part in row["seconds"]]
        cells = [seed, f"{row['spearman']:.3f}", f"{row['final_difference']:.1e}"]
        cells += [f"{row['equal_steps']} of {row['steps']}", f"{row['logprob_diff_max'][1]:.1e}", *times]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "Ranking: the mean of every gate over the training. Equal rollouts: the first steps up to which rewards and "
        "lengths are the same (the draws belong to the rows, so two engines give the same tokens until rounding flips "
        "one). Seconds: medians over the steps without the first; rollout and update by the clock, which other work on "
        f"the machine slows down, and the whole step in CPU time. {hardware}",
    ]
    return "\n".join(lines) + "\n"
