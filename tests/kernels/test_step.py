"""What switches the decode kernel off, and which calls it serves; a GPU is not needed to tell."""

from __future__ import annotations

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlkv.cache.layer as layer_module
from rlkv.attention.softmax import Softmax
from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.kernels import step
from rlkv.utils.runtime import KERNEL, SWITCHES
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids
from tests.helpers.models import make_tiny_model


def states(*shape: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    return SimpleNamespace(
        shape=torch.Size(shape), dtype=dtype, is_cuda=is_cuda, device=torch.device("cuda", 0)
    )


def call(
    tokens: int = 1, group: int = 4, size: int = 128, value_size: int = 0, **kind: Any
) -> tuple[Any, Any, Any]:
    query = states(2, 8, group, tokens, size, **kind)
    value = states(2, 8, tokens, value_size or size, **kind)
    return query, states(2, 8, tokens, size, **kind), value


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        ({}, True),
        ({"size": 256}, True),
        ({"group": 32}, True),
        ({"dtype": torch.float32}, True),
        ({"is_cuda": False}, False),
        ({"tokens": 2}, False),
        ({"size": 257}, False),
        ({"value_size": 40}, False),
        ({"group": 33}, False),
        ({"dtype": torch.float64}, False),
    ],
)
def test_one_token_on_a_gpu_is_served(
    kind: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_runs_triton", lambda device: True)
    query, key, value = call(**kind)
    assert step.serves(query, key, value) is served
    assert not step.serves(states(*query.shape, dtype=torch.float16), key, value)


@pytest.mark.parametrize(
    ("spec", "capability", "reason", "said"),
    [
        (None, (9, 0), "", "triton is not installed"),
        ("found", (7, 5), "", "needs a GPU of compute capability 8.0"),
        ("found", (9, 0), "no compiler", r"cannot launch a kernel \(no compiler\)"),
        ("found", (8, 0), "", None),
    ],
)
def test_what_a_gpu_lacks_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    spec: str | None,
    capability: tuple[int, int],
    reason: str,
    said: str | None,
) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: spec)
    monkeypatch.setattr(step, "_cannot_launch", lambda device: reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(step, "_runs_triton", cache(step._runs_triton.__wrapped__))
    if said is not None:
        with pytest.warns(UserWarning, match=said):
            assert not step.serves(*call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step.serves(*call()) is (said is None)


def test_why_a_kernel_cannot_be_launched_is_one_line() -> None:
    pytest.importorskip("triton")
    reason = step._cannot_launch(torch.device("cuda"))
    assert bool(reason) is not torch.cuda.is_available()
    assert "\n" not in reason


@pytest.mark.parametrize(("value", "launches"), [(None, 3), ("0", 0), ("1", 3)])
def test_a_cache_decodes_by_it_unless_the_environment_says_no(
    value: str | None, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    attend = layer_module.ReallocationLayer._attend_part

    def decode(layer: Any, *arguments: Any) -> torch.Tensor:
        launched.append(layer)
        *states, scale = arguments
        return attend(layer, *states, Softmax(scale)).flatten(1, 2).transpose(1, 2)

    monkeypatch.setattr(layer_module, "serves", lambda query, key, value: key.shape[2] == 1)
    monkeypatch.setattr(layer_module.ReallocationLayer, "_decode", decode)
    monkeypatch.delenv(KERNEL, raising=False)
    if value is not None:
        monkeypatch.setenv(KERNEL, value)
    model = make_tiny_model("llama", attn_implementation=IMPLEMENTATION)
    cached_logits(model, draw_ids(1, 6), HeadReallocationCache(MIXED, 1, 2), [5, 1])
    assert len(launched) == launches  # one in each layer


@pytest.mark.parametrize("switch", SWITCHES)
def test_another_value_is_refused(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "yes")
    with pytest.raises(ValueError, match=f"{switch} is 'yes': set it to 0 or 1, or leave it out"):
        CacheSettings()
