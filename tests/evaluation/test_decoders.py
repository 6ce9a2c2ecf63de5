"""What ``--engine vllm`` refuses before anything is loaded; tests/vllm has the engine itself."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlkv.cache import CacheSettings
from rlkv.cli.jobs import run_eval
from rlkv.evaluation import decoders
from rlkv.evaluation.decoders import check_served
from rlkv.gates.allocation import HeadAllocation
from rlkv.models import loading
from rlkv.vllm import plugin

HALF = "random-heads@0.5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "--engine vllm takes the device that it was built for, not 'cpu'"),
        (["--kv-gib", "0"], "--kv-gib must be above 0, got 0"),
        (["--methods", "full", "rkv@40"], "method 'rkv@40': prefill 'full' is not served.*'local'"),
        (
            ["--methods", f"{HALF}+h2o@40", "--prefill", "local"],
            "eviction 'h2o' is not served.*choose from rkv, snapkv, or .*rlkv-eval --engine hf",
        ),
        (["--methods", f"{HALF}+rpc@", "--prefill", "local"], "eviction 'rpc' is not served"),
        (["--methods", "rkv@ratio=0.5", "--prefill", "local"], "eviction with ratio is not served"),
        (
            ["--methods", "snapkv@40:protect_prompt=true", "--prefill", "local"],
            "eviction with protect_prompt is not served",
        ),
        (["--methods", f"{HALF}+full:rkv@40"], "evicts from full heads is not served"),
        (["--methods", "random-heads@0+full:rkv@40"], "evicts from full heads is not served"),
        (["--methods", HALF, "--prefill", "published"], f"'{HALF}': prefill 'published' is not"),
        (["--methods", HALF, "--window", "9000"], "window is 9000, but the model has 1024 pos"),
        (["--model", "./absent"], "cannot load a model from './absent'"),
        (["--temperature", "2.5"], "temperatures from 0.01 to 2, not 2.5"),
        (["--temperature", "0.001"], "temperatures from 0.01 to 2, not 0.001"),
        ([], "vLLM is not installed"),
        (["--methods", HALF], "vLLM is not installed"),
    ],
)
def test_what_vllm_does_not_decode_is_refused_at_once(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any) -> None:
        raise AssertionError("the model was loaded")

    for module in (loading, decoders):
        monkeypatch.setattr(module, "load_model", load)
    monkeypatch.setattr(plugin, "installed_version", lambda: None)
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        run_eval(["--engine", "vllm", "--limit", "2", "--output-dir", str(folder), *options])
    assert not folder.exists()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--engine vllm evaluates in one process"):
        run_eval(["--engine", "vllm", "--limit", "2", "--output-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_plugin_does_not_serve_has_the_full_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: plugin.TESTED[-1])
    config = LlamaConfig(architectures=["OlmoForCausalLM"])
    full = HeadAllocation(torch.ones(2, 4, dtype=torch.bool))
    check_served(config, {"full": (full, CacheSettings())})
    half = HeadAllocation.random(2, 4, 0.5, seed=0)
    with pytest.raises(ValueError, match=r"'half'.*serves LlamaFor.*, not OlmoForCausalLM.*hf"):
        check_served(config, {"full": (full, CacheSettings()), "half": (half, CacheSettings())})


def test_memory_of_an_engine_is_free_before_the_next_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the next one takes is reckoned from what the GPU has free."""

    class Engine:
        def close(self) -> None:
            self.cycle = self

    decoder = decoders.VLLMDecoder.__new__(decoders.VLLMDecoder)
    engine: Any = Engine()
    decoder._engine = engine
    alive = weakref.ref(engine)
    del engine
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(alive() is None))
    decoder.close()
    assert freed == [True]
