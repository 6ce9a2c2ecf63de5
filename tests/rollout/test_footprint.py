"""What fits a GPU, which GPU is meant, and how times are rounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkv.rollout import footprint
from rlkv.rollout.footprint import CARDS, GIB, Footprint, card_of, parse_gpus, rough
from tests.helpers.models import make_tiny_model

LLAMA = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


@pytest.fixture(scope="module")
def llama() -> Footprint:
    found = Footprint.of(LLAMA, "bfloat16")
    assert found is not None
    return found


def test_rows_fit_what_is_left_for_the_cache(llama: Footprint) -> None:
    assert llama.kv_per_token == 128 * 1024
    assert llama.rows("vllm", 4 * GIB, 8192) == 8  # of 4,096 tokens on average
    assert llama.rows("hf", 4 * GIB, 8192) == 2  # of 8,192, and a copy
    room = llama.kv_room(80 * GIB)
    assert room / GIB == pytest.approx(72 - llama.weights / GIB - 6)
    assert llama.rows("vllm", 10**15, 8192, most=128) == 128
    assert llama.rows("hf", llama.kv_room(8 * GIB), 8192) == 1
    assert llama.kv_room(8 * GIB) < 0


def test_vllm_takes_the_room_or_says_what_it_lacks(llama: Footprint) -> None:
    assert llama.vllm_kv_gib(80 * GIB, 8192) == llama.kv_room(80 * GIB) / GIB
    assert llama.lacking(GIB, 8192) == 0
    assert llama.lacking(GIB // 4, 8192) == 0.75
    with pytest.raises(ValueError, match=r"Llama-8B.* 7\.6 GiB.*--engine hf"):
        llama.vllm_kv_gib(16 * GIB, 8192)


@pytest.mark.parametrize(("free", "expected"), [(80 * GIB, 72 - 15 - 6), (None, 4)])
def test_vllm_takes_what_the_gpu_has_left(
    free: int | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "free_memory", lambda device: free)
    found = footprint.fitting_kv_gib(LLAMA, "bfloat16", 8192)
    assert found == pytest.approx(expected, abs=0.1)


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
    monkeypatch.setattr("rlkv.models.loading.connection_error", lambda *names: "no network")
    assert Footprint.of("owner/a-model-that-nobody-has") is None


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            4,
        ),
    ],
)
def test_quantised_checkpoints_are_smaller(quantised: dict[str, Any], bits: int) -> None:
    config = make_tiny_model("qwen3").config
    plain = Footprint.of_config(config, "a", 2)
    config.quantization_config = quantised
    found = Footprint.of_config(config, "a", 2)
    ends = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    assert found.weights == 2 * ends + (plain.parameters - ends) * bits // 8
    assert (found.parameters, found.kv_per_token) == (plain.parameters, plain.kv_per_token)


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 80, "a100"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA Something New", 96, "a100"),
    ],
)
def test_a_gpu_that_is_here(
    name: str, memory: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=memory * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = card_of(torch.device("cuda", 0))
    assert found is not None
    known = CARDS[key]
    assert found == (type(found))(memory, known.flops, known.bandwidth)
    assert card_of(torch.device("cpu")) is None


def test_names_of_gpus_and_times() -> None:
    assert parse_gpus("8xH100") == (8, "h100")
    assert parse_gpus("a100-40") == (1, "a100-40")
    for text in ("h1000", "0xh100", "8x", "x h100"):
        with pytest.raises(ValueError, match=r"8xh100; known are a10g"):
            parse_gpus(text)
    times = [rough(seconds) for seconds in (10, 700, 3 * 3600, 3.4 * 86400)]
    assert times == ["10 s", "12 min", "3.0 h", "3.4 days"]
