"""``rlkv-infer --backend``: what vLLM's does not do is said before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from rlkv.inference.session import InferConfig

SERVED: dict[str, Any] = {"backend": "vllm", "gates": "gates.pt", "prompt": "x"}


def test_what_works_passes() -> None:
    InferConfig(**SERVED).check()
    InferConfig(gates="gates.pt").check()
    InferConfig(**{**SERVED, "backend": "hf", "compare_full": True}).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "--prompt"),
        ({"compare_full": True}, "--compare-full"),
        ({"device": "cpu"}, "--device"),
        ({"prefill": "published"}, "--prefill published"),
        ({"gates": None, "eviction": "rkv", "budget": 64}, "--gates"),
    ],
)
def test_what_does_not_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferConfig(**{**SERVED, **change}).check()


def test_the_built_in_model_has_gates_of_its_own() -> None:
    assert InferConfig(model="tiny").gates_source == "tiny"
    assert InferConfig(model="tiny", eviction="rkv", budget=64).gates_source is None
    assert InferConfig(model="tiny", gates="own.pt").gates_source == "own.pt"
    assert InferConfig(model="smol").gates_source == "smol"
    assert InferConfig(model="other").gates_source is None
