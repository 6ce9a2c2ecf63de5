"""Gates folders and the PEFT method read each other's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.models import make_tiny_model

peft = pytest.importorskip("peft")
from rlkv.attention import head_gate  # noqa: E402  (it imports peft)


def test_peft_loads_what_gates_save(family: str, tmp_path: Path) -> None:
    base = make_tiny_model(family)
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    gates = HeadGates(
        alpha, model=ModelShape.from_config(base.config, "own/name"), sink=2, window=5
    )
    gates.save(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(head_gate.gates_matrix(model), alpha)
    config = model.peft_config["default"]
    assert (config.sink, config.window, config.base_model_name_or_path) == (2, 5, "own/name")
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        gated = model(input_ids=ids).logits
        with model.disable_adapter():
            assert (model(input_ids=ids).logits - gated).abs().max() > 1e-3  # the gates act


def test_gates_load_what_peft_saves(family: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(make_tiny_model(family), head_gate.HeadGateConfig(sink=3, window=7))
    with torch.no_grad():
        for layer, parameter in head_gate.gate_parameters(model):
            parameter.copy_((torch.arange(4) + 4 * layer) / 16)
    model.save_pretrained(str(tmp_path))
    gates = HeadGates.load(tmp_path)
    assert torch.equal(gates.alpha, torch.arange(12).view(3, 4) / 16)
    assert (gates.sink, gates.window) == (3, 7)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "HEAD_GATE"
