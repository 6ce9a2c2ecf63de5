"""Offline throughput of the vLLM plugin against the stock engine, both in one process.

All runs have the same requests and KV pools of the same bytes; weights are random.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from rlkv.benchmarks.turns import LlamaSizes, check_sparsities, write_result
from rlkv.evaluation.report import FULL_CACHE, Page, Panel, Point
from rlkv.eviction import EvictionPolicy, make_policy
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import check_least
from rlkv.models.loading import DTYPES
from rlkv.models.shape import ModelShape
from rlkv.utils.files import write_json
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import hardware_line
from rlkv.vllm.plugin import check_installed, installed_version
from rlkv.vllm.settings import CHECK, EVICTIONS, VARIABLES

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the steps are taken here
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
# the first would replace the pool that is asked for, the second slows the plugin's steps, the
# others add it to the stock engine
REMOVED = ("VLLM_CPU_KVCACHE_SPACE", CHECK, *VARIABLES.values())
# settings of the plugin by the way in which compressible heads are served
WAYS: dict[str, Any] = {"exact": {}, "aligned": {"aligned_windows": True}, "keep": {"mode": "keep"}}
COLUMNS = {
    "mode": "{mode}",
    "tokens/s": "{tokens_per_second:.1f}",
    "x full cache": "{speedup:.2f} [{speedup_low:.2f}, {speedup_high:.2f}]",
    "theory": "{theory:.2f}",
    "steps, full / this": "{fewer_steps:.2f}",
}
NOTE = (
    "Medians over the rounds, in brackets the least and the greatest; tokens of prompts and "
    "outputs. A mode and the stock engine are in one process and take steps by turns; the seconds "
    "of each are those of its own steps. Theory: 1 / ((1-s) + s K/L) with the mean length L and "
    "room for K entries, S+W or budget and buffer, where memory is the limit; in mode keep K is L."
)


@dataclass(frozen=True, kw_only=True)
class ServingConfig(LlamaSizes):
    """Tokens per second with vLLM, full cache and head reallocation, in pools of equal bytes.

    rlkv-bench serving                           # about half an hour on 2 cores
    rlkv-bench serving --config bench_llama8b    # for a GPU of 80 GB
    rlkv-bench serving --eviction rkv --budget 64 --buffer 32
    """

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1408
    query_heads: int = 8
    vocabulary: int = 2048
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type of weights and KV."""
    requests: int = 48
    """Requests, all at once."""
    prompt_tokens: int = 48
    """Mean tokens of a prompt."""
    output_tokens: int = 320
    """Mean tokens of an output."""
    spread: float = 0.6
    """Lengths are uniform between 1 - spread and 1 + spread times the mean."""
    sparsities: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6)
    """Compared with the full cache."""
    sink: int = 4
    """First tokens that compressible heads keep without an eviction policy."""
    window: int = 28
    """Last tokens that they keep."""
    ways: tuple[Literal["exact", "aligned", "keep"], ...] = ("exact",)
    """Run each sparsity with exact windows, with aligned ones, in mode keep."""
    eviction: str | None = None
    """Run each sparsity with this policy too."""
    budget: int = 64
    """Entries that an eviction keeps."""
    buffer: int = 32
    """Entries between two evictions."""
    pool_tokens: int = 2048
    """Full-cache tokens in the pool; with few --rows and many of these, memory is not the limit."""
    rows: int = 64
    """Requests that may run at once."""
    block_size: int = 32
    """Tokens in a block."""
    step_tokens: int = 128
    """Most tokens that the engine reads in one step."""
    eager: bool = True
    """Whether the engine runs without compilation and CUDA graphs."""
    rounds: int = 5
    """Times that all requests are run."""
    turn_steps: int = 8
    """Steps that an engine takes before the other one takes its own."""
    output_dir: Path = Path("results/serving")
    """Where the results go: .json, .md and .png."""

    def check(self) -> None:
        super().check()
        self.check_rotation()
        check_least(self, 0, "sink")
        check_least(self, 1, "window", "requests", "rounds", "prompt_tokens", "output_tokens")
        check_least(self, 1, "block_size", "rows", "step_tokens", "turn_steps")
        if not 0 <= self.spread < 1:
            raise ValueError(f"--spread {self.spread:g}: give a number from 0 to below 1")
        if self.pool_tokens < self.positions:
            raise ValueError(
                f"--pool-tokens is {self.pool_tokens}: the pool must hold one request of "
                f"{self.positions} tokens"
            )
        if self.eviction is not None and self.eviction not in EVICTIONS:
            raise ValueError(
                f"--eviction {self.eviction!r} is not served: choose from {', '.join(EVICTIONS)}"
            )
        if not self.sparsities or not (self.ways or self.eviction):
            raise ValueError(
                "there is nothing to run beside the full cache: give --sparsities, and --ways or "
                "--eviction"
            )
        if len(set(self.ways)) != len(self.ways):
            raise ValueError(f"--ways {' '.join(self.ways)}: give each once")
        is_share = [0 < sparsity <= 1 for sparsity in self.sparsities]
        wanted = "above 0 and up to 1 (the full cache always runs)"
        check_sparsities(self.sparsities, is_share, wanted)
        self.policy(self.eviction)  # for its errors

    @property
    def positions(self) -> int:
        """Tokens of the longest request, with one for rounding."""
        return int((1 + self.spread) * (self.prompt_tokens + self.output_tokens)) + 2

    @property
    def pool_bytes(self) -> int:
        """Whole blocks of the full cache, and the one that the engine sets aside."""
        token = 2 * self.layers * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize
        return (-(-self.pool_tokens // self.block_size) + 1) * self.block_size * token

    def policy(self, eviction: str | None) -> EvictionPolicy | None:
        """Return the policy of this name; None: sinks and window."""
        if eviction is None:
            return None
        return make_policy(eviction, budget=self.budget, buffer=self.buffer)

    def draw_requests(self) -> list[tuple[list[int], int]]:
        """Return prompts of random tokens with the tokens of their outputs."""
        draw = torch.Generator().manual_seed(0)
        requests = []
        for _ in range(self.requests):
            lengths = []
            for mean in (self.prompt_tokens, self.output_tokens):
                share = 1 + self.spread * (2 * float(torch.rand((), generator=draw)) - 1)
                lengths.append(max(1, round(share * mean)))
            prompt = torch.randint(self.vocabulary, (lengths[0],), generator=draw)
            requests.append((prompt.tolist(), lengths[1]))
        return requests

    def random_gates(self) -> HeadGates:
        """Return gates that nothing was trained for: speed does not depend on which are full."""
        draw = torch.Generator().manual_seed(0)
        alpha = torch.rand(self.layers, self.kv_heads, generator=draw)
        heads = (self.layers, self.kv_heads, self.query_heads, self.head_dim)
        shape = ModelShape("", "llama", *heads)
        return HeadGates(alpha, model=shape, deploy_sink=self.sink, deploy_window=self.window)


@dataclass(frozen=True)
class Mode:
    """A way of serving: at ``sparsity`` None by the stock engine, else by the plugin."""

    sparsity: float | None = None
    eviction: str | None = None
    way: str = "exact"

    @property
    def name(self) -> str:
        if self.sparsity is None:
            return FULL_CACHE
        added = self.eviction or ("" if self.way == "exact" else self.way)
        return f"sparsity {self.sparsity:g}" + (f" + {added}" if added else "")


def engine_options(config: ServingConfig, mode: Mode, folder: Path) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``."""
    options: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": 0,
        "max_model_len": config.positions,
        "max_num_seqs": config.rows,
        "max_num_batched_tokens": config.step_tokens,
        "block_size": config.block_size,
        "kv_cache_memory_bytes": config.pool_bytes,
        "gpu_memory_utilization": 0.45,  # of a GPU that two engines share; checked at start alone
        "enable_prefix_caching": False,
        "enforce_eager": config.eager,
    }
    if mode.sparsity is None:
        return options
    policy = config.policy(mode.eviction)
    kept: dict[str, Any] = {"sink": config.sink, "window": config.window}
    if policy is not None:
        kept = {"eviction": policy.describe()}
    plugin = {
        "gates": str(folder / "gates.safetensors"),
        "sparsity": mode.sparsity,
        "reference_tokens": config.prompt_tokens + config.output_tokens,
        **WAYS[mode.way],
        **kept,
    }
    return options | {"additional_config": {"rlkv": plugin}}


def run_pair(config: ServingConfig, mode: Mode, folder: Path) -> list[dict[str, Any]]:
    """Run a mode beside the stock engine in a process of its own.

    Returns:
        What each of the two took in each round.

    Raises:
        ValueError: with the engine's error if it fails.
    """
    environment = {**os.environ, **ENVIRONMENT}
    for name in REMOVED:
        environment.pop(name, None)
    spec = folder / "spec.json"
    engines = {}
    for own in (Mode(), mode):
        engines[own.name] = engine_options(config, own, folder)
    requests = config.draw_requests()
    chosen = {"rounds": config.rounds, "turn_steps": config.turn_steps}
    write_json(spec, {"engines": engines, "requests": requests, **chosen})
    log = config.output_dir / "serving_run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "rlkv.benchmarks.engines", str(spec), str(result)]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
    if done.returncode or not result.exists():
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "Error: " in line]
        error = errors[-1] if errors else f"exit code {done.returncode}"
        raise ValueError(f"the run of {mode.name} failed: {error}; its output is in {log}")
    log.unlink()
    prompts = sum(len(prompt) for prompt, _ in requests)
    runs = []
    for number, found in enumerate(json.loads(result.read_text())["rounds"]):
        for name, spent in found.items():
            speed = (prompts + spent["tokens"]) / spent["seconds"]
            facts = {"round": number, "beside": mode.name, "mode": name}
            runs.append({**facts, **spent, "tokens_per_second": speed})
    return runs


def summarize(config: ServingConfig, modes: list[Mode], runs: list[dict[str, Any]]) -> list[Any]:
    """Return a row per mode; a run is compared with the full cache's beside it."""
    own: dict[str, list[dict[str, Any]]] = defaultdict(list)
    beside: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        own[run["mode"]].append(run)
        if run["mode"] == FULL_CACHE:
            beside[run["beside"]].append(run)
    beside[FULL_CACHE] = own[FULL_CACHE]
    gates = config.random_gates()
    length = config.prompt_tokens + config.output_tokens
    rows = []
    for mode in modes:
        ratios = []
        for run, full in zip(own[mode.name], beside[mode.name], strict=True):
            ratios.append(run["tokens_per_second"] / full["tokens_per_second"])
        row = {
            "mode": mode.name,
            "sparsity": mode.sparsity,
            "eviction": mode.eviction,
            "way": mode.way,
            "tokens_per_second": median(run["tokens_per_second"] for run in own[mode.name]),
            "speedup": median(ratios),
            "speedup_low": min(ratios),
            "speedup_high": max(ratios),
            "fewer_steps": beside[mode.name][0]["steps"] / own[mode.name][0]["steps"],
        }
        if mode.sparsity is not None:
            sparsity = HeadAllocation.from_gates(gates, mode.sparsity).sparsity
            kept = config.budget + config.buffer if mode.eviction else config.sink + config.window
            if mode.way == "keep":
                kept = length  # it saves reads, and no room in the pool
            row["theory"] = theoretical_speedup(sparsity, kept, length)
        rows.append(row)
    return rows


def theoretical_speedup(sparsity: float, kept: int, length: float) -> float:
    """Return how many times the requests fit if each always had its mean length."""
    return 1 / (1 - sparsity + sparsity * min(kept, length) / length)


def run_serving(config: ServingConfig) -> None:
    """Run every mode beside the stock engine, and write the results."""
    check_installed()
    modes = []
    for sparsity in config.sparsities:
        for way in config.ways:
            modes.append(Mode(sparsity, way=way))
        if config.eviction:
            modes.append(Mode(sparsity, config.eviction))
    runs = []
    with TemporaryDirectory() as name, progress_bar("serving", "modes", len(modes)) as bar:
        folder = Path(name)
        config.llama(config.positions).save_pretrained(folder)
        config.random_gates().save(folder / "gates.safetensors")
        for mode in modes:
            runs += run_pair(config, mode, folder)
            bar.advance()
    rows = summarize(config, [Mode(), *modes], runs)
    curves: dict[str, list[Point]] = defaultdict(list)
    for row in rows[1:]:
        policy = f" + {row['eviction']}" if row["eviction"] else ""
        if row["way"] != "exact":
            policy = f", {row['way']}"
        speed = (row["speedup"], row["speedup_low"], row["speedup_high"])
        curves[f"tokens/s{policy}"].append((row["sparsity"], *speed))
        curves[f"theory{policy}"].append((row["sparsity"], *[row["theory"]] * 3))
    ylabel = "times the full cache, same pool bytes"
    panel = Panel("throughput", "sparsity", curves, ylabel, reference=1.0, limits=None)
    page = Page("rlkv-bench serving")
    page.paragraph(
        f"{config.requests} requests at once, prompts of {config.prompt_tokens} and outputs of "
        f"{config.output_tokens} tokens on average; up to {config.rows} run; a pool of "
        f"{config.pool_bytes:,} bytes, {config.pool_tokens:,} tokens of the full cache."
    )
    page.records(rows, COLUMNS)
    page.paragraph(NOTE)
    title = (
        f"Llama of {config.layers} layers, {config.kv_heads} KV heads of {config.head_dim}, hidden "
        f"{config.hidden}, random weights and gates, {config.dtype}; vLLM "
        f"{installed_version()}, {'eager' if config.eager else 'compiled'}; {hardware_line()}"
    )
    facts = {"runs": runs, "vllm": installed_version()}
    write_result(config, "serving", title, facts, rows, page, [panel])
