"""The packing plan: every head in one place, bytes near the ideal, groups as the engine makes them."""

from __future__ import annotations

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation
from rlkv.vllm.blocks.demand import BufferDemand, SinkWindowDemand
from rlkv.vllm.blocks.packing import Part, engine_groups, plan_packing

SHAPES = [(28, 4), (32, 8), (36, 8), (28, 2)]  # the three models of the paper, and one with very few KV heads
SPARSITIES = [0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8, 0.9, 1.0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_bytes_are_within_five_percent_of_ideal(shape: tuple[int, int], sparsity: float) -> None:
    for seed in range(3):
        full = HeadAllocation.random(*shape, sparsity, seed).full
        plan = plan_packing(full, SinkWindowDemand(16, 16, 64), reference_tokens=3000)
        for layer, row in enumerate(full.tolist()):
            assert sorted(plan.head_order(layer)) == list(range(shape[1]))
            for part in plan.of_layer(layer):
                assert all(row[head] == part.full for head in part.heads)
        assert 1 <= plan.waste(3000) <= 1.05
        assert plan.waste(10_000) <= 1.05
        sizes = {sum(part.size for part in group) for group in plan.groups}
        assert plan.heads_per_block == max(sizes)


@pytest.mark.parametrize("budget", [128, 512, 1024])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_with_eviction(shape: tuple[int, int], budget: int) -> None:
    """Compressible heads hold more than with sinks and window; few heads cannot be dealt into bins as evenly."""
    demand = BufferDemand(16, budget, buffer=128, observation=8, group_size=4)
    for sparsity in SPARSITIES:
        plan = plan_packing(HeadAllocation.random(*shape, sparsity, 0).full, demand, reference_tokens=3000)
        assert 1 <= plan.waste(3000) <= (1.09 if shape == (28, 2) else 1.05), sparsity


def test_uneven_layers_are_packed_too() -> None:
    full = torch.zeros(28, 4, dtype=torch.bool)
    full[:14] = True  # half of the layers are full, the other half compressible
    full[0, 0], full[20, 1] = False, True
    plan = plan_packing(full, SinkWindowDemand(16, 16, 64), 3000)
    assert len(plan.groups) == 2
    assert plan.waste(3000) == 1.0


def test_nothing_to_compress_is_one_group() -> None:
    plan = plan_packing(torch.ones(6, 4, dtype=torch.bool), SinkWindowDemand(16, 16, 64), 3000)
    assert len(plan.groups) == 1
    assert plan.held(3000) == plan.uncompressed(3000) == 24 * 188


def test_parts_are_not_cut_more_often_than_the_engine_makes_necessary() -> None:
    """Parts of 3 and 5 heads in a bin would be torn apart; of 3, 3 and 2 heads they are not."""
    full = torch.tensor([[True] * 3 + [False] * 5, [True] * 5 + [False] * 3])
    plan = plan_packing(full, SinkWindowDemand(32, 4, 28), 370)
    assert sorted(part.size for part in plan.bins[0]) == [2, 3, 3]
    assert [len(group) for group in plan.groups] == [3, 3]


def test_few_bins_are_preferred_to_a_little_waste() -> None:
    plan = plan_packing(HeadAllocation.random(32, 8, 0.4, 0).full, SinkWindowDemand(16, 16, 64), 3000)
    assert len(plan.groups) == 2
    assert 1 < plan.waste(3000) < 1.03


def test_blocks_of_a_request() -> None:
    demand = SinkWindowDemand(block_size=16, sink=20, window=64)
    assert [demand.full(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
    # 2 blocks of sinks; 64 tokens of which the first may be the last of its block: 5 blocks
    assert [demand.compressible(tokens) for tokens in (1, 100, 112, 5000)] == [1, 7, 7, 7]


def test_groups_where_parts_differ_are_the_bins() -> None:
    bins = [[part(2, 0), part(1, 0), part(1, 0)], [part(4, 1)]]
    assert engine_groups(bins) == bins


def test_groups_of_equal_parts_have_equally_many() -> None:
    bins = [[part(2, 0)] * 6, [part(2, 1)] * 3]
    assert [len(group) for group in engine_groups(bins)] == [3, 3, 3]
    bins = [[part(2, 0)] * 4, [part(2, 1)] * 3]  # less than half as many more: left as they are
    assert [len(group) for group in engine_groups(bins)] == [4, 3]


def part(size: int, number: int) -> Part:
    return Part(0, tuple(range(size)), number == 0, number)
