"""Memory of the served model: blocks against the plan, tokens in the same pool, the block manager's
bookkeeping.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    HEAD_SIZE,
    SINK,
    WINDOW,
    Served,
    block_manager,
    engine,
    held_blocks,
    need_vllm,
    random_prompts,
)

need_vllm()

from vllm.v1.core.block_pool import BlockPool

from rlkv.vllm.packing import SinkWindowDemand, plan_packing
from rlkv.vllm.specs import PackedFullSpec, SinkWindowManager, SinkWindowSpec

ENTRY = 2 * HEAD_SIZE * ELEMENT  # bytes of a key and a value
DEMAND = SinkWindowDemand(BLOCK, SINK, WINDOW)


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.6, 0.75, 1.0])
def test_bytes_of_a_running_request(llama: Served, sparsity: float) -> None:
    from vllm import SamplingParams

    plan = plan_packing(llama.allocation(sparsity).full, DEMAND, 1024)
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
    # synchronous steps: a step in flight would hold the block that has just fallen out of the
    # window
    with engine(
        llama, llama.request(sparsity), num_gpu_blocks_override=400, async_scheduling=False
    ) as llm:
        core = llm.llm_engine
        config = core.engine_core.engine_core.scheduler.kv_cache_config
        assert len(config.kv_cache_groups) == len(plan.bins)
        block_bytes = {tensor.size // config.num_blocks for tensor in config.kv_cache_tensors}
        assert block_bytes == {plan.block_entries * ENTRY}
        runner = core.engine_core.engine_core.model_executor.driver_worker.model_runner
        assert [len(builders) for builders in runner.attn_groups] == [1] * len(plan.bins)
        (prompt,) = random_prompts((500,))
        core.add_request("0", {"prompt_token_ids": prompt}, params)
        held = {}
        for tokens in range(501, 601):  # the prompt's step makes token 501
            core.step()
            held[tokens] = held_blocks(llm)
        core.abort_request(
            list(block_manager(llm).coordinator.single_type_managers[0].req_to_blocks),
            internal=True,
        )
    for tokens, blocks in list(held.items())[2:]:
        # the newest token is not yet in the cache
        assert plan.blocks(tokens - 1) - len(plan.bins) <= blocks <= plan.blocks(tokens - 1)
    assert max(held[tokens] - plan.blocks(tokens - 1) for tokens in range(520, 601)) == 0
    ideal = plan.ideal(600) * ENTRY
    compressed, full = (
        llama.allocation(sparsity).num_compressible,
        llama.allocation(sparsity).num_full,
    )
    kept = BLOCK * (1 + 2 + 1)  # a block of sinks, and up to three of the window
    assert ideal == pytest.approx((full * 608 + compressed * kept) * ENTRY)
    print(
        f"sparsity {sparsity}: {held[600] * plan.block_entries * ENTRY} bytes at 600 tokens, ideal "
        f"{ideal}"
    )


def test_tokens_in_the_same_pool(llama: Served) -> None:
    """The engine's own figure, made of its blocks and of what one request of the longest length may
    hold.
    """
    capacity, plans = {}, {}
    for sparsity in (0.0, 0.5, 0.75):
        with engine(
            llama, llama.request(sparsity), max_num_batched_tokens=64, max_model_len=2048
        ) as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            capacity[sparsity] = cache.kv_cache_size_tokens
            plans[sparsity] = plan_packing(llama.allocation(sparsity).full, DEMAND, 2048)
            blocks = cache.num_gpu_blocks
            assert blocks * plans[sparsity].block_entries * ENTRY == pytest.approx(2**30, rel=0.001)
    for sparsity in (0.5, 0.75):
        gained = capacity[sparsity] / capacity[0.0]
        ideal = plans[sparsity].uncompressed(2048) / plans[sparsity].ideal(2048)
        print(f"sparsity {sparsity}: {gained:.2f} times the tokens, ideal {ideal:.2f}")
        # tokens that are in flight are reserved too: 4 blocks more per request and compressible bin
        assert 0.85 * ideal < gained <= ideal


def spec(**changes: Any) -> SinkWindowSpec:
    settings: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
        "bin": 1,
        "sink": 20,
        "window": 40,
        "max_in_flight_tokens": 64,
        "max_model_len": 512,
    }
    return SinkWindowSpec(**{**settings, **changes})


def test_specs_of_different_bins_do_not_merge() -> None:
    own, other = spec(), spec(bin=2)
    assert own.is_uniform_with_collection({"a": own})
    assert not own.is_uniform_with_collection({"a": own, "b": other})
    with pytest.raises(AssertionError):
        SinkWindowSpec.merge([own, other])
    shared = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = [PackedFullSpec(**shared, bin=tag) for tag in (0, 3)]
    assert not full[0].is_uniform_with_collection(dict(enumerate(full)))
    with pytest.raises(AssertionError):
        PackedFullSpec.merge(full)


def test_most_blocks_of_a_request() -> None:
    # 2 of sinks; 39 + 64 tokens, the first one anywhere in its block: 7 + 1
    assert spec().most_blocks() == 10
    assert spec().most_blocks(32) == 2
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    assert spec().max_memory_usage_bytes(config) == 10 * 16 * 2 * 2 * 32 * 4


class FakePool:
    """A pool in which some blocks are cached."""

    hash_block_size = 16
    null_block = "null"

    def __init__(self, cached: set[int]) -> None:
        self.cached, self.lookups = cached, 0

    def get_cached_block(self, block_hash: int, groups: list[int]) -> list[str] | None:
        self.lookups += 1
        return [f"{group}:{block_hash}" for group in groups] if block_hash in self.cached else None


@pytest.mark.parametrize(
    ("cached", "hit"),
    [
        (set(), 0),
        ({0}, 1),  # of two blocks of sinks: every token before the hit is needed
        ({0, 1}, 2),
        ({0, 1, 2}, 3),
        ({1, 2, 3, 4, 5}, 0),  # no sinks
        ({0, 1, 9, 10, 11}, 12),  # sinks, and three blocks of window
        ({0, 1, 10, 11}, 2),  # half a window
        ({0, 1, 5, 6, 7, 10, 11}, 8),
        ({0, 1, 3, 4, 5, 7, 8, 9, 11}, 10),
        (set(range(12)), 12),
        ({0, 7, 8, 9}, 1),
    ],
)
def test_cache_hits_need_sinks_and_a_window(cached: set[int], hit: int) -> None:
    pool: Any = FakePool(cached)
    hashes: Any = list(range(12))
    tables, tokens = SinkWindowManager.find_longest_cache_hit(
        hashes, 12 * 16 + 5, [4, 7], pool, spec(), False, 16
    )
    assert tokens == hit * 16
    assert pool.lookups <= 2 * 12 + 2
    for group, table in zip((4, 7), tables, strict=True):
        needed = {number for number in range(hit) if number < 2 or number >= hit - 3}
        assert table == [
            f"{group}:{number}" if number in needed else "null" for number in range(hit)
        ]


@pytest.mark.parametrize(
    ("cached", "hit"), [(set(), 0), ({0, 1, 9, 10, 11}, 2), ({1, 2}, 0), (set(range(12)), 12)]
)
def test_cache_hits_need_all_of_a_protected_prompt(cached: set[int], hit: int) -> None:
    pool: Any = FakePool(cached)
    own = spec(protect_prompt=True)
    tables, tokens = SinkWindowManager.find_longest_cache_hit(
        list(range(12)), 12 * 16 + 5, [4], pool, own, False, 16
    )
    assert tokens == hit * 16
    assert tables == ([f"4:{number}" for number in range(hit)],)


def test_hits_are_aligned_to_the_scheduler() -> None:
    pool: Any = FakePool({0, 1, 4, 5, 6, 7, 8})
    hashes: Any = list(range(12))
    _, tokens = SinkWindowManager.find_longest_cache_hit(
        hashes, 12 * 16, [0], pool, spec(), False, 32
    )
    assert tokens == 8 * 16


def test_blocks_between_sinks_and_window_are_given_back() -> None:
    pool = BlockPool(num_gpu_blocks=50, enable_caching=False, hash_block_size=16)
    manager = SinkWindowManager(
        spec(), block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=16
    )
    free = pool.get_num_free_blocks()
    for computed in range(0, 400, 7):
        manager.remove_skipped_blocks("a", computed)
        manager.allocate_new_blocks("a", computed + 7, computed + 7)
        manager.num_cached_block["a"] = 0
        blocks = manager.req_to_blocks["a"]
        # the window of the token at ``computed`` begins at computed - 39
        expected = [at < 2 or at >= (computed - 39) // 16 for at in range(len(blocks))]
        assert [not block.is_null for block in blocks] == expected
        assert pool.get_num_free_blocks() == free - sum(expected)
        assert sum(expected) <= spec().most_blocks()
        asked = manager.get_num_blocks_to_allocate(
            "a", 512, [], computed, 0, 512, apply_admission_cap=True
        )
        assert asked == min(32 - len(blocks), 10 - sum(expected))
    manager.free("a")
    assert pool.get_num_free_blocks() == free


def test_a_protected_prompt_stays_and_cannot_grow() -> None:
    pool = BlockPool(num_gpu_blocks=50, enable_caching=False, hash_block_size=16)
    own = spec(protect_prompt=True)
    manager = SinkWindowManager(
        own, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=16
    )
    assert own.most_blocks() == 32  # a prompt may be as long as a text
    for computed in range(0, 400, 7):
        manager.remove_skipped_blocks("a", computed, 100)
        manager.allocate_new_blocks("a", computed + 7, computed + 7)
        blocks = manager.req_to_blocks["a"]
        assert [not block.is_null for block in blocks] == [
            at < 7 or at >= (computed - 39) // 16 for at in range(len(blocks))
        ]
    with pytest.raises(RuntimeError, match="streamed"):
        manager.remove_skipped_blocks("a", 400, 410)
    manager.free("a")
    manager.remove_skipped_blocks("a", 0, 410)  # another request of that name
