"""What fits a GPU, and how times are rounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkv.rollout import footprint as estimate
from rlkv.rollout.footprint import GIB, Footprint, rough
from tests.helpers.models import make_tiny_model

LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


def llama() -> Footprint:
    found = Footprint.of(LLAMA, "bfloat16")
    assert found is not None
    return found


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


def test_vllm_takes_the_room_or_says_what_it_lacks() -> None:
    model = llama()
    assert model.vllm_kv_gib(80 * GIB, 8192) == model.kv_room(80 * GIB) / GIB
    assert model.lacking(GIB, 8192) == 0
    assert model.lacking(GIB // 4, 8192) == 0.75
    with pytest.raises(ValueError, match=r"7\.6 GiB"):
        model.vllm_kv_gib(16 * GIB, 8192)


def test_shapes_of_folders_and_of_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    found = Footprint.of(str(tmp_path / "model"), "float32")
    assert found is not None
    assert found.architecture == "Qwen3ForCausalLM"
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    (tmp_path / "empty").mkdir()
    assert Footprint.of(str(tmp_path / "empty")) is None
    monkeypatch.setattr(estimate, "connection_error", lambda *names: "no network")
    assert Footprint.of("owner/a-model-that-nobody-has") is None


def test_times_are_rounded_to_their_unit() -> None:
    times = [rough(seconds) for seconds in (10, 700, 3 * 3600, 3.4 * 86400)]
    assert times == ["10 s", "12 min", "3.0 h", "3.4 days"]
