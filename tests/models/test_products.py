"""Packed weights give the products of plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlkv import tiny
from rlkv.models.products import packed_products
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.utils.devices import cpu_has_any

pytestmark = pytest.mark.skipif(
    not cpu_has_any("avx512_bf16", "amx_bf16"), reason="this CPU does not multiply bfloat16"
)


@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_same_and_gradients_stay(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 70, bias=bias, dtype=torch.bfloat16)
    for rows in ((1,), (3, 1), (2, 19), (150,)):
        states = torch.randn(*rows, 96).bfloat16()
        with torch.inference_mode():
            expected = layer(states)
            with packed_products(layer):
                assert "forward" in vars(layer), "nothing was packed"
                assert torch.equal(layer(states), expected)
    with packed_products(layer):
        layer(states).sum().backward()
    assert layer.weight.grad is not None
    assert "forward" not in vars(layer)


def test_a_changed_weight_is_packed_again() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    states = torch.randn(5, 64).bfloat16()
    with torch.inference_mode(), packed_products(layer):
        before = layer(states)
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.inference_mode():
        expected = layer(states)
        with packed_products(layer):
            after = layer(states)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_nothing_is_packed_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    bytes_of_weight = 2 * 64 * 32
    for available, packs in ((2 * bytes_of_weight - 1, False), (2 * bytes_of_weight, True)):
        monkeypatch.setattr("rlkv.models.products.available_memory", lambda free=available: free)
        with packed_products(layer):
            assert ("forward" in vars(layer)) == packs


def test_texts_are_those_of_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny.load()
    engine = HFEngine(model.bfloat16(), tokenizer, batch_size=3)
    prompts = [problem["problem"] for problem in tiny.problems(5, seed=3)]
    sampling = SamplingParams(40)
    found = engine.generate(prompts, sampling)
    with monkeypatch.context() as patch:
        patch.setattr("rlkv.models.products._gains", lambda layer: False)
        assert engine.generate(prompts, sampling) == found
