"""The compaction benchmark at a small size: every policy, ratios that follow from the times, memory that is seen."""

from __future__ import annotations

import sys

import pytest
import torch

from rlkv.benchmarks.compaction_benchmark import (
    POLICIES,
    CompactionConfig,
    build_policy,
    compact_once,
    compaction_table,
    draw_states,
    peak_bytes,
    run_compaction_benchmark,
)
from rlkv.benchmarks.decode_benchmark import BenchmarkConfig

CPU = torch.device("cpu")
SMALL = BenchmarkConfig(batches=(1,), rounds=1, max_steps=2, layers=2, hidden=64, vocabulary=128)
CONFIG = CompactionConfig(entries=(128,), rounds=3, model=SMALL)


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_every_policy_has_a_row_whose_ratios_follow_from_its_times() -> None:
    results = run_compaction_benchmark(CONFIG, CPU, torch.float32)
    assert [(row["policy"], row["entries"]) for row in results] == [(p, 128) for p in POLICIES]
    for row in results:
        assert row["all_layers_over_step"] == pytest.approx(2 * row["compaction_ms"] / row["decode_step_ms"])
        assert row["share_of_a_step"] == pytest.approx(row["all_layers_over_step"] / row["buffer"])
        assert row["compaction_ms"] > 0
    assert len(compaction_table(results).splitlines()) == 2 + len(results)


@pytest.mark.parametrize("name", POLICIES)
def test_a_compaction_keeps_half(name: str) -> None:
    policy = build_policy(name, 256)
    keys, values, queries = draw_states(CONFIG, policy, 256, CPU, torch.float32)
    kept_keys, kept_values = compact_once(policy, keys, values, queries)
    assert kept_keys.shape == kept_values.shape == (1, 8, 128, 64)
    assert torch.equal(kept_keys[0, 0, -1], keys[0, 0, -1])  # the latest entry is always kept


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_every_policy_has_a_high_water_mark() -> None:
    # how large they are is for the benchmark to tell: the system counts pages late and in batches
    peaks = peak_bytes(4096, CONFIG, CPU, torch.float32)
    assert list(peaks) == list(POLICIES)
    assert max(peaks.values()) > 0
