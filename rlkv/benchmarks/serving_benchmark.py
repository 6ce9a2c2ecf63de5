"""Offline throughput of the vLLM plugin: the full cache and head reallocation in turns, each run in its own process.

All requests arrive at once, with the same prompts and forced output lengths, and all modes have pools of the same
bytes. Where memory is the limit, requests that hold less let more of them run in a step. The full cache is the stock
model; the plugin is loaded there too, and idle. Weights are random ("dummy"): time and memory do not depend on them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlkv.benchmarks.serving_workload import SETTINGS, Workload, expect
from rlkv.gates.head_gates import HeadGates
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import hardware, hardware_line, provenance, versions
from rlkv.vllm.settings import EVICTIONS
from rlkv.vllm.versions import check_version, installed_version

FULL = "full cache"
DECIDING_VERSIONS = ("rlkv", "torch", "transformers", "vllm")
PERCENTILES = (50, 90, 99)
# of a run's result; the summary has the median, least and greatest of each
FIGURES = (
    "tokens_per_second",
    "steps",
    "mean_running",
    "preemptions",
    "bytes_per_token",
    "pool_bytes",
    "pool_tokens",
    *(f"{name}_p{share}" for name in ("ttft", "latency") for share in PERCENTILES),
)


@dataclass(frozen=True)
class Run:
    """``sparsity`` None: the stock engine; ``eviction``: the policy of compressible heads, None: sinks and window."""

    setting: str
    sparsity: float | None
    eviction: str | None
    round: int

    @property
    def mode(self) -> str:
        if self.sparsity is None:
            return FULL
        return f"sparsity {self.sparsity:g}" + ("" if self.eviction is None else f" + {self.eviction}")

    @property
    def file(self) -> str:
        return (
            f"{self.setting}, {self.mode}, round {self.round}.json".replace(", ", "_")
            .replace(" + ", "-")
            .replace(" ", "-")
        )


def plan_runs(
    settings: tuple[str, ...], sparsities: tuple[float, ...], rounds: int, eviction: str | None = None
) -> list[Run]:
    """Modes take turns in every round, so that a machine that slows down slows all of them.

    Args:
        eviction: a policy with which every sparsity is run too.

    Raises:
        ValueError: for unknown settings and policies, and sparsities twice or out of (0, 1].
    """
    if eviction is not None and eviction not in EVICTIONS:
        raise ValueError(f"eviction {eviction!r} is not served: choose from {', '.join(EVICTIONS)}")
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(f"unknown setting {setting!r}: choose from {', '.join(SETTINGS)}")
    if len(set(sparsities)) != len(sparsities) or not all(0 < sparsity <= 1 for sparsity in sparsities):
        raise ValueError(f"sparsities {sparsities}: give each once, above 0 and up to 1 (the full cache always runs)")
    policies = (None,) if eviction is None else (None, eviction)
    modes = [(None, None), *((sparsity, policy) for sparsity in sparsities for policy in policies)]
    return [Run(setting, *mode, turn) for setting in settings for turn in range(rounds) for mode in modes]


def check_gates(work: Workload, gates: HeadGates) -> None:
    """Raise ``ValueError`` if the gates are for another number of layers or KV heads."""
    wanted, found = [work.shape.layers, work.shape.kv_heads], list(gates.alpha.shape)
    if found != wanted:
        raise ValueError(
            f"{gates.source}: gates of {found[0]} x {found[1]} heads, the model has {wanted[0]} x {wanted[1]}"
        )


def check_engine_installed() -> None:
    """Raise ``ValueError`` without a tested vLLM that would load the plugin, with what to install."""
    from rlkv.vllm.plugin import check_installed

    check_version(installed_version())
    check_installed()


def settings_of(work: Workload, gates: HeadGates) -> dict[str, Any]:
    """What all runs of a folder must share, for their figures to be compared."""
    machine = {key: value for key, value in hardware().items() if key != "torch_threads"}
    found = {**versions(), "vllm": installed_version()}
    return {
        "workload": json.loads(json.dumps(work.to_dict())),
        "gates": sha256(json.dumps(gates.alpha.tolist()).encode()).hexdigest()[:16],
        "versions": {name: found.get(name) for name in DECIDING_VERSIONS},
        "hardware": machine,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note the settings of a folder of runs.

    Raises:
        ValueError: if the folder holds runs under other settings, naming what differs.
    """
    path = folder / "settings.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        differing = [key for key in settings if earlier.get(key) != settings[key]]
        if differing:
            raise ValueError(
                f"{folder} holds runs with another {' and '.join(differing)}: choose another --output-dir, or --fresh"
            )
        return
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(settings, indent=2) + "\n")


def run_benchmark(
    work: Workload,
    gates: HeadGates,
    runs: list[Run],
    folder: Path,
    on_run: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Do what ``folder`` does not hold yet.

    Args:
        on_run: called before each run with a description, runs done and runs in all.

    Returns:
        One result per run: what :func:`rlkv.benchmarks.serving_process.run` gives, with percentiles of the times.

    Raises:
        ValueError: if a run fails, with its last error and where its output is, and as :func:`claim`.
    """
    claim(folder, settings_of(work, gates))
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(work.shape.config(work.positions), indent=2) + "\n")
    gates.save(model / "gates.safetensors")
    found = []
    for number, run in enumerate(runs):
        if on_run:
            on_run(f"{run.setting}, {run.mode}, round {run.round + 1}", number, len(runs))
        path = folder / run.file
        if not path.exists():
            _run_in_process(work, run, model, path)
        found.append({**asdict(run), "mode": run.mode, **with_percentiles(json.loads(path.read_text()))})
    return found


def _run_in_process(work: Workload, run: Run, model: Path, path: Path) -> None:
    policy = work.policy(run.eviction)
    kept = {"sink": work.sink, "window": work.window} if policy is None else {"eviction": policy.describe()}
    request = {
        "gates": str(model.resolve() / "gates.safetensors"),
        "sparsity": run.sparsity,
        **kept,
        "reference_tokens": round(work.mean_length),
    }
    task = {
        "workload": work.to_dict(),
        "setting": run.setting,
        "model": str(model.resolve()),
        "rlkv": None if run.sparsity is None else request,
    }
    task_path, log = path.with_suffix(".task"), path.with_suffix(".log")
    task_path.write_text(json.dumps(task))
    command = [sys.executable, "-m", "rlkv.benchmarks.serving_process", str(task_path), str(path)]
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    task_path.unlink()
    if code != 0 or not path.exists():
        raise ValueError(
            f"the run {run.setting!r}, {run.mode}, failed: {_last_error(log, code)}; its output is in {log}"
        )
    log.unlink()


def _last_error(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error: " in line]
    return errors[-1] if errors else f"exit code {code}"


def with_percentiles(result: dict[str, Any]) -> dict[str, Any]:
    """The result with ``ttft_p50`` and so on in the place of the times of every request."""
    kept = {key: value for key, value in result.items() if key not in ("ttft", "latency")}
    for name in ("ttft", "latency"):
        for share in PERCENTILES:
            kept[f"{name}_p{share}"] = float(np.percentile(result[name], share))
    return kept


def summarize(work: Workload, gates: HeadGates, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per setting and mode: ``[median, least, greatest]`` of every figure over the rounds.

    ``speedup`` and ``step_ratio`` compare a run with the full cache's of the same round; ``theory`` and ``by_blocks``
    are what the lengths let expect where memory is the limit (:class:`rlkv.benchmarks.serving_workload.Expectation`).

    Raises:
        ValueError: if pools differ by more than one block.
    """
    full = {(row["setting"], row["round"]): row for row in results if row["sparsity"] is None}
    rows = []
    for setting, mode in dict.fromkeys((row["setting"], row["mode"]) for row in results):
        own = [row for row in results if (row["setting"], row["mode"]) == (setting, mode)]
        sparsity, eviction = own[0]["sparsity"], own[0]["eviction"]
        stock = [full[setting, row["round"]] for row in own]
        for row, other in zip(own, stock, strict=True):
            if abs(row["pool_bytes"] - other["pool_bytes"]) >= other["block_bytes"]:
                raise ValueError(
                    f"{setting}, {row['mode']}: a pool of {row['pool_bytes']:,} bytes, but one of "
                    f"{other['pool_bytes']:,} for the full cache: the comparison would not be fair"
                )
        speedup = [row["tokens_per_second"] / other["tokens_per_second"] for row, other in zip(own, stock, strict=True)]
        steps = [other["steps"] / row["steps"] for row, other in zip(own, stock, strict=True)]
        rows.append(
            {
                "setting": setting,
                "mode": mode,
                "sparsity": sparsity,
                "eviction": eviction,
                "rounds": len(own),
                **{name: _spread([row[name] for row in own]) for name in FIGURES},
                "speedup": _spread(speedup),
                "step_ratio": _spread(steps),
                **({} if sparsity is None else {"expected": asdict(expect(work, gates, sparsity, eviction))}),
            }
        )
    return rows


def _spread(values: list[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def facts_and_title(work: Workload, device: str, gates: str | None) -> tuple[dict[str, Any], str]:
    """What the result file carries beside its rows, and a line that names model, engine and machine.

    Args:
        gates: the file that was named; None for random gates.
    """
    facts = provenance()
    facts["versions"]["vllm"] = installed_version()  # also where the distribution is that for CPUs
    shape = work.shape
    how = "eager" if work.eager else "compiled"
    title = (
        f"Llama of {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, hidden {shape.hidden}, random "
        f"weights, {work.dtype}, {gates or 'random gates'}; vLLM {facts['versions']['vllm']}, {how}; {hardware_line()}"
    )
    lengths = {"prompts": [len(prompt) for prompt in work.prompts], "outputs": work.output_lengths}
    return {"device": device, "gates": gates, "workload": work.to_dict(), "lengths": lengths, **facts}, title
