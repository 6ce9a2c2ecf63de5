"""Train the tiny model's gates twice per seed, sampling with transformers and with vLLM, and
compare the rankings.

    python rollout/compare_rollouts.py --output docs/results/rollouts --steps 40 --seeds 0 1 2

Runs alternate between the engines, on one machine, each in a process of its own.  A finished run is
not repeated, and one that was stopped resumes, so the command can be repeated.  Writes results.json
and table.md to the output folder; the runs themselves go to --runs.
"""

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

from rlkv.cli.app import parse, run_app
from rlkv.data.filter import FilterConfig
from rlkv.evaluation.report import Page
from rlkv.gates.head_gates import HeadGates
from rlkv.tiny import longest_solution, problems
from rlkv.training.run_folder import GATES_LOG, LOG
from rlkv.utils.files import read_log, write_json, write_jsonl
from rlkv.utils.runtime import hardware_line, provenance
from rlkv.utils.store import check_results

PARTS = ("rollout", "update", "step", "step_cpu")  # seconds of a step, the last in CPU time
ENGINES = ("hf", "vllm")
NOTE = (
    "Ranking: the mean of every gate over the training. The engines draw with different samplers, "
    "so rewards and gates agree as those of two seeds do. Seconds: medians over the steps without "
    "the first; rollout and update by the clock, which other work on the machine slows down, and "
    "the whole step in CPU time. "
)


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
    """definitions of the longest problems"""

    def check(self) -> None:
        if self.steps < 2 or self.num_problems < 16:
            raise ValueError("--steps must be at least 2 and --num-problems at least 16")


def training_options(
    config: CompareConfig, engine: str, seed: int, curriculum: Path, folder: Path
) -> list[str]:
    """Return the command line of ``rlkv-train`` for one run."""
    options = {
        "config": "tiny",
        "curriculum": curriculum,
        "output_dir": folder,
        "seed": seed,
        "max_steps": config.steps,
        "max_completion_length": longest_solution(config.max_definitions) + 20,
        "image_steps": 0,
        "rollout": engine,
        "rollout_kv_gib": 0.5,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--use-cpu"]


def train(config: CompareConfig, engine: str, seed: int, curriculum: Path) -> Path:
    """The folder of one run, made in a process of its own unless it is finished.

    ``ValueError`` if it fails.
    """
    name = f"{engine}-{seed}-{config.steps}-{config.num_problems}-{config.max_definitions}"
    folder = config.runs / name
    command = [sys.executable, "-m", "rlkv.cli.train"]
    command += training_options(config, engine, seed, curriculum, folder)
    if not (folder / "summary.json").exists() and subprocess.run(command).returncode:
        raise ValueError(f"the run in {folder} failed: its message is above")
    return folder


def seconds_per_step(folder: Path) -> dict[str, float]:
    """Median seconds of a step's parts; the first step is left out, which warms up and compiles."""
    records = read_log(folder / LOG)[1:]
    if not records:
        raise ValueError(
            f"{folder} has fewer than two steps: nothing to compare after the first one"
        )
    return {
        name: statistics.median(record[f"time/{name}_s"] for record in records) for name in PARTS
    }


def compare(*folders: Path) -> dict[str, Any]:
    """Compare two runs of the same seed, each an output folder of ``rlkv-train``.

    Returns:
        ``steps``; ``spearman`` of the means of the gates over training; ``final_difference``, the
        largest of the gates; the mean reward, the largest difference of log-probabilities and the
        seconds per step of each run.
    """
    alphas = [
        HeadGates.load(folder / "gates.safetensors").mean_alpha.flatten() for folder in folders
    ]
    logs = [read_log(folder / LOG) for folder in folders]
    last = [torch.tensor(read_log(folder / GATES_LOG)[-1]["alpha"]) for folder in folders]
    return {
        "steps": len(logs[0]),
        "spearman": float(spearmanr(*alphas).statistic),
        "final_difference": (last[0] - last[1]).abs().max().item(),
        "reward": [statistics.mean(record["reward/mean"] for record in log) for log in logs],
        "logprob_diff_max": [
            max(record["rollout/logprob_diff_max"] for record in log) for log in logs
        ],
        "seconds": [seconds_per_step(folder) for folder in folders],
    }


def table_page(rows: dict[int, dict[str, Any]]) -> Page:
    """A row per seed, seconds of both engines side by side."""
    columns = [
        "seed",
        "Spearman of the ranking",
        "largest difference of a gate",
        f"mean reward, {' and '.join(ENGINES)}",
    ]
    columns.append(f"max difference of log-probabilities, {ENGINES[1]}")
    columns += [f"{name}: rollout, update, CPU s per step" for name in ENGINES]
    cells = []
    for seed, row in rows.items():
        rewards = " and ".join(f"{reward:.3f}" for reward in row["reward"])
        times = [
            f"{part['rollout']:.2f}, {part['update']:.2f}, {part['step_cpu']:.2f}"
            for part in row["seconds"]
        ]
        measured = [f"{row['spearman']:.3f}", f"{row['final_difference']:.1e}", rewards]
        cells.append([str(seed), *measured, f"{row['logprob_diff_max'][1]:.1e}", *times])
    page = Page("Sampling with hf and vllm, otherwise the same runs")
    page.table(columns, cells)
    page.paragraph(f"{NOTE}{hardware_line()}.")
    return page


def main() -> None:
    config = parse(CompareConfig, __doc__)
    check_results(config.output, "results.json", ("table.md",), ("engines", "seeds"))
    FilterConfig(engine="vllm").check()  # before the first run, if it is not installed
    curriculum = config.runs / f"problems-{config.num_problems}-{config.max_definitions}.jsonl"
    write_jsonl(
        curriculum, problems(config.num_problems, 0, max_definitions=config.max_definitions)
    )
    rows = {}
    for seed in config.seeds:
        rows[seed] = compare(*(train(config, engine, seed, curriculum) for engine in ENGINES))
        print(f"seed {seed}: {json.dumps(rows[seed])}", flush=True)
    results = {"engines": ENGINES, "config": asdict(config), "seeds": rows, **provenance()}
    write_json(config.output / "results.json", results)
    page = table_page(rows)
    page.write(config.output / "table.md")
    print(page.markdown())


if __name__ == "__main__":
    run_app(main)
