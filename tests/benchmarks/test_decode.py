"""The benchmark's bookkeeping on a model of toy size; no timing is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.benchmarks import decode
from rlkv.benchmarks.decode import DecodeConfig, measure_decode
from rlkv.cache import HeadReallocationCache
from rlkv.cli.jobs import bench_main as main
from tests.helpers.exit_code import exit_code
from tests.helpers.models import TOY_LLAMA

TOY = DecodeConfig(
    batches=(1, 2),
    contexts=(128,),
    rounds=2,
    seconds=0.0,
    sink=2,
    window=6,
    **TOY_LLAMA,
    device="cpu",
)


def toy_model() -> torch.nn.Module:
    return TOY.build_model(1024)


def test_rows_and_bytes() -> None:
    rows = measure_decode(TOY)
    assert [(row["batch"], row["cache"]) for row in rows] == [
        (batch, name)
        for batch in (1, 2)
        for name in ("DynamicCache", "StaticCache", "sparsity 0", "sparsity 0.5", "sparsity 0.9")
    ]
    for row in rows:
        if row["cache"] == "StaticCache":
            assert row["kv_bytes"] == 2 * row["batch"] * 8 * 4 * 4 * (128 + 1 + TOY.max_steps)
            continue
        entry = 2 * row["batch"] * 8 * 4
        full_heads = {"DynamicCache": 4, "sparsity 0": 4, "sparsity 0.5": 2, "sparsity 0.9": 0}[
            row["cache"]
        ]
        assert row["kv_bytes_full"] == entry * 4 * 128
        assert row["kv_bytes"] == entry * (full_heads * 128 + (4 - full_heads) * 8)
        assert row["steps"] == 2
        assert row["ms_per_step"] > 0


@pytest.mark.parametrize(
    ("device", "dtype", "takes_part"),
    [
        ("cuda", "auto", True),
        ("cuda", "float16", True),
        ("cuda", "float32", False),
        ("cpu", "bfloat16", False),
    ],
)
def test_flash_attention_takes_part_where_it_runs(
    device: str, dtype: str, takes_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(decode, "resolve_device", torch.device)
    monkeypatch.setattr(decode, "kernel_serves", lambda config: False)
    variants = decode._variants(replace(TOY, device=device, dtype=dtype), 128)
    found = {variant.name: variant.implementation for variant in variants}
    assert found.get("DynamicCache, FlashAttention") == (
        "flash_attention_2" if takes_part else None
    )


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
    ring = filled.layers[0].stores[-1].keys[0, 0]
    # positions 0, 1 are sinks; 14 .. 19 lie in slot 2 + (position - 2) mod 6
    assert torch.equal(ring[:2], states[0, 1, :2])
    assert torch.equal(ring[2 + (18 - 2) % 6], states[0, 1, 18])


def test_a_ratio_needs_equal_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure_decode(replace(TOY, batches=(1,)))
    assert all(row["speedup_over_dynamic_cache"] and not row["note"] for row in right)
    fill = HeadReallocationCache.fill
    monkeypatch.setattr(
        HeadReallocationCache, "fill", lambda cache, key, value: fill(cache, key, 1.1 * value)
    )
    for row in measure_decode(replace(TOY, batches=(1,))):
        ours = row["cache"].startswith("sparsity")
        assert ("wrong logits: relative difference to DynamicCache" in row["note"]) is ours
        assert (row["speedup_over_dynamic_cache"] is None) is ours
        assert row["speedup_over_sparsity_0"] is None


@pytest.mark.parametrize(
    ("option", "values"),
    [("sparsities", (0.5,)), ("batches", (0,)), ("contexts", ()), ("rounds", 0), ("threads", 0)],
)
def test_settings_that_cannot_be(option: str, values: Any) -> None:
    with pytest.raises(ValueError, match=f"--{option}"):
        replace(TOY, **{option: values}).check()


def test_quick_changes_only_what_is_not_given() -> None:
    found = DecodeConfig(quick=True, contexts=(64,)).sized()
    assert (found.layers, found.hidden, found.batches, found.contexts) == (4, 256, (1, 2), (64,))
    assert TOY.sized() == TOY


run = partial(exit_code, main, "rlkv-bench")


def test_program_writes_json_table_and_plot(tmp_path: Path) -> None:
    options = [
        "--quick",
        "--contexts",
        "64",
        "--batches",
        "1",
        "--rounds",
        "1",
        "--sparsities",
        "0",
        "0.5",
    ]
    assert run("decode", *options, "--output-dir", tmp_path) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    assert {"results", "versions", "hardware", "config", "parameters", "dtype"} <= found.keys()
    assert len(found["results"]) == 4
    assert found["config"]["contexts"] == [64]
    assert (tmp_path / "decode.md").read_text().count("\n|") == 6
    assert (tmp_path / "decode.png").stat().st_size > 5000


def test_a_refusal_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("decode", "--sparsities", "0.5") == 2
    assert capsys.readouterr().err.startswith("error: --sparsities must include 0")


@pytest.mark.parametrize("served", [False, True])
def test_the_kernel_takes_turns_where_it_serves(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "kernel_serves", lambda config: served)
    caches = {variant.name: variant.make() for variant in decode._variants(TOY, 128)}
    ours = {
        name: cache for name, cache in caches.items() if isinstance(cache, HeadReallocationCache)
    }
    switched_on = {name for name, cache in ours.items() if cache.state.decode_kernel}
    kernels = [f"sparsity {sparsity}, kernel" for sparsity in (0, 0.5, 0.9)] if served else []
    assert switched_on == set(kernels)
    rows = {row["cache"]: row for row in measure_decode(replace(TOY, batches=(1,)))}
    assert list(rows)[5:] == kernels
    for name in kernels:
        assert rows[name]["speedup_over_sparsity_0"] > 0
        assert rows[name]["expected_ms"] is None
