"""Optional packages, launchers, and the kernels of a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlkv.attention.mixed import fast_decoding
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import compress
from rlkv.models.loading import resolve_device
from rlkv.utils.runtime import hardware, hardware_line, leave_launcher, require
from tests.helpers.models import make_tiny_model


def test_require_gives_the_module_or_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require("json", "eval").__name__ == "json"
    with pytest.raises(ValueError, match=r"no-such-package.*rlkv\[vllm\]"):
        require("no_such_package.part", "vllm")
    (tmp_path / "half_installed.py").write_text("import its_absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_absent_dependency"):
        require("half_installed", "train")  # a broken package is not an absent one


# --- processes of a launcher that go on alone, each with its own GPU


def launched(monkeypatch: pytest.MonkeyPatch, gpus: str | None, found: int) -> None:
    variables = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus or "")
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)


@pytest.mark.parametrize(
    ("gpus", "found", "own"), [(None, 4, "2"), ("4,5,6,7", 4, "6"), ("", 4, ""), (None, 0, "")]
)
def test_each_has_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: str | None, found: int, own: str
) -> None:
    launched(monkeypatch, gpus, found)
    assert leave_launcher("auto") == (6, 8)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ)
    assert leave_launcher("auto") == (0, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize("gpus", ["0,1", None])
def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch, gpus: str | None) -> None:
    launched(monkeypatch, gpus, found=2)
    with pytest.raises(ValueError, match=r"no GPU for process 2.*start 2"):
        leave_launcher("auto")
    launched(monkeypatch, gpus, found=2)
    assert leave_launcher("cpu") == (6, 8)


# --- every way to a GPU leaves cuDNN's attention out


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model that says it is on a GPU, and torch's own flag, which also exists without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
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
    there = {"device": torch.device("cuda"), "is_floating_point": lambda self: False}
    moved = type("Moved", (), there)()
    with pytest.raises(TypeError, match="Moved"):  # no parameter can be of it
        layer._apply(lambda tensor: moved)


@pytest.mark.parametrize("way", [load, serve, generate, train, train_after_a_move])
def test_cudnn_is_left_out_on_a_gpu(way: Any, on_gpu: Any) -> None:
    resolve_device("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert "cudnn_attention" in hardware()["attention_kernels"]
    way(on_gpu)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert hardware()["attention_kernels"][:2] == ["flash_attention", "efficient_attention"]
    assert hardware_line() == "1 x H100"
