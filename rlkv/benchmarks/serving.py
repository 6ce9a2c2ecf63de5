"""Offline throughput of the vLLM plugin: the full cache and head reallocation in turns, each run in
its own process.

All requests arrive at once, with forced output lengths, and all modes have pools of the same bytes.
Weights are random.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rlkv.benchmarks.common import at_least
from rlkv.benchmarks.workload import LIMITED, PERCENTILES, SETTINGS, Workload, expect
from rlkv.evaluation.report import FULL_CACHE
from rlkv.gates.head_gates import HeadGates
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest, hardware, provenance, versions
from rlkv.utils.store import key_of, open_store
from rlkv.vllm.plugin import installed_version
from rlkv.vllm.settings import EVICTIONS

RUNS = "serving_runs.jsonl"
KEY = ("setting", "mode", "round")
DECIDING_VERSIONS = ("rlkv", "torch", "transformers", "vllm")
# of a run's result; the summary has the median, least and greatest of each
METRICS = (
    "tokens_per_second",
    "steps",
    "mean_running",
    "preemptions",
    "bytes_per_token",
    "pool_bytes",
    "pool_tokens",
    *(f"{name}_p{share}" for name in ("ttft", "latency") for share in PERCENTILES),
)


@dataclass(frozen=True, kw_only=True)
class ServingConfig(Workload):
    """Output tokens per second with vLLM, full cache and head reallocation in turns, in pools of
    equal bytes.

    rlkv-bench serving                           # about an hour on 2 cores; resumes
    rlkv-bench serving --config bench_llama8b    # for a GPU of 40 GB or more
    rlkv-bench serving --sparsities 0.5 --rounds 2
    rlkv-bench serving --eviction rkv --budget 64 --buffer 32
    """

    output_dir: Path = Path("results/serving")
    """Where the results go: .json, .md, .png and the finished runs."""
    sparsities: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6)
    """Compared with the full cache."""
    eviction: str | None = None
    """Run each sparsity with this policy too."""
    settings: tuple[str, ...] = SETTINGS
    """Where memory is the limit, and where it is not."""
    rounds: int = 5
    """Turns that each mode takes."""
    gates: str | None = None
    """A gates file of that shape; default: random gates."""
    fresh: bool = False
    """Drop the finished runs of the folder."""

    def check(self) -> None:
        super().check()
        at_least(1, rounds=self.rounds)
        if self.eviction is not None and self.eviction not in EVICTIONS:
            raise ValueError(
                f"--eviction {self.eviction!r} is not served: choose from {', '.join(EVICTIONS)}"
            )
        unknown = [setting for setting in self.settings if setting not in SETTINGS]
        if unknown:
            raise ValueError(
                f"--settings {unknown[0]!r} is unknown: choose from {', '.join(SETTINGS)}"
            )
        if len(set(self.sparsities)) != len(self.sparsities) or not all(
            0 < s <= 1 for s in self.sparsities
        ):
            shown = " ".join(f"{sparsity:g}" for sparsity in self.sparsities)
            raise ValueError(
                f"--sparsities {shown}: give each once, above 0 and up to 1 (the full cache always "
                "runs)"
            )
        self.policy(self.eviction)  # for its errors

    def runs(self) -> list[Run]:
        """Modes take turns in every round, so that a machine that slows down slows all of them."""
        policies = dict.fromkeys((None, self.eviction))
        modes = [(None, None), *((s, policy) for s in self.sparsities for policy in policies)]
        return [
            Run(setting, sparsity, eviction, turn)
            for setting in self.settings
            for turn in range(self.rounds)
            for sparsity, eviction in modes
        ]

    def head_gates(self) -> HeadGates:
        """The gates file, which must fit the model, or random gates."""
        found = HeadGates.load(self.gates) if self.gates else self.random_gates()
        if found.alpha.shape != (self.layers, self.kv_heads):
            raise ValueError(
                f"{found.source}: gates of {found.num_layers} x {found.num_kv_heads} heads, the "
                "model has "
                f"{self.layers} x {self.kv_heads}"
            )
        return found


@dataclass(frozen=True)
class Run:
    """``sparsity`` None: the stock engine; ``eviction``: the policy of compressible heads, None:
    sinks and window.
    """

    setting: str
    sparsity: float | None
    eviction: str | None
    round: int

    @property
    def mode(self) -> str:
        if self.sparsity is None:
            return FULL_CACHE
        return f"sparsity {self.sparsity:g}" + (
            "" if self.eviction is None else f" + {self.eviction}"
        )


def settings_of(work: Workload, gates: HeadGates) -> dict[str, Any]:
    """What all runs of a folder must share, for their figures to be compared."""
    found = {**versions(), "vllm": installed_version()}
    return {
        "workload": work.to_dict(),
        "gates": digest(gates.alpha.tolist()),
        "versions": {name: found.get(name) for name in DECIDING_VERSIONS},
        "hardware": {key: hardware()[key] for key in ("cpu", "cores", "gpus")},
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def do_runs(config: ServingConfig, gates: HeadGates) -> list[dict[str, Any]]:
    """Do the runs that the folder does not hold yet.

    A result per run (:func:`rlkv.benchmarks.engine_run.run`).
    """
    path, runs = config.output_dir / RUNS, config.runs()
    keys = {(run.setting, run.mode, run.round): run for run in runs}
    with (
        open_store(
            path, settings_of(config, gates), KEY, provenance(), fresh=config.fresh
        ) as store,
        progress_bar("serving", "runs", len(runs)) as bar,
    ):
        bar.resume(len(keys.keys() & store.done))
        for run in [run for key, run in keys.items() if key not in store.done]:
            store.append({**asdict(run), "mode": run.mode, **_run_in_process(config, gates, run)})
            bar.advance()
        return [row for row in store.rows if key_of(row, KEY) in keys]


def _run_in_process(config: ServingConfig, gates: HeadGates, run: Run) -> dict[str, Any]:
    policy = config.policy(run.eviction)
    kept = (
        {"sink": config.sink, "window": config.window}
        if policy is None
        else {"eviction": policy.describe()}
    )
    log = config.output_dir / "serving_run.log"
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.llama(config.positions).to_json_string())
        gates.save(folder / "gates.safetensors")
        request: dict[str, Any] = {
            "gates": str(folder / "gates.safetensors"),
            "sparsity": run.sparsity,
            **kept,
        }
        request["reference_tokens"] = round(config.mean_length)
        plugin = None if run.sparsity is None else request
        task = {"workload": config.to_dict(), "setting": run.setting, "model": name, "rlkv": plugin}
        (folder / "task").write_text(json.dumps(task))
        command = [
            sys.executable,
            "-m",
            "rlkv.benchmarks.engine_run",
            str(folder / "task"),
            str(folder / "result"),
        ]
        with log.open("w") as output:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        if code != 0 or not (folder / "result").exists():
            raise ValueError(
                f"the run {run.setting!r}, {run.mode}, failed: {_last_error(log, code)}; its "
                f"output is in {log}"
            )
        log.unlink()
        return json.loads((folder / "result").read_text())


def _last_error(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error: " in line]
    return errors[-1] if errors else f"exit code {code}"


class Spread(list[float]):
    """Median, least and greatest; formatted as one number where they look the same."""

    def __init__(self, values: list[float]) -> None:
        super().__init__((median(values), min(values), max(values)))

    def __format__(self, form: str) -> str:
        middle, least, greatest = (format(value, form) for value in self)
        return middle if least == greatest else f"{middle} [{least}, {greatest}]"


def summarize(
    work: Workload, gates: HeadGates, results: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per setting and mode: a :class:`Spread` of every metric over the rounds.

    ``speedup`` and ``step_ratio`` compare a run with the full cache's of the same round.
    ValueError if pools differ.
    """
    full = {(row["setting"], row["round"]): row for row in results if row["sparsity"] is None}
    rows: list[dict[str, Any]] = []
    for setting, mode in dict.fromkeys((row["setting"], row["mode"]) for row in results):
        own = [row for row in results if (row["setting"], row["mode"]) == (setting, mode)]
        sparsity, eviction = own[0]["sparsity"], own[0]["eviction"]
        pairs = [(row, full[setting, row["round"]]) for row in own]
        for row, other in pairs:
            if abs(row["pool_bytes"] - other["pool_bytes"]) >= other["block_bytes"]:
                raise ValueError(
                    f"{setting}, {row['mode']}: a pool of {row['pool_bytes']:,} bytes, but one of "
                    f"{other['pool_bytes']:,} for the full cache: the comparison would not be fair"
                )
        rows.append(
            {
                **{
                    "setting": setting,
                    "mode": mode,
                    "sparsity": sparsity,
                    "eviction": eviction,
                    "rounds": len(own),
                },
                **{name: Spread([row[name] for row in own]) for name in METRICS},
                "speedup": Spread(
                    [row["tokens_per_second"] / other["tokens_per_second"] for row, other in pairs]
                ),
                "step_ratio": Spread([other["steps"] / row["steps"] for row, other in pairs]),
            }
        )
        if setting == LIMITED and sparsity is not None:
            rows[-1]["expected"] = expect(work, gates, sparsity, eviction)
    return rows
