"""Liger's kernels in the frozen layers: which of them are asked for, what is refused, and on a GPU
the same logits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlkv.cli.train import parse_config
from rlkv.training.grpo import apply_liger, train_gates
from tests.helpers.models import make_tiny_model

MODULE = "liger_kernel.transformers.monkey_patch"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The arguments that an imitation of the package is called with."""
    found: list[dict[str, object]] = []
    for name in ("liger_kernel", "liger_kernel.transformers", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    liger = sys.modules[MODULE]
    monkeypatch.setattr(liger, "MODEL_TYPE_TO_APPLY_LIGER_FN", {"llama": None}, raising=False)
    call = lambda model, **options: found.append(options)  # noqa: E731
    monkeypatch.setattr(liger, "_apply_liger_kernel_to_instance", call, raising=False)
    return found


def test_layers_without_losses(asked: list[dict[str, object]]) -> None:
    apply_liger(make_tiny_model("llama"), torch.device("cuda"))
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == [{"rope": True, "rms_norm": True, "swiglu": True, **losses}]


def test_an_unknown_family_is_refused(asked: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="type qwen3"):
        apply_liger(make_tiny_model("qwen3"), torch.device("cuda"))
    assert asked == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ValueError, match=r"pip install 'rlkv\[liger\]'"):
        apply_liger(make_tiny_model("llama"), torch.device("cuda"))


def test_a_training_on_a_cpu_refuses_it(tmp_path: Path) -> None:
    options = [
        "--config",
        "tiny",
        "--use_cpu",
        "true",
        "--liger_kernels",
        "true",
        "--output_dir",
        str(tmp_path),
    ]
    with pytest.raises(ValueError, match="liger_kernels needs a CUDA GPU"):
        train_gates(*parse_config(options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    model = make_tiny_model("llama").cuda()
    ids = torch.randint(10, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        apply_liger(model, model.device)
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-3, atol=1e-3)
