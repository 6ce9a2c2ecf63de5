"""Prompts that all heads read in full, inside the stock engine, against transformers with
``prefill="full"``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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

need_vllm()

from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import GapRules, prompt_lengths

SIZES: dict[str, Any] = {"sink": SINK, "window": WINDOW, "prefill": "full"}
LENGTHS = (1, SINK, BLOCK + 1, SINK + WINDOW, 200, 333)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("models"), request.param)


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


def test_prompts_are_read_whole_and_again(llama: Served) -> None:
    """Steps that have room for a part of a prompt only, and prompts that were read before."""
    prompts = random_prompts((300, 300, 300, 310))
    options: dict[str, Any] = {
        "max_num_batched_tokens": 420,
        "max_model_len": 420,
        "enable_prefix_caching": True,
    }
    with engine(llama, llama.request(0.6, prefill="full"), **options) as llm:
        config = llm.llm_engine.vllm_config
        assert not config.cache_config.enable_prefix_caching
        assert not config.scheduler_config.enable_chunked_prefill
        first, again = generate(llm, prompts, 60), generate(llm, prompts, 60)
    assert not any(output.num_cached_tokens for output in again)
    assert check_equal(llama, 0.6, first + again, sizes=SIZES) == 480


def test_prompts_that_do_not_fit_into_a_step_are_refused(llama: Served) -> None:
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        message = rf"300 .*1,024.* --{name.replace('_', '-')}"
        with (
            pytest.raises(ValueError, match=message),
            engine(llama, llama.request(0.5, prefill="full"), **{name: 300}),
        ):
            pass


def step(
    starts: list[int], lengths: list[int], prompts: list[int] | None, prefilling: bool = True
) -> Any:
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts),
        is_prefilling=torch.tensor([prefilling] + [False] * (len(lengths) - 1)),
    )


def test_where_prompts_end() -> None:
    # a prompt, one that is read again with 7 more tokens, a decoding request, padding that is not
    # stated
    assert prompt_lengths(step([0, 20, 47, 48, 48], [20, 27, 90, 0], [20, 20, 60])) == [
        20,
        20,
        0,
        0,
    ]
    assert prompt_lengths(step([0, 20, 21], [20, 30], None)) == [20, 0]
    for lengths, queries in (([10], 10), ([20], 10), ([21], 1)):
        with pytest.raises(RuntimeError, match="25 tokens"):
            prompt_lengths(step([0, queries], lengths, [25]))


def test_prompt_lengths_are_asked_for_with_the_first_prompt() -> None:
    """Not before: an engine that starts makes up batches, and stock builders that are made later
    must not know.
    """
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch, max_model_len=640)
    )
    rules = GapRules(SinkWindowDemand(16, 16, 64), 640, full_prefill=True)
    assert rules.full_prompts(step([0, 20], [20], None, prefilling=False), config) is None
    assert arch.rswa_window is None
    assert rules.full_prompts(step([0, 20], [20], None), config) == [20]
    assert arch.rswa_window == 640
