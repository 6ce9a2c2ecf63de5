"""What eviction costs: time of one compaction against one decode step, and its memory high-water mark.

Keys, values and queries are random, for one row with a part that all keys share.  A compaction happens in every layer,
so it is compared with a decode step as *layers x one compaction / one step of the whole model*; a policy with a buffer
pays that once per ``buffer`` tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlkv.benchmarks.decode_benchmark import BenchmarkConfig, Variant, build_model, full_cache_variant, take_turn
from rlkv.eviction import make_policy
from rlkv.eviction.base import EvictionPolicy

ALIKE = "rkv, keys alike"  # R-KV's cost depends on how many keys are similar: none of the random ones is
POLICIES = ("rkv", "rkv published", ALIKE, "snapkv", "rpc", "h2o", "tova", "random", "sink_window")
BASE = "full cache step"


@dataclass(frozen=True)
class CompactionConfig:
    """Sizes of a run: half of ``entries`` are kept; ``rounds`` turns of each policy and of the decode step."""

    entries: tuple[int, ...] = (1024, 4096, 16384)
    rows: int = 1
    rounds: int = 7
    model: BenchmarkConfig = field(default_factory=lambda: BenchmarkConfig(batches=(1,), rounds=1, max_steps=3))


def build_policy(name: str, entries: int) -> EvictionPolicy:
    """The policy as published, with a budget of half of ``entries``."""
    kind, _, variant = name.removesuffix(", keys alike").partition(" ")
    options = {"variant": variant} if variant else {}
    return make_policy(kind, budget=entries // 2, **options)


def draw_states(
    config: CompactionConfig,
    policy: EvictionPolicy,
    entries: int,
    device: torch.device,
    dtype: torch.dtype,
    alike: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, H, entries, D]``, queries ``[B, Q, a, D]``; ``alike``: keys share more than half."""
    model = config.model
    torch.manual_seed(0)
    shape = (config.rows, model.kv_heads, entries, model.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in "kv")
    if alike:
        keys += 1.2 * torch.randn(config.rows, model.kv_heads, 1, model.head_dim, device=device, dtype=dtype)
    observed = (config.rows, model.query_heads, policy.observation, model.head_dim)
    return keys, values, torch.randn(observed, device=device, dtype=dtype)


@torch.inference_mode()
def compact_once(
    policy: EvictionPolicy, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One compaction of one layer: choose, and gather keys and values."""
    kept = policy.select(keys, queries, keys.shape[2] // 2)[..., None].expand(-1, -1, -1, keys.shape[3])
    return keys.gather(2, kept), values.gather(2, kept)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(entries: int, config: CompactionConfig, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Bytes beyond keys, values and queries at the high-water mark of a compaction, for each policy.

    On a GPU as its allocator counts; on a CPU the peak resident memory of a process of its own (Linux).
    """
    if device.type == "cuda":
        return {name: _peak_on_gpu(name, entries, config, device, dtype) for name in POLICIES}
    task = {"entries": entries, "rows": config.rows, "dtype": str(dtype).removeprefix("torch.")}
    command = [sys.executable, "-m", "rlkv.benchmarks.compaction_benchmark", json.dumps(task)]
    # every larger buffer straight from the system: what is freed leaves the process, and is seen when it comes again
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def _peak_on_gpu(name: str, entries: int, config: CompactionConfig, device: torch.device, dtype: torch.dtype) -> int:
    policy = build_policy(name, entries)
    states = draw_states(config, policy, entries, device, dtype, alike=name == ALIKE)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compact_once(policy, *states)
    return torch.cuda.max_memory_allocated(device) - before


def _peaks_in_this_process(task: dict[str, Any]) -> dict[str, int]:
    config, device, dtype = CompactionConfig(rows=task["rows"]), torch.device("cpu"), getattr(torch, task["dtype"])
    found = {}
    for name in POLICIES:
        small = build_policy(name, 128)
        compact_once(small, *draw_states(config, small, 128, device, dtype))  # loads what it needs
        policy = build_policy(name, task["entries"])
        states = draw_states(config, policy, task["entries"], device, dtype, alike=name == ALIKE)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = _status_bytes("VmRSS")
        compact_once(policy, *states)
        found[name] = _status_bytes("VmHWM") - before
    return found


def _status_bytes(field_name: str) -> int:
    """A memory figure of this process, which Linux gives in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field_name}:")))


def run_compaction_benchmark(
    config: CompactionConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_turn: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of policy, entries, ms of a compaction (one layer), ms of a decode step, ratios, buffer, peak bytes."""
    sizes = replace(config.model, contexts=config.entries, batches=(config.rows,))
    model = build_model(sizes, device, dtype)
    total, done, results = len(config.entries) * config.rounds * (len(POLICIES) + 1), 0, []
    for entries in config.entries:
        step = full_cache_variant(sizes, entries)
        policies = {name: build_policy(name, entries) for name in POLICIES}
        times: dict[str, list[float]] = {name: [] for name in POLICIES}
        for turn in range(config.rounds):
            for name, policy in policies.items():
                if on_turn:
                    on_turn(f"{entries} entries, {name}", done, total)
                states = draw_states(config, policy, entries, device, dtype, alike=name == ALIKE)
                if turn == 0:
                    compact_once(policy, *states)  # warm up
                times[name].append(_seconds(partial(compact_once, policy, *states), device))
                done += 1
            if on_turn:
                on_turn(f"{entries} entries, {BASE}", done, total)
            take_turn(model, step, config.rows, sizes)
            done += 1
        peaks = peak_bytes(entries, config, device, dtype)
        for name, policy in policies.items():
            results.append(_result(name, policy, entries, times[name], step, sizes.layers, peaks[name]))
    return results


def _result(
    name: str, policy: EvictionPolicy, entries: int, times: list[float], step: Variant, layers: int, peak: int
) -> dict[str, Any]:
    compaction = 1000 * statistics.median(times)
    ratio = layers * compaction / step.milliseconds()
    return {
        "policy": name,
        "entries": entries,
        "compaction_ms": compaction,
        "decode_step_ms": step.milliseconds(),
        "all_layers_over_step": ratio,
        "buffer": policy.buffer,
        "share_of_a_step": ratio / policy.buffer,
        "peak_bytes": peak,
        "options": asdict(policy),
    }


def compaction_table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = "policy | entries | ms per compaction of a layer | all layers / decode step | every tokens | added to a step"
    lines = [f"| {head} | peak memory beyond the states |", "|" + "---|" * 7]
    for row in results:
        lines.append(
            f"| {row['policy']} | {row['entries']} | {row['compaction_ms']:.2f} | {row['all_layers_over_step']:.2f} | "
            f"{row['buffer']} | {row['share_of_a_step']:.1%} | {row['peak_bytes'] / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(_peaks_in_this_process(json.loads(sys.argv[1]))))
