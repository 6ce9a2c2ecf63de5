"""Prompts that all heads read in full, inside the stock engine, against transformers with ``prefill="full"``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    SINK,
    WINDOW,
    Served,
    block_manager,
    check_equal,
    engine,
    generate,
    make_served,
    need_vllm,
    random_prompts,
    watch_preemptions,
)

need_vllm()

from rlkv.serving.full_prefill import prompt_lengths  # noqa: E402  (after the environment is set)

SIZES: dict[str, Any] = {"sink": SINK, "window": WINDOW, "prefill": "full"}
LENGTHS = (1, SINK, BLOCK + 1, SINK + WINDOW, 200, 333)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("models"), "llama")


def test_every_family(served: Served) -> None:
    with engine(served, served.request(0.5, prefill="full")) as llm:
        outputs = generate(llm, random_prompts(LENGTHS), 80)
    assert check_equal(served, 0.5, outputs, sizes=SIZES) == 480
    with pytest.raises(AssertionError):  # other masks: the test can tell them apart
        check_equal(served, 0.5, outputs)


def test_a_preempted_request_does_not_see_more_of_its_own_text(llama: Served) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260))
    request = llama.request(0.5, prefill="full")
    with engine(llama, request, num_gpu_blocks_override=56, max_model_len=640) as llm:
        preempted = watch_preemptions(llm)
        outputs = generate(llm, prompts, 160)
        pool = block_manager(llm).block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    assert preempted
    assert check_equal(llama, 0.5, outputs, sizes=SIZES) == 960


def test_prompts_are_read_whole_and_anew(llama: Served) -> None:
    """Steps that have room for a part of a prompt only, and prompts that were read before."""
    prompts = random_prompts((300, 300, 300, 310))
    options: dict[str, Any] = {"max_num_batched_tokens": 420, "max_model_len": 420, "enable_prefix_caching": True}
    with engine(llama, llama.request(0.6, prefill="full"), **options) as llm:
        config = llm.llm_engine.vllm_config
        assert not config.cache_config.enable_prefix_caching
        assert not config.scheduler_config.enable_chunked_prefill
        first, again = generate(llm, prompts, 60), generate(llm, prompts, 60)
    assert not any(output.num_cached_tokens for output in again)
    assert check_equal(llama, 0.6, first + again, sizes=SIZES) == 480


def test_prompts_that_do_not_fit_into_a_step_are_refused(llama: Served) -> None:
    with (
        pytest.raises(ValueError, match=r"a step has 300 tokens and a text up to 1,024: raise"),
        engine(llama, llama.request(0.5, prefill="full"), max_num_batched_tokens=300),
    ):
        pass


def step(starts: list[int], lengths: list[int], prompts: list[int] | None) -> tuple[Any, list[int]]:
    stated = None if prompts is None else torch.tensor(prompts)
    return SimpleNamespace(seq_lens_cpu_upper_bound=torch.tensor(lengths), rswa_prefix_lens=stated), starts


def test_where_prompts_end() -> None:
    # a prompt, one that is read again with 7 more tokens, a decoding request, padding
    assert prompt_lengths(*step([0, 20, 47, 48, 48], [20, 27, 90, 0], [20, 20, 60, 0])) == [20, 20, 0, 0]
    assert prompt_lengths(*step([0, 20, 21], [20, 30], None)) == [20, 0]
    for lengths, queries in (([10], 10), ([20], 10)):
        with pytest.raises(RuntimeError, match="a prompt of 25 tokens is read in pieces"):
            prompt_lengths(*step([0, queries], lengths, [25]))


def test_rlkv_infer_reads_prompts_in_full(tmp_path: Path) -> None:
    """The engine of ``rlkv-infer`` gives itself steps that are long enough."""
    from rlkv import tiny
    from rlkv.gates import HeadGates
    from rlkv.inference.engine import InferenceEngine
    from rlkv.models import ModelShape
    from rlkv.rollout.base import SamplingParams
    from rlkv.serving.engine import ServingEngine

    model, tokenizer = tiny.load()
    alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    gates = HeadGates(alpha, model=ModelShape.from_config(model.config, "tiny"), deploy_sink=4, deploy_window=16)
    gates.save(tmp_path / "gates.safetensors")
    texts = [problem["problem"] for problem in tiny.problems(6, seed=11, min_definitions=3, max_definitions=8)]
    sampling = SamplingParams(max_new_tokens=40)
    request = {"gates": str(tmp_path / "gates.safetensors"), "sparsity": 0.5, "prefill": "full"}
    served = ServingEngine("tiny", request, dtype="float32")
    try:
        found, _ = served.batch(texts, sampling)
    finally:
        served.close()
    sizes = {"sink": 4, "window": 16, "prefill": "full"}
    reference = InferenceEngine(model, tokenizer, served.allocation, **sizes)
    expected, _ = reference.batch(texts, sampling)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
