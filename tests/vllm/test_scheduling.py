"""VLLMEngine when memory is short, next to the stock engine, and refusals at start: engines of
their own.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.rollout.base import SamplingParams

pytest.importorskip("vllm")

from rlkv.vllm.engine import VLLMEngine
from tests.helpers.vllm_models import (
    KV_HEADS,
    LAYERS,
    OPTIONS,
    SINK,
    TOLERANCE,
    WINDOW,
    load_reference,
    make_folder,
    make_rows,
    put_gates,
    random_gates,
    worst_difference,
)

SIZES = LocalSizes(SINK, WINDOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_a_pool_that_is_too_small_preempts_and_changes_nothing(folder: Path) -> None:
    alpha, rows = random_gates(11), make_rows(12)
    with closing(
        VLLMEngine(str(folder), SIZES, num_gpu_blocks_override=13, max_positions=256, **OPTIONS)
    ) as engine:
        engine.set_gates(alpha)
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempted, preempt = [], scheduler._preempt_request
        scheduler._preempt_request = lambda *args, **options: (
            preempted.append(1) or preempt(*args, **options)
        )
        found = dict(engine.sample(rows, SamplingParams(100, temperature=1.0, seed=1), eos_ids=[2]))
    assert preempted
    assert worst_difference(put_gates(load_reference(folder), alpha), rows, found) < TOLERANCE


def test_the_stock_engine_samples_the_same_with_gates_at_one(folder: Path) -> None:
    rows, sampling = make_rows(), SamplingParams(30, temperature=1.0, seed=2)
    with closing(VLLMEngine(str(folder), **OPTIONS)) as engine:
        stock = dict(engine.sample(rows, sampling))
        with pytest.raises(ValueError, match="mixed attention"):
            engine.set_gates(torch.ones(LAYERS, KV_HEADS))
    with closing(VLLMEngine(str(folder), SIZES, **OPTIONS)) as engine:
        mixed = dict(engine.sample(rows, sampling))
    assert [mixed[i].token_ids for i in range(8)] == [stock[i].token_ids for i in range(8)]
    for i in range(8):
        assert (
            torch.tensor(mixed[i].logprobs) - torch.tensor(stock[i].logprobs)
        ).abs().max() < TOLERANCE


def test_a_compiled_model_reads_its_gates_again(folder: Path) -> None:
    model = load_reference(folder)
    with closing(VLLMEngine(str(folder), SIZES, **{**OPTIONS, "enforce_eager": False})) as engine:
        for update in range(2):
            alpha, rows = random_gates(update), make_rows(rollout=update)
            engine.set_gates(alpha)
            samples = dict(engine.sample(rows, SamplingParams(20, temperature=1.0)))
            assert worst_difference(put_gates(model, alpha), rows, samples) < TOLERANCE


def test_what_does_not_work_is_refused_at_start(folder: Path) -> None:
    from transformers import GPT2Config

    other = folder.parent / "gpt2"
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(other)
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    with pytest.raises(ValueError, match="not GPT2LMHeadModel"):
        VLLMEngine(str(other), SIZES, **OPTIONS)
    with pytest.raises(ValueError, match="quantised KV cache"):
        VLLMEngine(str(folder), SIZES, kv_cache_dtype="fp8", **OPTIONS)
