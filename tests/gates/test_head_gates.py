"""HeadGates: what alpha and its mean may be, which fields are refused, and for which models."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlkv.gates.head_gates import ROUNDING, HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.gates import make_gates
from tests.helpers.models import make_tiny_model


def test_gates_are_a_float32_copy_without_gradient() -> None:
    gates = HeadGates(torch.nn.Parameter(torch.full((2, 3), 0.5, dtype=torch.bfloat16)))
    assert gates.alpha.dtype == torch.float32
    assert not gates.alpha.requires_grad
    source = torch.full((2, 3), 0.5)
    gates = HeadGates(source)
    source.zero_()
    assert gates.alpha.min() == 0.5
    assert torch.equal(gates.mean_alpha, gates.alpha)
    assert gates.mean_alpha.data_ptr() != gates.alpha.data_ptr()
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (128, 256, 16, 64)


def test_equality_sees_every_field_but_the_source() -> None:
    gates = make_gates()
    other = 1 - gates.alpha
    changes: list[dict[str, Any]] = [{"alpha": other}, {"mean_alpha": other}, {"model": None}]
    changes += [{"sink": 5}, {"window": 17}, {"deploy_sink": 3}, {"deploy_window": 9}]
    changes += [{"deploy_protect_prompt": False}, {"training": {}}]
    for change in changes:
        assert make_gates(**change) != gates, change
    assert replace(gates, source="elsewhere") == gates


def test_what_is_served_is_what_the_file_recommends_or_what_is_given() -> None:
    recommended = {"sink": 2, "window": 8, "protect_prompt": True}
    assert make_gates().serving() == recommended
    given = make_gates().serving(sink=0, window=None, protect_prompt=False)
    assert given == {"sink": 0, "window": 8, "protect_prompt": False}


def test_a_summary_is_the_same_before_and_after_a_file() -> None:
    gates = make_gates(training={"pair": (1, 2), 3: "three"})
    assert gates.training == {"pair": [1, 2], "3": "three"}


def test_values_outside_of_0_1_are_clipped_beyond_rounding_with_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gates = HeadGates(torch.tensor([[-ROUNDING * 0.99, 0.5, 1 + ROUNDING * 0.99]]))
    assert gates.alpha.tolist() == [[0, 0.5, 1]]
    with pytest.warns(UserWarning, match=r"2 of 4.*alpha.*0\.5"):
        gates = HeadGates(torch.tensor([[-0.5, 0.5], [-0.01, 1.25]]))
    assert gates.alpha.tolist() == [[0, 0.5], [0, 1]]


WRONG = torch.full((4, 6), 0.5)
WRONG[2, 1] = WRONG[3, 0] = float("nan")
INFINITE = WRONG.nan_to_num(nan=float("inf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": WRONG}, "gates: alpha.*layer 2, head 1"),
        ({"mean_alpha": INFINITE}, "gates: mean_alpha.*layer 2, head 1"),
        ({"alpha": torch.rand(5)}, r"alpha.*\[5\].*num_kv_heads"),
        ({"alpha": torch.rand(0, 6)}, r"alpha has shape \[0, 6\]"),
        ({"alpha": "none"}, "alpha is not a matrix of numbers"),
        ({"mean_alpha": torch.rand(6, 4)}, r"mean_alpha.*\[6, 4\].*\[4, 6\]"),
        ({"alpha": torch.rand(5, 6), "mean_alpha": None}, "alpha.*5 layers.*4 x 6.*owner/model"),
        ({"sink": -1}, "sink is -1"),
        ({"window": 0}, "window is 0"),
        ({"deploy_window": 1.5}, "deploy_window is 1.5"),
        ({"deploy_protect_prompt": "no"}, "deploy_protect_prompt is 'no'"),
        ({"training": {"tensor": torch.zeros(1)}}, "training.*JSON"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gates(**change)


def test_check_model_accepts_the_model_and_refuses_others() -> None:
    config = make_tiny_model("qwen3").config
    shape = ModelShape.from_config(config, "own/name")
    HeadGates(torch.rand(3, 4), model=shape).check_model(config)
    HeadGates(torch.rand(3, 4)).check_model(config)  # a .tsv states layers and heads only
    for change in ({"model_type": "mistral"}, {"num_query_heads": 16}, {"head_dim": 8}):
        gates = HeadGates(torch.rand(3, 4), model=replace(shape, **change), source="g.pt")
        with pytest.raises(ValueError, match=r"^g.pt: .*own/name.*3 layers x 4 KV heads"):
            gates.check_model(config)
    with pytest.raises(ValueError, match=r"gates: .*4 layers x 2 KV heads"):
        HeadGates(torch.rand(4, 2)).check_model(config)


def test_a_model_without_a_name_is_named_by_none() -> None:
    unnamed = ModelShape.from_config(make_tiny_model("qwen3").config)
    assert unnamed.model_id == HeadGates(torch.rand(3, 4), model=unnamed).model_id == ""
    with pytest.raises(ValueError, match="KV heads, but the model is qwen3 with"):
        HeadGates(torch.rand(4, 2)).check_model(make_tiny_model("qwen3").config)


def test_text() -> None:
    assert repr(make_gates()).startswith("<HeadGates owner/model: 4 layers x 6 KV heads, mean 0.")
    assert HeadGates(torch.rand(2, 2), source="/a/b/runs/gates.tsv").name == "runs/gates.tsv"
