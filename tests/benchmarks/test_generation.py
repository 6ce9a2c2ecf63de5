"""The benchmark of whole texts on a model of toy size: what it counts; no timing is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlkv.benchmarks import generation
from rlkv.benchmarks.generation import GenerationConfig, Setting, largest_batch, measure_generation
from rlkv.rollout.footprint import GIB
from tests.helpers.models import TOY_LLAMA

TOY = GenerationConfig(
    methods=("full", "random-heads@0.5", "tova@16"),
    batches=(1, 2),
    rounds=2,
    prompt_tokens=20,
    new_tokens=30,
    sink=2,
    window=6,
    **TOY_LLAMA,
    device="cpu",
)
ENTRY = 2 * 8 * 4  # key and value of 8 floats


def test_a_row_for_each_method_and_batch_with_its_bytes() -> None:
    rows = measure_generation(TOY, TOY.model())
    assert [(row["method"], row["batch"]) for row in rows] == [
        (name, n) for name in TOY.methods for n in (1, 2)
    ]
    for row in rows:
        assert row["kv_bytes_full"] == row["batch"] * 4 * 49 * ENTRY
        assert row["seconds"] >= row["prompt_seconds"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 30 / row["seconds"])
    held = {(row["method"], row["batch"]): row["kv_bytes"] for row in rows}
    for n in (1, 2):
        assert held["full", n] == n * 4 * 49 * ENTRY
        assert (
            held["random-heads@0.5", n] == n * (2 * 50 + 2 * 8) * ENTRY
        )  # full heads have room for the last token
        assert held["tova@16", n] < held["random-heads@0.5", n]


def test_the_largest_batch_fills_the_memory() -> None:
    model = TOY.model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    full, half, tova = TOY.parsed
    most = {full.name: 4 * 49 * ENTRY, half.name: (2 * 49 + 2 * 8) * ENTRY}
    for method in (full, half):
        config = replace(TOY, memory_gib=(weights + 10.5 * most[method.name]) / GIB)
        assert largest_batch(config, model, method) == 10
    config = replace(TOY, memory_gib=(weights + 10.5 * most[full.name]) / GIB)
    assert largest_batch(config, model, tova) > largest_batch(config, model, half) > 10
    with pytest.raises(ValueError, match="--memory-gib"):
        largest_batch(replace(TOY, memory_gib=weights / GIB), model, full)


def test_a_setting_out_of_memory_loses_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turn = generation.take_turn

    def short_of_memory(config: GenerationConfig, model: PreTrainedModel, setting: Setting) -> None:
        if setting.batch == 2:
            torch.empty(1 << 50)  # the allocator's own error
        turn(config, model, setting)

    monkeypatch.setattr(generation, "take_turn", short_of_memory)
    replace(TOY, methods=("full",), rounds=1, output_dir=tmp_path).run()
    first, second = json.loads((tmp_path / "generation.json").read_text())["results"]
    assert first["tokens_per_second"] > 0
    assert second == {"method": "full", "batch": 2, "note": "out of memory"}
    assert "out of memory" in (tmp_path / "generation.md").read_text()


def test_files(tmp_path: Path) -> None:
    replace(
        TOY, methods=("full",), batches=(1,), rounds=1, memory_gib=0.001, output_dir=tmp_path
    ).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generation.json",
        "generation.md",
        "generation.png",
    ]
    found = json.loads((tmp_path / "generation.json").read_text())
    first, second = (row["batch"] for row in found["results"])
    assert second > first == 1


@pytest.mark.parametrize(
    ("option", "values"),
    [("batches", (0,)), ("new_tokens", 0), ("methods", ("rlkv@0.5",)), ("rounds", 0)],
)
def test_settings_that_cannot_be(option: str, values: object) -> None:
    with pytest.raises(ValueError, match=r"--|method"):
        replace(TOY, **{option: values}).check()
