"""Which engine decodes, and what fits a GPU; of the times only what follows from their assumptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.rollout import estimate
from rlkv.rollout.estimate import GIB, Footprint, choose_engine, rough
from tests.helpers.models import make_tiny_model

LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


def llama() -> Footprint:
    found = Footprint.of(LLAMA, "bfloat16")
    assert found is not None
    return found


def test_auto_is_vllm_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "find_spec", lambda name: None)
    engine, why = choose_engine("auto")
    assert engine == "hf"
    assert "rlkv[vllm]" in why
    assert choose_engine("vllm") == ("vllm", "")
    monkeypatch.setattr(estimate, "find_spec", lambda name: object())
    assert choose_engine("auto") == ("vllm", "")
    engine, why = choose_engine("auto", processes=4)
    assert engine == "hf"
    assert "vllm-server" in why


def test_rows_fit_what_is_left_for_the_cache() -> None:
    model = llama()
    assert model.kv_per_token == 128 * 1024
    assert model.rows("vllm", 4 * GIB, 8192) == 8  # of 4,096 tokens on average
    assert model.rows("hf", 4 * GIB, 8192) == 2  # of 8,192, and a copy
    room = model.kv_room(80 * GIB)
    assert room / GIB == pytest.approx(72 - model.weights / GIB - 6)
    assert model.rows("vllm", room, 8192) * 4096 * model.kv_per_token <= room
    assert model.rows("vllm", 10**15, 8192, most=128) == 128
    assert model.rows("hf", model.kv_room(8 * GIB), 8192) == 1
    assert model.kv_room(8 * GIB) < 0


def test_more_rows_and_a_gpu_are_faster() -> None:
    model = llama()
    assert model.rate("hf", 32, True) == 2 * model.rate("hf", 16, True)
    assert model.rate("hf", 16, True, mixed=True) < model.rate("hf", 16, True) < model.rate("vllm", 64, True)
    assert model.rate("vllm", 64, False) < model.rate("hf", 16, True) / 10


def test_shapes_of_folders_and_of_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    found = Footprint.of(str(tmp_path / "model"), "float32")
    assert found is not None
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    (tmp_path / "empty").mkdir()
    assert Footprint.of(str(tmp_path / "empty")) is None
    monkeypatch.setattr(estimate, "connection_error", lambda *names: "no network")
    assert Footprint.of("owner/a-model-that-nobody-has") is None


def test_times_are_rounded_to_their_unit() -> None:
    times = [rough(seconds) for seconds in (10, 700, 3 * 3600, 3.4 * 86400)]
    assert times == ["a minute", "12 min", "3.0 h", "3.4 days"]
