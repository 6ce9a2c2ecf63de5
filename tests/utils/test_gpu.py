"""Every way to a GPU leaves cuDNN's attention out, and results say which kernels were left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlkv.attention.mixed import fast_decoding
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import compress
from rlkv.models.loading import resolve_device
from rlkv.utils.runtime import hardware
from tests.helpers.models import make_tiny_model


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model that says it is on a GPU, and torch's own flag, which also exists without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield make_tiny_model("llama")
    torch.backends.cuda.enable_cudnn_sdp(before)


def load(model: Any) -> None:
    resolve_device("auto")


def serve(model: Any) -> None:
    with compress(model, HeadAllocation.random(3, 4, 0.5, seed=0)):
        pass


def generate(model: Any) -> None:
    with fast_decoding(model):
        pass


def train(model: Any) -> None:
    head_gate = pytest.importorskip("rlkv.attention.head_gate")
    head_gate.HeadGateLayer(4, torch.device("cuda"))


def train_after_a_move(model: Any) -> None:
    head_gate = pytest.importorskip("rlkv.attention.head_gate")
    layer = head_gate.HeadGateLayer(4, torch.device("cpu"))
    layer.add("default", head_gate.HeadGateConfig())
    assert torch.backends.cuda.cudnn_sdp_enabled()
    moved = type(
        "Moved", (), {"device": torch.device("cuda"), "is_floating_point": lambda self: False}
    )()
    with pytest.raises(TypeError, match="Moved"):  # no parameter can be of it
        layer._apply(lambda tensor: moved)


@pytest.mark.parametrize("way", [load, serve, generate, train, train_after_a_move])
def test_cudnn_is_left_out(way: Any, on_gpu: Any) -> None:
    way(on_gpu)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_cpu_changes_nothing() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    resolve_device("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_results_name_the_kernels_of_a_gpu(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    assert "cudnn_attention" in hardware()["attention_kernels"]
    resolve_device("cuda")
    assert hardware()["attention_kernels"][:2] == ["flash_attention", "efficient_attention"]
    assert "cudnn_attention" not in hardware()["attention_kernels"]
