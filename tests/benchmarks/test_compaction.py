"""The compaction benchmark at a small size: every policy, ratios that follow from the times, memory
that is seen.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rlkv.benchmarks.compaction import (
    CASES,
    CompactionConfig,
    build_policy,
    draw_states,
    evict_once,
    measure_compaction,
)
from rlkv.benchmarks.turns import peak_bytes
from rlkv.eviction import POLICIES

CONFIG = CompactionConfig(
    entries=(128,),
    rounds=3,
    max_steps=2,
    layers=2,
    hidden=64,
    intermediate=170,
    vocabulary=128,
    device="cpu",
)


def test_every_policy_has_a_row_whose_ratios_follow_from_its_times() -> None:
    results = measure_compaction(CONFIG)
    assert [(row["policy"], row["entries"]) for row in results] == [(p, 128) for p in CASES]
    assert set(POLICIES) < set(CASES)
    for row in results:
        assert row["all_layers_over_step"] == pytest.approx(
            2 * row["compaction_ms"] / row["decode_step_ms"]
        )
        assert row["share_of_a_step"] == pytest.approx(row["all_layers_over_step"] / row["buffer"])
        assert row["compaction_ms"] > 0


@pytest.mark.parametrize("name", CASES)
def test_an_eviction_keeps_half(name: str) -> None:
    policy, keys, values, queries = draw_states(CONFIG, name, 256)
    assert policy == build_policy(name, 256)
    kept_keys, kept_values = evict_once(policy, keys, values, queries)
    assert kept_keys.shape == kept_values.shape == (1, 8, 128, 64)
    assert torch.equal(kept_keys[0, 0, -1], keys[0, 0, -1])  # the latest entry is always kept


def test_the_high_water_mark_is_that_of_the_tensors() -> None:
    def peak(name: str) -> int:
        return peak_bytes(
            partial(evict_once, *draw_states(CONFIG, name, 4096)), torch.device("cpu")
        )

    peaks = {name: peak(name) for name in CASES}
    kept = 2 * 8 * 2048 * 64 * 4  # keys and values that stay
    assert min(peaks.values()) > kept
    assert peaks == {name: peak(name) for name in CASES}
    assert peaks["rkv"] > peaks["sink_window"]


def test_too_few_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="--entries 64"):
        CompactionConfig(entries=(64,)).check()
