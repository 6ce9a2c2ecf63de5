"""Loading models and optional packages: what works, and the sentence when it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkv.models import loading as models
from rlkv.models.loading import (
    load_model,
    load_tokenizer,
    model_source,
    resolve_device,
    resolve_dtype,
)
from rlkv.models.shape import ModelShape
from rlkv.tiny import MODEL_DIR
from rlkv.utils import runtime as extras
from tests.helpers.models import build_tokenizer, make_tiny_model


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer = build_tokenizer()
    make_tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_shape_of_a_config(family: str) -> None:
    shape = ModelShape.from_config(make_tiny_model(family).config, "own/name")
    assert shape == ModelShape("own/name", family, 3, 4, 8, 16)
    assert ModelShape(**shape.to_dict()) == shape


def test_shape_of_configs_that_leave_fields_out() -> None:
    text = SimpleNamespace(
        num_attention_heads=8, hidden_size=64, num_hidden_layers=2, model_type="gpt"
    )
    config = SimpleNamespace(get_text_config=lambda: text, _name_or_path="")
    assert ModelShape.from_config(config) == ModelShape(
        "unknown", "gpt", 2, 8, 8, 8
    )  # no GQA, no head_dim
    text.num_key_value_heads = text.head_dim = None
    assert ModelShape.from_config(config) == ModelShape("unknown", "gpt", 2, 8, 8, 8)


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match=r"'gpu9'.*auto, cpu, cuda"):
        resolve_device("gpu9")


def test_an_absent_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"'cuda:1'.*--device"):
        resolve_device("cuda:1")


def test_dtypes() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(ValueError, match=r"'int8'.*auto, fast, float32"):
        resolve_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_the_fast_dtype_of_a_cpu_is_one_that_it_multiplies(
    capabilities: dict[str, bool], found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_dtype("fast", torch.device("cpu")) == found
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("fast", torch.device("cuda")) == torch.bfloat16
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert resolve_dtype("fast", torch.device("cpu")) == torch.float32


def test_loading_a_local_folder(saved_model: Path) -> None:
    model, tokenizer = load_model(str(saved_model), dtype="bfloat16", device="cpu")
    assert not model.training
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id is not None
    with pytest.raises(ValueError, match="unknown dtype"):
        load_model(str(saved_model), dtype="int4")


def test_a_tokenizer_without_padding_gets_its_eos(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == tokenizer.eos_token


def test_loading_what_is_no_model_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # the variable is read at import only
    with pytest.raises(ValueError, match=str(tmp_path)) as local:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(local.value)
    with pytest.raises(ValueError, match="'nobody/nothing'") as hub:
        load_model("nobody/nothing")
    for raised in (local, hub):
        assert "\n" not in str(raised.value)


def test_tiny_means_the_packaged_folder() -> None:
    assert model_source("tiny") == str(MODEL_DIR)
    assert model_source("owner/model") == "owner/model"


def test_tiny_carries_its_name_and_no_path(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "model_source", lambda model: str(saved_model))
    model, _ = load_model("tiny", device="cpu")
    assert ModelShape.from_config(model.config).model_id == "tiny"


def test_require_gives_the_module_or_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extras.require("json", "eval").__name__ == "json"
    with pytest.raises(ValueError, match=r"no-such-package.*rlkv\[vllm\]"):
        extras.require("no_such_package.part", "vllm")
    (tmp_path / "half_installed.py").write_text("import its_absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_absent_dependency"):
        extras.require("half_installed", "train")  # a broken package is not an absent one
