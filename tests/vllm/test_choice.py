"""What ``auto`` stands for, of what is installed and asked for."""

from __future__ import annotations

import pytest

from rlkv.vllm.plugin import check_vllm_options, choose_engine
from tests.helpers.installed import CPU_BUILD, GPU_BUILD, pretend_vllm


def test_auto_is_vllm_where_the_tested_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (CPU_BUILD, GPU_BUILD):
        pretend_vllm(monkeypatch, found)
        assert choose_engine("auto", has_gpu=True) == ("vllm", "")
    assert choose_engine("auto", has_gpu=True, gated="Qwen3ForCausalLM") == ("vllm", "")
    pretend_vllm(monkeypatch, CPU_BUILD)
    assert choose_engine("auto", has_gpu=False) == ("vllm", "")


@pytest.mark.parametrize(
    ("found", "has_gpu", "gated", "reason"),
    [
        (None, True, None, "rlkv[vllm]"),
        ("0.30.1", True, None, "0.30.1"),
        (GPU_BUILD, False, None, "built for GPUs, and there is none"),
        (GPU_BUILD, True, "GemmaForCausalLM", "GemmaForCausalLM"),
    ],
)
def test_else_auto_is_transformers_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    found: str | None,
    has_gpu: bool,
    gated: str | None,
    reason: str,
) -> None:
    pretend_vllm(monkeypatch, found)
    engine, why = choose_engine("auto", has_gpu, gated)
    assert engine == "hf"
    assert reason in why
    assert choose_engine("vllm", has_gpu, gated) == ("vllm", "")


def test_a_build_for_cpus_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, CPU_BUILD)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_engine("auto", has_gpu=True) == (
        "hf",
        "the installed vLLM is built for CPUs, and there is a GPU",
    )


def test_impossible_options_are_refused() -> None:
    check_vllm_options("vllm", "auto", None)
    check_vllm_options("hf", "cpu", 0.5)
    for kv_gib in (0, -1.5):
        with pytest.raises(ValueError, match=f"--kv-gib .*{kv_gib}"):
            check_vllm_options("hf", "auto", kv_gib)
    with pytest.raises(ValueError, match=r"'cpu'.*--device"):
        check_vllm_options("vllm", "cpu", None)
