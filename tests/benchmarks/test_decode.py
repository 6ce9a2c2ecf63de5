"""``rlkv-bench decode`` on a model of toy size: bytes, agreement, files; no time is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.benchmarks import decode
from rlkv.benchmarks.decode import LayerSteps, Steps, step_rows
from rlkv.benchmarks.texts import (
    EVICTED,
    bytes_by_length,
    draw_states,
    evict_once,
    largest_batch,
    text_contender,
    text_row,
)
from rlkv.benchmarks.turns import Contender, DecodeConfig, fits, take_turns
from rlkv.cache import HeadReallocationCache
from rlkv.cli.jobs import bench_main
from rlkv.evaluation.evaluate import parse_methods
from rlkv.rollout.footprint import GIB
from tests.helpers.models import TOY_LLAMA
from tests.helpers.programs import exit_code

TOY = DecodeConfig(
    rounds=2,
    seconds=0.0,
    sink=2,
    window=6,
    prompt_tokens=20,
    new_tokens=30,
    **TOY_LLAMA,
    device="cpu",
)
ENTRY = 2 * 8 * 4  # key and value of 8 floats
FULL_HEADS = {"sparsity 0.5": 2, "sparsity 0.9": 0}  # of 4; all in the other caches


def rows_of(kind: type[Steps] = Steps, config: DecodeConfig = TOY) -> dict[str, dict[str, Any]]:
    contenders = kind(config, config.build_model(), 2, 128).contenders()
    take_turns(contenders, config, config.max_steps, config.seconds)
    return {row["cache"]: row for row in step_rows(contenders, config)}


def test_steps_hold_the_bytes_of_their_heads() -> None:
    rows = rows_of()
    names = ["sparsity 0", *FULL_HEADS]
    assert list(rows) == ["DynamicCache", "StaticCache", *names]
    static = rows.pop("StaticCache")
    assert static["kv_bytes"] == 2 * ENTRY * 4 * (128 + 1 + TOY.max_steps)
    for name, row in rows.items():
        full = FULL_HEADS.get(name, 4)
        assert row["kv_bytes"] == 2 * ENTRY * (full * 128 + (4 - full) * 8)
        assert row["kv_bytes_full"] == 2 * ENTRY * 4 * 128
        assert row["steps"] == 2
        assert row["ms_per_step"] > 0
        assert row["speedup_over_dynamic_cache"] > 0
        assert (row["expected_ms"] is not None) is name.startswith("sparsity")


def test_what_was_not_compared_has_no_ratio() -> None:
    contenders = Steps(TOY, TOY.build_model(), 2, 128).contenders()
    take_turns(contenders, TOY, TOY.max_steps, TOY.seconds)
    stock, static, base = contenders[:3]
    stock.fits = False
    rows = {row["cache"]: row for row in step_rows(contenders, TOY)}
    assert rows["StaticCache"]["note"] == rows["sparsity 0.5"]["note"] == ""
    static.fits = False
    rows = {row["cache"]: row for row in step_rows(contenders, TOY)}
    assert rows["sparsity 0.5"]["note"] == "not compared: DynamicCache ran out of memory"
    assert rows["sparsity 0.5"]["speedup_over_sparsity_0"] is None
    static.fits = True
    base.outputs = [output + 1 for output in base.outputs]
    rows = {row["cache"]: row for row in step_rows(contenders, TOY)}
    assert "relative difference to StaticCache" in rows["sparsity 0.5"]["note"]


class Graph:
    """Has room for two steps, which are those of the model."""

    made = 0

    def __init__(self, model: Any, cache: Any, *rows: Any) -> None:
        type(self).made += 1
        self.model = model
        self.cache = cache
        self.room = 2

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def settle(self) -> None:
        assert self.room == 0, "the cache is told its length when the room is used up"

    def __call__(self, token: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        self.room -= 1
        return self.model(token, past_key_values=self.cache, use_cache=True).logits[:, -1]


@pytest.mark.parametrize(
    ("kind", "ways"), [(Steps, ("kernel", "graph")), (LayerSteps, ("kernel",))]
)
def test_kernel_and_graphs_take_turns_where_the_kernel_serves(
    kind: type[Steps], ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "kernel_serves", lambda config: True)
    monkeypatch.setattr(decode, "graphed_step", Graph)
    monkeypatch.setattr(Graph, "made", 0)
    names = [f"sparsity {sparsity}, {way}" for way in ways for sparsity in (0, 0.5, 0.9)]
    rows = rows_of(kind, replace(TOY, layers=1, rounds=1, max_steps=3, seconds=9.0))
    assert list(rows)[-len(names) :] == names
    for name in names:
        assert rows[name]["speedup_over_sparsity_0"] > 0
        assert rows[name]["expected_ms"] is None
    assert Graph.made == (6 if "graph" in ways else 0)  # three steps: two by the first graph


def test_a_graph_that_cannot_be_made_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "kernel_serves", lambda config: True)
    row = rows_of()["sparsity 0, graph"]  # the kernel serves no step on a CPU
    assert row["note"] == "no CUDA graph could be made"
    assert "ms_per_step" not in row


@pytest.mark.parametrize(
    ("kind", "wrong", "options"),
    [
        (Steps, 1.1, {}),
        (LayerSteps, 1.1, {}),
        (LayerSteps, 1.03, {"layer": True, "dtype": "bfloat16"}),
    ],
)
def test_a_ratio_needs_equal_outputs(
    kind: type[Steps], wrong: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TOY, layers=1, **options)
    assert not any(row["note"] for row in rows_of(kind, config).values())
    fill = HeadReallocationCache.fill
    monkeypatch.setattr(
        HeadReallocationCache, "fill", lambda cache, key, value: fill(cache, key, wrong * value)
    )
    for name, row in rows_of(kind, config).items():
        ours = name.startswith("sparsity")
        assert (f"wrong output: relative difference to {kind.stock}" in row["note"]) is ours
        assert (row["speedup_over_dynamic_cache"] is None) is ours
        assert row["speedup_over_sparsity_0"] is None


def test_what_does_not_fit_is_noted_and_the_rest_is_measured() -> None:
    def begin(contender: Contender) -> Any:
        raise torch.OutOfMemoryError("no memory")

    contenders = Steps(TOY, TOY.build_model(), 1, 128).contenders()
    contenders[0].begin = begin
    take_turns(contenders, TOY, 1)
    contenders[2].times = [0.001, 0.006]
    theirs, static, ours, *_ = step_rows(contenders, TOY)
    assert theirs == {**contenders[0].facts, "note": "out of memory"}
    assert ours["speedup_over_dynamic_cache"] is None
    assert ours["kv_bytes_full"] == ENTRY * 4 * 128, "that of the cache that did not fit"
    assert static["speedup_over_sparsity_0"] > 0
    assert ours["ms_quartiles"] == pytest.approx([2.25, 4.75]), "between the times"


def test_another_error_is_not_taken_for_lack_of_memory() -> None:
    def fail() -> None:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        fits(fail)


def test_each_round_starts_with_another() -> None:
    order = []

    def begin(contender: Contender) -> Any:
        order.append(contender.name)
        return lambda index: lambda: torch.zeros(1)

    contenders = [Contender(name, {}, begin) for name in "abc"]
    take_turns(contenders, replace(TOY, rounds=4), 1)
    assert "".join(order) == "abcbcacababc"


def test_a_filled_cache_goes_on_like_one_that_read_a_prompt() -> None:
    model = TOY.build_model()
    model.set_attn_implementation("rlkv_realloc")
    full = torch.tensor([[True, False], [False, True]])
    ids = torch.arange(20)[None] % 32
    read = HeadReallocationCache(full, sink=2, window=6)
    filled = HeadReallocationCache(full, sink=2, window=6)
    states = torch.randn(1, 2, 20, 8)
    with torch.no_grad():
        model(ids, past_key_values=read)
        filled.fill(states, states)
        assert filled.nbytes() == read.nbytes()
        assert filled.get_seq_length() == read.get_seq_length() == 20
        assert model(ids[:, :1], past_key_values=filled).logits.isfinite().all()
    ring = filled.layers[0].stores[-1].keys[0, 0]
    # positions 0, 1 are sinks; 14 .. 19 lie in slot 2 + (position - 2) mod 6
    assert torch.equal(ring[:2], states[0, 1, :2])
    assert torch.equal(ring[2 + (18 - 2) % 6], states[0, 1, 18])


@pytest.mark.parametrize("name", EVICTED)
def test_an_eviction_keeps_half(name: str) -> None:
    policy, keys, values, queries = draw_states(TOY, name, 1, 256)
    kept_keys, kept_values = evict_once(policy, keys, values, queries)
    assert kept_keys.shape == kept_values.shape == (1, 2, 128, 8)
    # the latest entry is always kept
    assert torch.equal(kept_keys[0, 0, -1], keys[0, 0, -1])
    assert torch.equal(kept_values[0, 0, -1], values[0, 0, -1])


def test_texts_have_their_bytes() -> None:
    model = TOY.build_model()
    held = {}
    used = {}
    two_budgets = "random-heads@0.5+full:tova@16"
    for method in parse_methods(["full", "random-heads@0.5", "tova@16", two_budgets], []):
        contender = text_contender(TOY, model, method, 2)
        take_turns([contender], TOY, TOY.new_tokens - 1)
        row = text_row(TOY, model, contender)
        assert row["kv_bytes_full"] == 2 * 4 * 49 * ENTRY
        assert row["tokens_per_second"] == pytest.approx(2 * 30 / row["seconds"])
        held[method.name] = row["kv_bytes"]
        used[method.name] = bytes_by_length(TOY, model, method)[-1]
    assert held["full"] == 2 * 4 * 49 * ENTRY
    # full heads have room for the last token
    assert held["random-heads@0.5"] == 2 * (2 * 50 + 2 * 8) * ENTRY
    assert held["tova@16"] < held["random-heads@0.5"]
    for found, texts in ((held, 2), (used, 1)):
        assert found[two_budgets] == found["tova@16"] / 2 + texts * 2 * 8 * ENTRY


def test_the_largest_batch_fills_the_memory() -> None:
    model = TOY.build_model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    full, half = parse_methods(["full", "random-heads@0.5"], [])
    for method, entries in ((full, 4 * 49), (half, 2 * 49 + 2 * 8)):
        memory = (weights + 10.5 * entries * ENTRY) / GIB
        assert largest_batch(TOY, model, method, memory) == 10
    with pytest.raises(ValueError, match="--memory-gib"):
        largest_batch(TOY, model, full, weights / GIB)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsities": (0.5,)}, "--sparsities must include 0"),
        ({"sparsities": (0.0, 1.5)}, "--sparsities 0 1.5: give each once, from 0 to 1"),
        ({"sparsities": (0.0, 0.5, 0.5)}, "--sparsities 0 0.5 0.5: give each once"),
        ({"sparsities": (0.0, 0.5, 0.50000001)}, "--sparsities 0 0.5 0.5: give each once"),
        ({"methods": ()}, "--methods is empty"),
        ({"memory_gib": float("nan")}, "--memory-gib must be a number above 0, got nan"),
        ({"head_dim": 7}, "--head-dim must be even, got 7"),
        ({"batches": (0,)}, "--batches must be at least 1, got 0"),
        ({"contexts": ()}, "--contexts"),
        (
            {"contexts": (64,), "eviction": True, "texts": False},
            "--contexts must be at least 128, got 64",
        ),
        ({"rounds": 0}, "--rounds"),
        ({"threads": 0}, "--threads"),
        ({"window": 0}, "--window"),
        ({"new_tokens": 1}, "--new-tokens"),
        ({"methods": ("rlkv@0.5",)}, "method 'rlkv@0.5'"),
        ({"query_heads": 5}, "--query-heads 5 must be a multiple of --kv-heads 2"),
        ({"layer": True}, "one at a time"),
        ({"texts": False}, "--prompt-tokens is not read for steps of a model"),
        ({"contexts": (99,)}, "--contexts is not read for --texts"),
        ({"texts": False, "eviction": True, "prompt_tokens": 128, "new_tokens": 512}, "--seconds"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TOY, **{"texts": True, **changes}).check()


def test_quick_changes_only_what_is_not_given() -> None:
    found = DecodeConfig(quick=True, contexts=(64,)).sized()
    assert (found.layers, found.hidden, found.batches, found.contexts) == (4, 256, (1, 2), (64,))
    (policy,) = [method.policy for method in parse_methods(found.methods, []) if method.policy]
    assert policy.budget is not None
    assert policy.budget + policy.buffer < found.prompt_tokens + found.new_tokens, "it evicts"
    assert TOY.sized() == TOY


run = partial(exit_code, bench_main, "rlkv-bench", "decode")


@pytest.mark.parametrize(
    ("options", "name", "rows"),
    [
        ("--contexts 128 --sparsities 0 0.5", "decode", 4),
        ("--contexts 128 --sparsities 0 0.5 --layer", "decode_layer", 3),
        ("--contexts 128 --eviction --max-steps 1", "decode_eviction", len(EVICTED)),
        ("--texts --new-tokens 4 --methods full tova@16", "decode_texts", 2),
    ],
)
def test_the_command_writes_json_table_and_plot(
    options: str, name: str, rows: int, tmp_path: Path
) -> None:
    small = "--quick --batches 1 --rounds 1 --device cpu"
    assert run(*small.split(), *options.split(), "--output-dir", tmp_path) == 0
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"results", "versions", "hardware", "config", "parameters", "dtype"} <= found.keys()
    assert len(found["results"]) == rows
    assert (tmp_path / f"{name}.md").read_text().count("\n|") == 2 + rows
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_a_refusal_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sparsities", "0.5") == 2
    assert capsys.readouterr().err.startswith("error: --sparsities must include 0")
