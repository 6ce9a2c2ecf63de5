"""Block specs and managers of bins, and what they report: bookkeeping without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engines import need_vllm

need_vllm()

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from rlkv.vllm import specs
from rlkv.vllm.specs import (
    EvictingManager,
    EvictingSpec,
    PackedFullManager,
    PackedFullSpec,
    SinkWindowManager,
    SinkWindowSpec,
    UsageCollector,
)

SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
    "bin": 1,
}
EVICTING = EvictingSpec(**SIZES, budget=20, buffer=12, observation=8, group_size=2)


def spec(**changes: Any) -> SinkWindowSpec:
    own = {"sink": 20, "window": 40, "max_in_flight_tokens": 64, "max_model_len": 512}
    return SinkWindowSpec(**{**SIZES, **own, **changes})


def manager_of(kind: Any, own: Any, scheduler_block_size: int = 16) -> tuple[Any, BlockPool]:
    pool = BlockPool(num_gpu_blocks=50, enable_caching=False, hash_block_size=16)
    options = {"kv_cache_group_id": 0, "scheduler_block_size": scheduler_block_size}
    return kind(own, block_pool=pool, enable_caching=False, **options), pool


def test_specs_of_different_bins_do_not_merge() -> None:
    full = [PackedFullSpec(**{**SIZES, "bin": number}) for number in range(2)]
    for own, other in ((spec(), spec(bin=2)), full):
        assert own.is_uniform_with_collection({"a": own})
        assert not own.is_uniform_with_collection({"a": own, "b": other})
        assert own.merge([own, own]) == own
        with pytest.raises(AssertionError):
            own.merge([own, other])


def test_most_blocks_of_a_request() -> None:
    # 2 of sinks; 39 + 64 tokens, the first one anywhere in its block: 7 + 1
    assert spec().most_blocks() == 10
    assert spec().most_blocks(32) == 2
    assert spec(keep_prompt_window=True).most_blocks() == 13  # 39 tokens, which end with a block
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


ALL = set(range(12))


@pytest.mark.parametrize(
    ("cached", "hit", "protect", "alignment"),
    [
        (set(), 0, False, 16),
        ({0}, 1, False, 16),  # of two blocks of sinks: every token before the hit is needed
        ({0, 1}, 2, False, 16),
        ({0, 1, 2}, 3, False, 16),
        ({1, 2, 3, 4, 5}, 0, False, 16),  # no sinks
        ({0, 1, 9, 10, 11}, 12, False, 16),  # sinks, and three blocks of window
        ({0, 1, 10, 11}, 2, False, 16),  # half a window
        ({0, 1, 5, 6, 7, 10, 11}, 8, False, 16),
        ({0, 1, 3, 4, 5, 7, 8, 9, 11}, 10, False, 16),
        (ALL, 12, False, 16),
        ({0, 7, 8, 9}, 1, False, 16),
        ({0, 1, 4, 5, 6, 7, 8}, 8, False, 32),  # the scheduler's blocks have two of these
        # all of a protected prompt is needed
        (set(), 0, True, 16),
        ({0, 1, 9, 10, 11}, 2, True, 16),
        ({1, 2}, 0, True, 16),
        (ALL, 12, True, 16),
    ],
)
def test_cache_hits_need_sinks_and_a_window(
    cached: set[int], hit: int, protect: bool, alignment: int
) -> None:
    pool: Any = FakePool(cached)
    own = spec(protect_prompt=protect)
    tables, tokens = SinkWindowManager.find_longest_cache_hit(
        list(range(12)), 12 * 16 + 5, [4, 7], pool, own, False, alignment
    )
    assert tokens == hit * 16
    assert pool.lookups <= len(ALL)
    needed = [protect or number < 2 or number >= hit - 3 for number in range(hit)]
    for group, table in zip((4, 7), tables, strict=True):
        names = [f"{group}:{number}" for number in range(hit)]
        assert table == [name if own else "null" for name, own in zip(names, needed, strict=True)]


def test_a_protected_prompt_does_not_find_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where drafts took it some tokens past the prompt within one block."""
    monkeypatch.setattr(FullAttentionManager, "cache_blocks", lambda *_, **__: None)
    own = PackedFullSpec(**SIZES, protect_prompt=True)
    manager, _ = manager_of(PackedFullManager, own)
    for cached, prompt, skips in ((16, 40, False), (32, 40, True), (48, 40, True)):
        request = SimpleNamespace(num_prompt_tokens=prompt, skip_reading_prefix_cache=False)
        manager.cache_blocks(request, cached)
        assert request.skip_reading_prefix_cache is skips


def test_blocks_between_sinks_and_window_are_given_back() -> None:
    manager, pool = manager_of(SinkWindowManager, spec())
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


@pytest.mark.parametrize("prompt", [1, 40, 100, 112, 129, 300])
@pytest.mark.parametrize(("step", "alignment"), [(1, 16), (1, 48), (7, 32)])
def test_the_last_window_of_a_prompt_stays(prompt: int, step: int, alignment: int) -> None:
    """It ends where hits can end: with a block of every bin, before the prompt's last token."""
    own = spec(keep_prompt_window=True)
    manager, pool = manager_of(SinkWindowManager, own, alignment)
    free = pool.get_num_free_blocks()
    end = (prompt - 1) // alignment * alignment // 16
    for computed in range(0, 400, step):
        # a streamed prompt grows: the window of its first part stays
        manager.remove_skipped_blocks("a", computed, prompt + (computed > 350))
        manager.allocate_new_blocks("a", computed + step, computed + step)
        expected = []
        for at in range(len(manager.req_to_blocks["a"])):
            expected.append(at < 2 or end - 3 <= at < end or at >= (computed - 39) // 16)
        assert [not block.is_null for block in manager.req_to_blocks["a"]] == expected
        assert sum(expected) <= own.most_blocks()
        if step == 1:
            assert sum(expected) <= own.demand.compressible(computed + 1, prompt)
    manager.free("a")
    assert pool.get_num_free_blocks() == free
    manager.remove_skipped_blocks("a", 0, 7)  # another request of that name
    assert manager._prompts == {"a": 7}


def test_a_protected_prompt_stays_and_cannot_grow() -> None:
    own = spec(protect_prompt=True)
    manager, _ = manager_of(SinkWindowManager, own)
    assert own.most_blocks() == 32  # a prompt may be as long as a text
    for computed in range(0, 400, 7):
        manager.remove_skipped_blocks("a", computed, 100)
        manager.allocate_new_blocks("a", computed + 7, computed + 7)
        blocks = manager.req_to_blocks["a"]
        expected = [at < 7 or at >= (computed - 39) // 16 for at in range(len(blocks))]
        assert [not block.is_null for block in blocks] == expected
    with pytest.raises(RuntimeError, match="streamed"):
        manager.remove_skipped_blocks("a", 400, 410)
    manager.free("a")
    manager.remove_skipped_blocks("a", 0, 410)  # another request of that name


def test_a_request_under_eviction_that_goes_back_is_refused() -> None:
    """As between two parts of a streamed input, where the engine computes a token again."""
    manager, _ = manager_of(EvictingManager, EVICTING)
    assert manager.get_num_blocks_to_allocate("a", 30, [], 0, 0, 30) == 3
    assert len(manager.allocate_new_blocks("a", 30, 30)) == 3
    assert manager.get_num_blocks_to_allocate("a", 90, [], 30, 30, 90) == 0
    with pytest.raises(RuntimeError, match="token 29"):
        manager.get_num_blocks_to_allocate("a", 91, [], 29, 29, 91)
    manager.free("a")
    # preempted, or another one of that name
    assert manager.get_num_blocks_to_allocate("a", 91, [], 0, 0, 91) == 3


def test_evictions_are_reported_without_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = manager_of(EvictingManager, EVICTING)
    reported: list[int] = []
    monkeypatch.setattr(manager, "report", lambda: reported.append(manager.evictions()))
    for tokens in range(40, 100):
        manager.get_num_blocks_to_allocate("a", tokens, [], tokens - 1, 0, tokens)
        manager.allocate_new_blocks("a", tokens, tokens)
    assert reported[-1] == manager.evictions() > 1


def test_reports_come_every_five_seconds_and_when_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = []
    usage = {"heads": "full", "blocks": 1, "bytes": 2, "saved": 3, "evictions": 4}
    bins = [manager_of(PackedFullManager, PackedFullSpec(**SIZES))[0] for _ in range(2)]
    for manager in bins:
        manager.req_to_blocks["0"] = []
        monkeypatch.setattr(manager, "usage", lambda: reported.append(usage) or usage)
    first, second = bins
    clock = iter((99.0, 100.0, 104.9, 105.1, 105.2, 105.3))
    monkeypatch.setattr(specs.time, "monotonic", lambda: next(clock))
    monkeypatch.delenv(specs.FOLDER, raising=False)
    first.report()
    assert not reported, "nobody asked"
    collector = UsageCollector()
    collector.sparsity = 0.5
    collector.ranks = 2  # as many bytes on each
    monkeypatch.setenv(specs.FOLDER, collector.folder.name)
    for number in (1, 1, 2):
        first.report()
        assert len(reported) == number
    first.req_to_blocks.clear()
    for manager, number in ((first, 3), (second, 4)):
        manager.report()
        assert len(reported) == number
    assert len(list(Path(collector.folder.name).iterdir())) == 2
    values = {}
    for family in collector.collect():
        for sample in family.samples:
            values[sample.name, sample.labels.get("heads")] = sample.value
    assert values == {
        ("rlkv:kv_blocks", "full"): 2,
        ("rlkv:kv_blocks", "compressible"): 0,
        ("rlkv:kv_bytes", "full"): 8,
        ("rlkv:kv_bytes", "compressible"): 0,
        ("rlkv:kv_bytes_saved", None): 12,
        ("rlkv:evictions_total", None): 8,
        ("rlkv:sparsity", None): 0.5,
    }
