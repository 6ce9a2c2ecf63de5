"""Part 3: decoding at the 8B shape by batch, context and cache: tokens/s, memory, bytes held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import pytest

from rlkv.benchmarks.decode import GRAPH, KERNEL, Steps, kernel_serves, step_rows
from rlkv.benchmarks.texts import text_contender, text_row
from rlkv.benchmarks.turns import DecodeConfig, take_turns
from rlkv.evaluation.evaluate import parse_methods
from rlkv.rollout import graphed
from rlkv.rollout.footprint import GIB
from rlkv.utils.runtime import GRAPH as SWITCH
from tests.gpu.conftest import LLAMA_8B, RESERVE_GIB, Built, Record, layers_that_fit
from tests.helpers.graphed import AHEAD, WAYS, decode_texts, sample_gated, sample_plain

SPARSITY = 0.5
CONTEXTS = {False: (128, 256), True: (4096, 16384)}


def config_of(built: Built, on_gpu: bool, **options: Any) -> DecodeConfig:
    """Return the options for the model, with few rounds."""
    dtype = str(built.model.dtype).removeprefix("torch.")
    device = str(built.model.device)
    return DecodeConfig(
        **asdict(built.sizes),
        device=device,
        dtype=dtype,
        sparsities=(0.0, SPARSITY),
        rounds=2,
        max_steps=16 if on_gpu else 2,
        **options,
    )


def test_a_decode_step(llama_8b: Built, on_gpu: bool, record_property: Record) -> None:
    config = config_of(llama_8b, on_gpu)
    total = config.layers * config.kv_heads
    heads = total // 2  # that keep all tokens
    for batch in (1, 8, 32) if on_gpu else (1, 8):
        for context in CONTEXTS[on_gpu]:
            contenders = Steps(config, llama_8b.model, batch, context).contenders()
            take_turns(contenders, config, config.max_steps, seconds=2.0)
            rows = step_rows(contenders, config)
            for row, contender in zip(rows, contenders, strict=False):
                if "ms_per_step" in row:
                    row["tokens_per_s"] = 1000 * batch / row["ms_per_step"]
                if contender.peak_bytes is not None:
                    row["peak_gib"] = contender.peak_bytes / GIB
            record_property(f"batch {batch}, context {context}", rows)
            entries = heads * context + (total - heads) * (config.sink + config.window)
            fit = {row["cache"]: row for row in rows if "ms_per_step" in row}
            found = {"DynamicCache", f"sparsity {SPARSITY:g}"}
            if kernel_serves(config):
                found |= {f"sparsity {SPARSITY:g}{way}" for way in (KERNEL, GRAPH)}
            assert batch > 8 or fit.keys() >= found
            if f"sparsity {SPARSITY:g}" in fit and "DynamicCache" in fit:
                held = fit[f"sparsity {SPARSITY:g}"]["kv_bytes"]
                stock = fit["DynamicCache"]["kv_bytes"]
                assert held / stock == pytest.approx(entries / (total * context))
            for row in rows:
                assert row["note"] in ("", "out of memory"), row


def sample_tokens(sample: Callable[[str], Any], device: str) -> list[list[int]]:
    return [text.token_ids for text in sample(device)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("texts", "graphs"),
    [
        *((partial(decode_texts, way), 1) for way in WAYS),
        # full caches
        *((partial(sample_tokens, sample), 3) for sample in (sample_gated, sample_plain)),
    ],
)
def test_graphs_write_the_same_texts(
    texts: Callable[[str], list[list[int]]], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    expected = texts("cuda")
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(graphed, "AHEAD", AHEAD)
    with mock.patch.object(graphed, "record_graph", wraps=graphed.record_graph) as recordings:
        assert texts("cuda") == expected
    assert recordings.call_count >= graphs


def test_texts_with_eviction(llama_8b: Built, on_gpu: bool, record_property: Record) -> None:
    """Compare the full cache with R-KV at the same prompts; what it keeps is another test."""
    config = config_of(
        llama_8b,
        on_gpu,
        prompt_tokens=1024 if on_gpu else 40,
        new_tokens=200 if on_gpu else 20,
    )
    rows = []
    methods = parse_methods(["full", "rkv@512" if on_gpu else "rkv@24"], [])
    for batch in (1, 8):
        compared = [text_contender(config, llama_8b.model, method, batch) for method in methods]
        take_turns(compared, config, config.new_tokens - 1)
        rows += [text_row(config, llama_8b.model, contender) for contender in compared]
    record_property("texts", rows)
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_layers_fit_the_memory() -> None:
    outside = 2 * 128256 * 4096 * 2  # bytes in bfloat16
    layer = 218_103_808 * 2
    reserve = int(RESERVE_GIB * GIB)
    assert layers_that_fit(LLAMA_8B, 140 * GIB) == 32
    assert layers_that_fit(LLAMA_8B, reserve + outside + 5 * layer) == 5
    assert layers_that_fit(LLAMA_8B, reserve + outside + layer - 2) == 0
    assert layers_that_fit(LLAMA_8B, 8 * GIB) < 1
