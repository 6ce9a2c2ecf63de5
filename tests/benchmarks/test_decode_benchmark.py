"""The benchmark's bookkeeping on a model of toy size; no timing is judged."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from rlkv.benchmarks.decode_benchmark import BenchmarkConfig, build_model, run_benchmark
from rlkv.cache import HeadReallocationCache
from tests.helpers.paths import ROOT

TOY = BenchmarkConfig(
    batches=(1, 2),
    contexts=(128,),
    rounds=2,
    seconds=0.0,
    sink=2,
    window=6,
    layers=2,
    hidden=32,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=32,
)


def toy_model() -> torch.nn.Module:
    return build_model(TOY, torch.device("cpu"), torch.float32)


def test_rows_and_bytes() -> None:
    turns: list[int] = []
    rows = run_benchmark(toy_model(), TOY, lambda what, done, total: turns.append(total - done))
    assert turns == list(range(20, 0, -1))
    assert [(row["batch"], row["cache"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in ("DynamicCache", "sparsity 0", "sparsity 0.5", "sparsity 0.9")
    ]
    for row in rows:
        entry = 2 * row["batch"] * 8 * 4
        full_heads = {"DynamicCache": 4, "sparsity 0": 4, "sparsity 0.5": 2, "sparsity 0.9": 0}[row["cache"]]
        assert row["kv_bytes_full"] == entry * 4 * 128
        assert row["kv_bytes"] == entry * (full_heads * 128 + (4 - full_heads) * 8)
        assert row["steps"] == 2
        assert row["ms_per_step"] > 0


def test_a_filled_cache_goes_on_like_one_that_read_a_prompt() -> None:
    model = toy_model()
    model.set_attn_implementation("rlkv_realloc")
    full = torch.tensor([[True, False], [False, True]])
    ids = torch.arange(20)[None] % 32
    read = HeadReallocationCache(full, sink=2, window=6)
    with torch.no_grad():
        model(ids, past_key_values=read)
        filled = HeadReallocationCache(full, sink=2, window=6)
        states = torch.randn(1, 2, 20, 8)
        filled.fill(states, states)
        assert filled.nbytes() == read.nbytes()
        assert filled.get_seq_length() == read.get_seq_length() == 20
        assert model(ids[:, :1], past_key_values=filled).logits.isfinite().all()
    ring = filled.layers[0].stores[-1][1].keys[0, 0]
    # positions 0, 1 are sinks; 14 .. 19 lie in slot 2 + (position - 2) mod 6
    assert torch.equal(ring[:2], states[0, 1, :2])
    assert torch.equal(ring[2 + (18 - 2) % 6], states[0, 1, 18])


def test_zero_must_be_measured() -> None:
    with pytest.raises(ValueError, match="must include 0"):
        run_benchmark(toy_model(), BenchmarkConfig(sparsities=(0.5,)))


def test_program_writes_json_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ROOT / "inference" / "benchmark.py"
    options = ["--quick", "--contexts", "64", "--batches", "1", "--rounds", "1", "--sparsities", "0,0.5"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "decode", *options, "--output-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(program), run_name="__main__")
    assert exit_info.value.code == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    assert {"results", "versions", "hardware", "config", "parameters", "dtype"} <= found.keys()
    assert len(found["results"]) == 3
    assert (tmp_path / "decode.md").read_text().count("\n|") == 5
    assert (tmp_path / "decode.png").stat().st_size > 5000
