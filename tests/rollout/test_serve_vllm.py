"""The KV memory of the rollout server."""

from __future__ import annotations

import pytest

from rlkv.rollout.footprint import GIB
from tests.helpers.programs import load_program

SERVE = load_program("rollout/serve_vllm.py")
LLAMA = SERVE.ServeConfig(
    model="deepseek-ai/DeepSeek-R1-Distill-Llama-8B", dtype="bfloat16", max_positions=8192
)


def gpu(monkeypatch: pytest.MonkeyPatch, gib: int | None) -> None:
    monkeypatch.setattr(SERVE, "free_memory", lambda device: None if gib is None else gib * GIB)


def test_the_cache_takes_what_the_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 80)
    assert SERVE.fitting_kv_gib(LLAMA) == pytest.approx(72 - 15 - 6, abs=0.1)
    gpu(monkeypatch, None)
    assert SERVE.fitting_kv_gib(LLAMA) == 4


@pytest.mark.parametrize("kv_gib", [0, -1])
def test_no_memory_is_refused(kv_gib: float) -> None:
    with pytest.raises(ValueError, match=f"--kv-gib.* {kv_gib}"):
        SERVE.ServeConfig(kv_gib=kv_gib).check()
