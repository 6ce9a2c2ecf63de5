"""What an eviction costs: its time in all layers against one decode step, and its memory high-water
mark.

A policy with a buffer pays that once per ``buffer`` tokens. States are random.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkv.benchmarks.common import TimingConfig, at_least
from rlkv.benchmarks.decode import realloc_variant, take_turn
from rlkv.benchmarks.turns import peak_bytes, timed
from rlkv.evaluation.report import Panel, Point
from rlkv.eviction import POLICIES, EvictionPolicy, make_policy
from rlkv.utils.progress import progress_bar

# R-KV's cost depends on how many keys are similar: none of the random ones is
ALIKE = "rkv, keys alike"
CASES = (*POLICIES, "rkv published", ALIKE)
MIN_ENTRIES = 128
COLUMNS = {
    "policy": "{policy}",
    "entries": "{entries}",
    "ms per eviction of a layer": "{compaction_ms:.2f}",
    "all layers / decode step": "{all_layers_over_step:.2f}",
    "every tokens": "{buffer}",
    "added to a step": "{share_of_a_step:.1%}",
    "peak bytes beyond the states": "{peak_bytes:,}",
}


@dataclass(frozen=True, kw_only=True)
class CompactionConfig(TimingConfig):
    """Time of one eviction of each policy against one decode step, and its memory high-water mark.

    rlkv-bench compaction        # a few minutes
    """

    rounds: int = 7
    """Turns that each policy and the decode step take."""
    max_steps: int = 3
    """Most timed decode steps in one turn."""
    entries: tuple[int, ...] = (1024, 4096, 16384)
    """Cached entries, of which half are kept."""
    rows: int = 1
    """Sequences."""

    def check(self) -> None:
        super().check()
        at_least(1, rows=self.rows)
        at_least(MIN_ENTRIES, entries=self.entries)  # what policies need to choose from

    def run(self) -> None:
        """Measure and write the results."""
        results = measure_compaction(self)
        curves: dict[str, list[Point]] = defaultdict(list)
        for row in results:
            curves[row["policy"]].append((row["entries"], *[row["share_of_a_step"]] * 3))
        axes = ("entries before an eviction", curves, "time added to a decode step (share)")
        self.write(
            "compaction", results, COLUMNS, [Panel("Eviction", *axes, limits=None, log=True)]
        )


def build_policy(name: str, entries: int) -> EvictionPolicy:
    """The policy as published, with a budget of half of ``entries``."""
    kind, _, variant = name.removesuffix(", keys alike").partition(" ")
    return make_policy(kind, budget=entries // 2, **({"variant": variant} if variant else {}))


def draw_states(
    config: CompactionConfig, name: str, entries: int
) -> tuple[EvictionPolicy, Tensor, Tensor, Tensor]:
    """The policy of a case, keys and values ``[B, H, entries, D]``, queries ``[B, Q, a, D]``."""
    policy, size = build_policy(name, entries), config.head_dim
    torch.manual_seed(0)
    keys, values = (
        torch.randn(config.rows, config.kv_heads, entries, size, **config.options) for _ in "kv"
    )
    if name == ALIKE:  # keys share more than half
        keys += 1.2 * torch.randn(config.rows, config.kv_heads, 1, size, **config.options)
    queries = torch.randn(
        config.rows, config.query_heads, policy.observation, size, **config.options
    )
    return policy, keys, values, queries


@torch.inference_mode()
def evict_once(
    policy: EvictionPolicy, keys: Tensor, values: Tensor, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """One eviction of one layer: choose, and gather keys and values."""
    kept = policy.select(keys, queries, keys.shape[2] // 2)[..., None].expand(
        -1, -1, -1, keys.shape[3]
    )
    return keys.gather(2, kept), values.gather(2, kept)


def measure_compaction(config: CompactionConfig) -> list[dict[str, Any]]:
    """Rows of policy, entries, ms of an eviction (one layer), ms of a decode step, ratios, buffer,
    peak bytes.
    """
    model, results = config.build_model(max(config.entries) + 1024), []
    with progress_bar(
        "compaction", "turns", len(config.entries) * config.rounds * (len(CASES) + 1)
    ) as bar:
        for entries in config.entries:
            step = realloc_variant(config, "full cache", entries)
            times: dict[str, list[float]] = {name: [] for name in CASES}
            for turn in range(config.rounds):
                for name in CASES:
                    states = draw_states(config, name, entries)
                    if turn == 0:
                        evict_once(*states)  # warm up
                    times[name].append(timed(partial(evict_once, *states), model.device))
                    bar.advance()
                take_turn(model, step, config.rows, config)
                bar.advance()
            results += [
                _row(config, name, entries, times[name], step.milliseconds()) for name in CASES
            ]
    return results


def _row(
    config: CompactionConfig, name: str, entries: int, times: list[float], step_ms: float
) -> dict[str, Any]:
    policy, middle = build_policy(name, entries), 1000 * statistics.median(times)
    ratio = config.layers * middle / step_ms
    return {
        "policy": name,
        "entries": entries,
        "compaction_ms": middle,
        "decode_step_ms": step_ms,
        "all_layers_over_step": ratio,
        "buffer": policy.buffer,
        "share_of_a_step": ratio / policy.buffer,
        # beyond keys, values and queries
        "peak_bytes": peak_bytes(
            partial(evict_once, *draw_states(config, name, entries)), config.options["device"]
        ),
        "options": asdict(policy),
    }
