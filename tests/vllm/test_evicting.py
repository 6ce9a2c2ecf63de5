"""R-KV and SnapKV inside the stock engine against transformers with the same policy: every token,
every step.

An eviction that kept other tokens would change what is written after it, so equal tokens mean equal
selections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.eviction import make_policy
from rlkv.vllm.packing import BufferDemand, plan_packing
from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    HEAD_SIZE,
    Served,
    block_manager,
    check_equal,
    engine,
    generate,
    held_blocks,
    make_served,
    need_vllm,
    random_prompts,
    watch_preemptions,
)

need_vllm()

RKV = {"name": "rkv", "budget": 40, "buffer": 24}
# shorter than the observed queries, than a buffer; before, at and behind the first eviction;
# several evictions
LENGTHS = (5, 31, 63, 64, 65, 333)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("models"), request.param)


def check(
    served: Served,
    sparsity: float,
    outputs: list[Any],
    eviction: dict[str, Any] = RKV,
    **options: Any,
) -> int:
    return check_equal(
        served, sparsity, outputs, sizes={"eviction": make_policy(**eviction)}, **options
    )


def test_every_family(served: Served) -> None:
    with engine(served, served.request(0.5, eviction=RKV)) as llm:
        assert check(served, 0.5, generate(llm, random_prompts(LENGTHS), 80)) == 480


@pytest.mark.parametrize(
    ("sparsity", "eviction"),
    [
        (0.25, {**RKV, "lam": 0.5, "sink": 3}),
        (0.75, {**RKV, "variant": "published"}),
        (1.0, {"name": "snapkv", "budget": 33, "buffer": 17, "observation": 5}),
    ],
)
def test_policies_and_sparsities(llama: Served, sparsity: float, eviction: dict[str, Any]) -> None:
    with engine(llama, llama.request(sparsity, eviction=eviction)) as llm:
        assert check(llama, sparsity, generate(llm, random_prompts(LENGTHS), 80), eviction) == 480


def test_an_odd_group_and_a_buffer_shorter_than_what_is_observed(tmp_path: Path) -> None:
    served = make_served(tmp_path, "llama", num_attention_heads=12, hidden_size=384)
    eviction = {"name": "rkv", "budget": 50, "buffer": 3}
    with engine(served, served.request(0.5, eviction=eviction), max_num_batched_tokens=100) as llm:
        assert check(served, 0.5, generate(llm, random_prompts((5, 52, 120)), 80), eviction) == 240


def test_chunked_prefill(llama: Served) -> None:
    with engine(llama, llama.request(0.6, eviction=RKV), max_num_batched_tokens=48) as llm:
        assert check(llama, 0.6, generate(llm, random_prompts(LENGTHS), 80)) == 480


def test_preemption(llama: Served) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260))
    with engine(
        llama, llama.request(0.5, eviction=RKV), num_gpu_blocks_override=46, max_model_len=640
    ) as llm:
        preempted = watch_preemptions(llm)
        outputs = generate(llm, prompts, 160)
        pool = block_manager(llm).block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    assert preempted
    assert check(llama, 0.5, outputs) == 960


def test_a_pool_for_one_request(llama: Served) -> None:
    """Two requests of the longest length one after the other.

    With a block less the engine does not start.
    """
    plan = plan_packing(
        llama.allocation(0.5).full, BufferDemand.of(make_policy(**RKV), BLOCK, 2), 320
    )
    options: dict[str, Any] = {
        "max_model_len": 320,
        "num_gpu_blocks_override": plan.blocks(320) + 1,
    }
    with engine(llama, llama.request(0.5, eviction=RKV), **options) as llm:
        outputs = generate(llm, random_prompts((200, 220)), 100)
    assert check(llama, 0.5, outputs) == 200
    options["num_gpu_blocks_override"] -= 1
    with (
        pytest.raises(ValueError, match="KV cache"),
        engine(llama, llama.request(0.5, eviction=RKV), **options),
    ):
        pass


def test_what_would_never_be_dropped_is_refused(llama: Served) -> None:
    request = llama.request(0.5, eviction={"name": "rkv", "budget": 100, "buffer": 60})
    with (
        pytest.raises(ValueError, match="160 entries"),
        engine(llama, request, max_model_len=160),
    ):
        pass


def test_a_request_that_goes_back_is_refused() -> None:
    """As between two parts of a streamed input, where the engine computes a token again without
    freeing anything.
    """
    from vllm.v1.core.block_pool import BlockPool

    from rlkv.vllm.specs import EvictingManager, EvictingSpec

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec = EvictingSpec(**sizes, bin=1, budget=20, buffer=12, observation=8, group_size=2)
    pool = BlockPool(num_gpu_blocks=20, enable_caching=False, hash_block_size=16)
    manager = EvictingManager(
        spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=16
    )
    assert manager.get_num_blocks_to_allocate("a", 30, [], 0, 0, 30) == 3
    assert len(manager.allocate_new_blocks("a", 30, 30)) == 3
    assert manager.get_num_blocks_to_allocate("a", 90, [], 30, 30, 90) == 0
    with pytest.raises(RuntimeError, match="token 29"):
        manager.get_num_blocks_to_allocate("a", 91, [], 29, 29, 91)
    manager.free("a")
    assert (
        manager.get_num_blocks_to_allocate("a", 91, [], 0, 0, 91) == 3
    )  # preempted, or another one of that name


def test_several_completions_where_prefix_caching_was_asked_for(llama: Served) -> None:
    """What an eviction kept is not a prefix of another text: the engine reads every prompt again."""
    prompts = random_prompts((40, 200))
    with engine(llama, llama.request(0.5, eviction=RKV), enable_prefix_caching=True) as llm:
        assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        outputs = generate(llm, prompts, 60, n=4, temperature=1.0, seed=7)
        again = generate(llm, prompts, 60)
    assert [len(output.outputs) for output in outputs] == [4, 4]
    assert not any(output.num_cached_tokens for output in again)
    assert check(llama, 0.5, outputs, greedy=False) == 480
    assert check(llama, 0.5, again) == 120


def test_compiled_in_another_process(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(
        llama, llama.request(0.6, eviction=RKV), enforce_eager=False, enable_prefix_caching=True
    ) as llm:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core")  # it is elsewhere
        assert check(llama, 0.6, generate(llm, random_prompts(LENGTHS), 80)) == 480


def test_a_request_holds_no_more_the_longer_it_gets(llama: Served) -> None:
    """Blocks of compressible heads, those of the observed queries among them, against the plan.

    Aborts free them.
    """
    from vllm import SamplingParams

    demand = BufferDemand.of(make_policy(**RKV), BLOCK, 2)
    allocation = llama.allocation(0.5)
    plan = plan_packing(allocation.full, demand, 1024)
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"num_gpu_blocks_override": 400, "async_scheduling": False}
    with engine(llama, llama.request(0.5, eviction=RKV), **options) as llm:
        core = llm.llm_engine
        pool = block_manager(llm).block_pool
        free = pool.get_num_free_blocks()
        (prompt,) = random_prompts((20,))
        core.add_request("0", {"prompt_token_ids": prompt}, params)
        for tokens in range(21, 300):  # the prompt's step makes token 21
            core.step()
            assert held_blocks(llm) == plan.blocks(tokens - 1), (
                f"{tokens} tokens"
            )  # the newest is not yet in the cache
        core.abort_request(
            list(block_manager(llm).coordinator.single_type_managers[0].req_to_blocks),
            internal=True,
        )
        core.step()
        assert pool.get_num_free_blocks() == free
    # a block of queries, two of entries, for each of the compressible heads
    assert (
        plan.ideal(299)
        == (allocation.num_full * demand.full(299) + allocation.num_compressible * 3) * BLOCK
    )
    entry = 2 * HEAD_SIZE * ELEMENT
    print(f"at 299 tokens {plan.held(299) * entry:,} bytes of {plan.uncompressed(299) * entry:,}")
