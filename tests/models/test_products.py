"""Packed weights give the products of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def double(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def merge(layer: nn.Linear) -> None:
    layer.weight.data += 1  # as adapters are merged: neither address nor version changes


def zero_a_row(layer: nn.Linear) -> None:
    layer.weight.data[3] = 0


def swap_rows(layer: nn.Linear) -> None:
    layer.weight.data[:] = layer.weight.data.flip(0)


def swap_columns(layer: nn.Linear) -> None:
    layer.weight.data[:] = layer.weight.data.flip(1)


def replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(layer.weight.shape).bfloat16())


@pytest.mark.parametrize("width", [64, 63])
@pytest.mark.parametrize("change", [double, merge, zero_a_row, swap_rows, swap_columns, replace])
def test_a_changed_weight_is_packed_again(change: Callable[[nn.Linear], None], width: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, 32, dtype=torch.bfloat16)
    states = torch.randn(5, width).bfloat16()
    with torch.inference_mode(), packed_products(layer):
        before = layer(states)
    change(layer)
    with torch.inference_mode():
        expected = layer(states)
        with packed_products(layer):
            after = layer(states)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


class Quantised(torch.Tensor):
    """An int8 weight that says it is bfloat16, as torchao's do."""

    held: torch.Tensor

    @classmethod
    def of(cls, held: torch.Tensor) -> Quantised:
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.bfloat16)
        self.held = held
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].held.bfloat16(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls.of(args[0].held)
        raise NotImplementedError(f"{function} of a quantised weight")


def test_weights_of_another_kind_are_left_alone() -> None:
    states = torch.randn(5, 64).bfloat16()
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(Quantised.of(torch.ones(32, 64, dtype=torch.int8)), False)
    with torch.inference_mode():
        expected = layer(states)
        with packed_products(layer):
            assert torch.equal(layer(states), expected)


def test_a_model_made_in_inference_mode() -> None:
    """Its weights count no versions."""
    states = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        layer = nn.Linear(64, 32, dtype=torch.bfloat16)
        expected = layer(states)
        with packed_products(layer):
            assert torch.equal(layer(states), expected)


def test_other_calls_are_those_of_a_plain_layer() -> None:
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    nothing = torch.zeros(0, 64).bfloat16()
    with torch.inference_mode(), packed_products(layer):
        assert layer(nothing).shape == (0, 32)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(5, 64)).dtype == torch.bfloat16


def test_a_compiled_model_is_compiled_as_it_is() -> None:
    """Inductor does not know packed weights."""
    found = []

    def note(graph: Any, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend=note)
    states = torch.randn(5, 64).bfloat16()
    with torch.inference_mode(), packed_products(layer):
        assert torch.equal(compiled(states), nn.functional.linear(states, layer.weight, layer.bias))
    assert found
    assert not any("mkldnn" in name for name in found)


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
