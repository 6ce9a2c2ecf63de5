"""Protected prompts inside the stock engine against transformers with ``protect_prompt=True``."""

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
    held_blocks,
    need_vllm,
    random_prompts,
    watch_preemptions,
)

need_vllm()

from rlkv.vllm.packing import SinkWindowDemand, plan_packing
from rlkv.vllm.paged import GapRules

SIZES: dict[str, Any] = {"sink": SINK, "window": WINDOW, "protect_prompt": True}
LENGTHS = (1, SINK, BLOCK + 1, SINK + WINDOW, 200, 333)


def check(served: Served, sparsity: float, outputs: list[Any], **options: Any) -> int:
    return check_equal(served, sparsity, outputs, sizes=SIZES, **options)


@pytest.mark.parametrize("prefill", ["local", "full"])
def test_prompts_in_chunks(llama: Served, prefill: str) -> None:
    """Tokens of the prompt see all before them in any chunks, so ``full`` is the same and needs no
    whole prompts.
    """
    request = llama.request(0.6, protect_prompt=True, prefill=prefill)
    with engine(llama, request, max_num_batched_tokens=48) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        outputs = generate(llm, random_prompts(LENGTHS), 110)
    assert check_equal(llama, 0.6, outputs, sizes={**SIZES, "prefill": prefill}) == 660
    with pytest.raises(AssertionError):  # other masks: the test can tell them apart
        check_equal(llama, 0.6, outputs)


def test_a_prefix_cache_holds_prompts_only(llama: Served) -> None:
    """Answers in the next turn's prompt are read again: in it they see everything before them."""
    prompts = random_prompts((5, 6 * BLOCK, 6 * BLOCK + 1, 333))
    request = llama.request(0.5, protect_prompt=True)
    with engine(llama, request, enable_prefix_caching=True, max_num_batched_tokens=100) as llm:
        first = generate(llm, prompts)
        again = generate(llm, prompts)
        assert [output.num_cached_tokens for output in again] == [
            0,
            5 * BLOCK,
            6 * BLOCK,
            10 * BLOCK,
        ]
        turns = [
            [*p, *o.outputs[0].token_ids, 7, 8, 9] for p, o in zip(prompts, first, strict=True)
        ]
        longer = generate(llm, turns)
        assert [output.num_cached_tokens for output in longer] == [
            0,
            6 * BLOCK,
            6 * BLOCK,
            10 * BLOCK,
        ]
        several = generate(llm, prompts[2:], 40, n=4, temperature=1.0, seed=7)
    assert check(llama, 0.5, first + again + longer) == 1440
    assert check(llama, 0.5, several, greedy=False) == 320


def test_a_preempted_request_keeps_its_own_prompt(llama: Served) -> None:
    """Also where its text so far is the beginning of another request's prompt, whose blocks are
    cached.
    """
    prompts = random_prompts((150, 180, 200))
    request, tokens = llama.request(0.5, protect_prompt=True), 200
    options: dict[str, Any] = {"max_model_len": 640, "enable_prefix_caching": True}
    with engine(llama, request, **options) as llm:
        first = generate(llm, prompts, tokens)
    turns = [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, first, strict=True)]
    with engine(llama, request, num_gpu_blocks_override=112, **options) as llm:
        preempted = watch_preemptions(llm)
        outputs = generate(llm, turns + prompts, tokens)
        pool = block_manager(llm).block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    assert {int(name.split("-")[0]) for name in preempted} & {3, 4, 5}
    assert check(llama, 0.5, first + outputs) == 1800


@pytest.mark.parametrize("sparsity", [0.25, 0.75])
def test_blocks_of_a_running_request(llama: Served, sparsity: float) -> None:
    from vllm import SamplingParams

    demand, prompt = SinkWindowDemand(BLOCK, SINK, WINDOW, protect_prompt=True), 170
    plan = plan_packing(llama.allocation(sparsity).full, demand, 1024, 256)
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
    request = llama.request(sparsity, protect_prompt=True)
    with engine(llama, request, num_gpu_blocks_override=400, async_scheduling=False) as llm:
        core = llm.llm_engine
        core.add_request("0", {"prompt_token_ids": random_prompts((prompt,))[0]}, params)
        held = {}
        for tokens in range(prompt + 1, prompt + 201):
            core.step()
            held[tokens] = held_blocks(llm)
        core.abort_request(
            list(block_manager(llm).coordinator.single_type_managers[0].req_to_blocks),
            internal=True,
        )
    # the newest token is not yet in the cache; a window may lie in a block less than planned
    gaps = [plan.blocks(tokens - 1, prompt) - held[tokens] for tokens in held]
    assert set(gaps) <= set(range(len(plan.bins) + 1))
    assert 0 in gaps[-2 * BLOCK :]


def test_where_a_prompt_ends() -> None:
    """The engine states lengths of prompts from the second step on.

    Rows of padding may have none.
    """
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch, max_model_len=640)
    )
    rules = GapRules(SinkWindowDemand(16, 16, 64, protect_prompt=True), 640)
    reading = {"is_prefilling": torch.tensor([True, False]), "seq_lens": torch.tensor([20, 9])}
    made_up = SimpleNamespace(
        **{**reading, "is_prefilling": torch.zeros(2, dtype=torch.bool)}, rswa_prefix_lens=None
    )
    assert rules.prefixes(made_up, config).tolist() == [20, 16]
    assert arch.rswa_window is None
    assert rules.prefixes(SimpleNamespace(**reading, rswa_prefix_lens=None), config).tolist() == [
        20,
        16,
    ]
    assert arch.rswa_window == 640
    stated = SimpleNamespace(**reading, rswa_prefix_lens=torch.tensor([300, 7]))
    assert rules.prefixes(stated, config).tolist() == [300, 16]
    assert rules.full_prompts(stated, config) is None
