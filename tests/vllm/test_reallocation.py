"""Head reallocation inside the stock engine against transformers with the same masks: every token,
every step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.engines import (
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
from tests.helpers.models import FAMILIES

need_vllm()

# shorter than the sinks, than a block, than sinks and window; at, before and after edges of blocks
LENGTHS = (5, SINK, BLOCK + 1, SINK + WINDOW, 200, 333)


@pytest.fixture(scope="module", params=[*FAMILIES, "gemma", "glm4", "granite", "mistral", "phi3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("models"), request.param)


def test_every_family(served: Served) -> None:
    with engine(served, served.request(0.5)) as llm:
        assert check_equal(served, 0.5, generate(llm, random_prompts(LENGTHS), 80)) == 480


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.6, 0.75, 1.0])
def test_every_sparsity(llama: Served, sparsity: float) -> None:
    with engine(llama, llama.request(sparsity)) as llm:
        assert check_equal(llama, sparsity, generate(llm, random_prompts(LENGTHS), 80)) == 480


def test_layers_without_full_and_without_compressible_heads(tmp_path: Path) -> None:
    alpha = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    served = make_served(tmp_path, "llama", alpha)
    assert served.allocation(0.5).full.sum(1).tolist() == [0, 4, 2, 2]
    with engine(served, served.request(0.5)) as llm:
        assert check_equal(served, 0.5, generate(llm, random_prompts(LENGTHS), 80)) == 480


@pytest.mark.parametrize(("sink", "window"), [(0, 1), (33, 40), (5, 100)])
def test_sizes_that_fit_no_block(llama: Served, sink: int, window: int) -> None:
    with engine(llama, llama.request(0.5, sink=sink, window=window)) as llm:
        outputs = generate(llm, random_prompts(LENGTHS), 80)
    assert check_equal(llama, 0.5, outputs, sizes={"sink": sink, "window": window}) == 480


def test_chunked_prefill(llama: Served) -> None:
    with engine(llama, llama.request(0.6), max_num_batched_tokens=48) as llm:
        assert check_equal(llama, 0.6, generate(llm, random_prompts(LENGTHS), 80)) == 480


def test_prefix_cache(llama: Served) -> None:
    prompts = random_prompts((5, 6 * BLOCK, 6 * BLOCK + 1, 333))
    with engine(
        llama, llama.request(0.6), enable_prefix_caching=True, max_num_batched_tokens=100
    ) as llm:
        first = generate(llm, prompts)
        assert check_equal(llama, 0.6, first) == 480
        again = generate(llm, prompts)
        # whole blocks are found again, those of full heads have twice the tokens; the last token is
        # computed again
        assert [output.num_cached_tokens for output in again] == [
            0,
            4 * BLOCK,
            6 * BLOCK,
            10 * BLOCK,
        ]
        assert check_equal(llama, 0.6, again) == 480
        longer = [
            [*p, *o.outputs[0].token_ids[:cut], 7, 8, 9]
            for p, o, cut in zip(prompts, first, (70, 33, 31, 0), strict=True)
        ]
        extended = generate(llm, longer)
        assert all(output.num_cached_tokens >= BLOCK for output in extended)
        assert check_equal(llama, 0.6, extended) == 480
        shared = [
            prompts[3][:cut] + tail
            for cut, tail in zip((64, 65, 160, 331), random_prompts((40,) * 4, 5), strict=True)
        ]
        assert check_equal(llama, 0.6, generate(llm, shared)) == 480


def test_preemption(llama: Served) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260))
    with engine(llama, llama.request(0.5), num_gpu_blocks_override=46, max_model_len=640) as llm:
        preempted = watch_preemptions(llm)
        outputs = generate(llm, prompts, 160)
        pool = block_manager(llm).block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    assert preempted
    assert check_equal(llama, 0.5, outputs) == 960


def test_several_completions_and_sampling(llama: Served) -> None:
    with engine(llama, llama.request(0.5), enable_prefix_caching=True) as llm:
        outputs = generate(llm, random_prompts((40, 100)), 60, n=4, temperature=1.0, seed=7)
    assert [len(output.outputs) for output in outputs] == [4, 4]
    assert check_equal(llama, 0.5, outputs, greedy=False) == 480


def test_abort_gives_the_blocks_back(llama: Served) -> None:
    from vllm import SamplingParams

    with engine(llama, llama.request(0.5)) as llm:
        core, pool = llm.llm_engine, block_manager(llm).block_pool
        free = pool.get_num_free_blocks()
        for number, prompt in enumerate(random_prompts((300, 200))):
            params = SamplingParams(
                temperature=0, max_tokens=200, ignore_eos=True, detokenize=False
            )
            core.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for _ in range(20):
            core.step()
        assert pool.get_num_free_blocks() < free
        core.abort_request(["0", "1"])
        for _ in range(3):
            core.step()
        assert pool.get_num_free_blocks() == free
        assert check_equal(llama, 0.5, generate(llm, random_prompts((90,)), 60)) == 60


def test_compiled(llama: Served) -> None:
    with engine(llama, llama.request(0.6), enforce_eager=False) as llm:
        assert check_equal(llama, 0.6, generate(llm, random_prompts(LENGTHS), 80)) == 480


def test_engine_in_another_process(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(llama, llama.request(0.6), enable_prefix_caching=True) as llm:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core")  # it is elsewhere
        assert check_equal(llama, 0.6, generate(llm, random_prompts(LENGTHS), 80)) == 480
