"""Who asks for the decode kernel, and which calls it serves; a GPU is not needed to tell."""

from __future__ import annotations

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlkv.cache.layer as layer_module
from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.kernels import step
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids
from tests.helpers.models import make_tiny_model


def states(*shape: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    return SimpleNamespace(
        shape=torch.Size(shape), dtype=dtype, is_cuda=is_cuda, device=torch.device("cuda", 0)
    )


def call(
    tokens: int = 1, group: int = 4, size: int = 128, value_size: int = 128, **kind: Any
) -> tuple[Any, Any, Any]:
    query = states(2, 8, group, tokens, size, **kind)
    return query, states(2, 8, tokens, size, **kind), states(2, 8, tokens, value_size, **kind)


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_runs_triton", lambda device: True)


@pytest.mark.parametrize(
    "kind", [{}, {"size": 256}, {"group": 32}, {"dtype": torch.float32}, {"value_size": 40}]
)
def test_one_token_on_a_gpu_is_served(with_triton: None, kind: dict[str, Any]) -> None:
    assert step.serves(*call(**kind))


@pytest.mark.parametrize(
    "kind",
    [
        {"is_cuda": False},
        {"tokens": 2},
        {"size": 257},
        {"value_size": 320},
        {"group": 33},
        {"dtype": torch.float64},
    ],
)
def test_other_calls_are_left_to_torch(with_triton: None, kind: dict[str, Any]) -> None:
    assert not step.serves(*call(**kind))


def test_states_of_several_dtypes_are_left_to_torch(with_triton: None) -> None:
    query, key, value = call()
    assert not step.serves(states(*query.shape, dtype=torch.float32), key, value)


@pytest.mark.parametrize(
    ("spec", "capability", "said"),
    [
        (None, (9, 0), "triton is not installed"),
        ("found", (7, 5), "needs a GPU of compute capability 8.0"),
        ("found", (9, 0), r"cannot launch a kernel \(Failed to find C compiler\)"),
    ],
)
def test_what_a_gpu_lacks_is_said_once(
    monkeypatch: pytest.MonkeyPatch, spec: str | None, capability: tuple[int, int], said: str
) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: spec)
    monkeypatch.setattr(step, "_cannot_launch", lambda device: "Failed to find C compiler")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(step, "_runs_triton", cache(step._runs_triton.__wrapped__))
    with pytest.warns(UserWarning, match=said):
        assert not step.serves(*call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not step.serves(*call())


def test_a_gpu_with_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: "found")
    monkeypatch.setattr(step, "_cannot_launch", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(step, "_runs_triton", cache(step._runs_triton.__wrapped__))
    assert step.serves(*call())


@pytest.mark.parametrize(("value", "launches"), [(None, 0), ("0", 0), ("1", 3)])
def test_a_cache_decodes_by_it_where_the_environment_asks(
    value: str | None, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    attend = layer_module.ReallocationLayer._attend_part

    def decode(layer: Any, *arguments: Any) -> torch.Tensor:
        launched.append(layer)
        return attend(layer, *arguments).flatten(1, 2).transpose(1, 2)

    monkeypatch.setattr(layer_module, "serves", lambda query, key, value: key.shape[2] == 1)
    monkeypatch.setattr(layer_module.ReallocationLayer, "_decode", decode)
    monkeypatch.delenv(step.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(step.SWITCH, value)
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    cached_logits(model, draw_ids(1, 6), HeadReallocationCache(MIXED, 1, 2), [5, 1])
    assert len(launched) == launches  # one in each layer


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(step.SWITCH, "yes")
    with pytest.raises(
        ValueError,
        match="RLKV_DECODE_KERNEL is 'yes': set it to 1 to decode by the kernel, or leave",
    ):
        CacheSettings()


def test_scratch_is_kept_while_it_is_large_enough() -> None:
    one = torch.zeros(1, dtype=torch.long)
    shared = step.DecodeStep(one, one, one, window=4)
    partials, arrivals = shared.scratch(100, 6)
    assert (partials.numel(), arrivals.tolist()) == (100, [0] * 6)
    assert shared.scratch(60, 6)[0] is partials
    assert shared.scratch(60, 6)[1] is arrivals
    assert shared.scratch(200, 8)[0].numel() == 200


def test_why_a_kernel_cannot_be_launched_is_one_line() -> None:
    """Without a GPU there is no driver, and no device."""
    reason = step._cannot_launch(torch.device("cuda"))
    assert reason if not torch.cuda.is_available() else not reason
    assert "\n" not in reason
