"""Packing plans and blocks of a request: every head in one place, bytes near the ideal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation
from rlkv.vllm.packing import BufferDemand, PackingPlan, SinkWindowDemand, plan_heads, plan_packing
from rlkv.vllm.settings import ServingSettings

# the three models of the paper, and one with very few KV heads
SHAPES = [(28, 4), (32, 8), (36, 8), (28, 2)]
SPARSITIES = [0.0, 0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8, 0.9, 1.0]


def random_heads(shape: tuple[int, int], sparsity: float, seed: int = 0) -> torch.Tensor:
    return HeadAllocation.random(*shape, sparsity, seed).full


def check_places(plan: PackingPlan, full: torch.Tensor) -> None:
    """Every head is in one bin of its kind, whose parts lie side by side in order of layers."""
    ends = [0] * len(plan.bins)
    for layer, row in enumerate(full.tolist()):
        assert sorted(plan.head_order(layer)) == list(range(len(row)))
        for part in plan.of_layer(layer):
            assert all(row[head] == plan.bins[part.bin].full for head in part.heads)
            assert part.first == ends[part.bin]
            ends[part.bin] += len(part.heads)
    assert ends == [len(own.heads) for own in plan.bins]
    assert plan.block_entries == max(len(own.heads) * own.demand.block_size for own in plan.bins)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_bytes_are_within_five_percent_of_ideal(shape: tuple[int, int], sparsity: float) -> None:
    for seed in range(3):
        full = random_heads(shape, sparsity, seed)
        plan = plan_packing(full, SinkWindowDemand(16, 16, 64), reference_tokens=3000)
        check_places(plan, full)
        assert len(plan.bins) <= (1 if sparsity in (0, 1) else 4 if sparsity == 0.9 else 2)
        assert 1 <= plan.waste(3000) <= 1.05
        assert plan.waste(10_000) <= 1.05
        if sparsity == 0:
            assert plan.held(3000) == plan.uncompressed(3000)


@pytest.mark.parametrize("budget", [128, 512, 1024])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_with_eviction(shape: tuple[int, int], budget: int) -> None:
    """Compressible heads hold more than with sinks and window: their blocks must fit better."""
    demand = BufferDemand(16, budget, buffer=128, observation=8, group_size=4)
    for sparsity in SPARSITIES:
        full = random_heads(shape, sparsity)
        plan = plan_packing(full, demand, reference_tokens=3000)
        check_places(plan, full)
        assert len(plan.bins) <= 4
        assert 1 <= plan.waste(3000) <= 1.06, sparsity


def test_few_full_heads_have_long_blocks() -> None:
    plan = plan_packing(random_heads((32, 8), 0.8), SinkWindowDemand(16, 16, 64), 3000)
    assert [(own.full, len(own.heads), own.demand.block_size) for own in plan.bins] == [
        (True, 51, 64),
        (False, 205, 16),
    ]
    assert plan.block_entries == 205 * 16
    # 3000 tokens in blocks of 64; sinks, 63 tokens and one more in blocks of 16
    assert plan.blocks(3000) == 47 + 6
    assert "51 heads x 64 tokens, 205 heads x 16 tokens" in plan.summary(1, 3000)
    per_request = plan.blocks(3000)
    line = plan.capacity(10 * per_request, 4, 3000)
    assert "holds 30,000 tokens in requests of 3,000" in line
    assert f"would hold {10 * plan.held(3000) * 3000 // plan.uncompressed(3000):,}" in line


def test_layers_are_cut_only_where_a_bin_ends() -> None:
    full = random_heads((32, 8), 0.9)
    plan = plan_packing(full, SinkWindowDemand(16, 16, 64), 3000)
    assert len(plan.bins) > 2
    kinds = sum(len(set(row)) for row in full.tolist())
    assert sum(len(plan.of_layer(layer)) for layer in range(32)) <= kinds + len(plan.bins) - 2


def test_blocks_of_a_request() -> None:
    demand = SinkWindowDemand(block_size=16, sink=20, window=64)
    assert [demand.full(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
    # 2 blocks of sinks; 64 tokens of which the first may be the last of its block: 5 blocks
    assert [demand.compressible(tokens) for tokens in (1, 100, 112, 5000)] == [1, 7, 7, 7]
    # a window of 63 tokens at the end of the prompt's blocks, if there are so many behind the sinks
    kept = replace(demand, keep_prompt_window=True)
    prompts = (0, 33, 64, 65, 97, 800)
    assert [kept.compressible(5000, prompt) for prompt in prompts] == [7, 7, 8, 9, 11, 11]
    assert kept.compressible(112, 97) == 7


def test_all_ranks_have_bins_of_the_same_sizes() -> None:
    full = random_heads((32, 8), 0.9375)
    rows = tuple("".join("01"[kept] for kept in row) for row in full.tolist())
    settings = ServingSettings(full=rows, sink=16, window=64)
    (whole,) = plan_heads(settings, 16, 4, 8192)
    plans = plan_heads(settings, 16, 4, 8192, ranks=2)
    assert len(plans[0].bins) > 2
    sizes = [[(own.full, len(own.heads), own.demand) for own in plan.bins] for plan in plans]
    assert sizes == [sizes[0]] * 2
    for layer in range(32):
        order = [head for plan in plans for head in plan.head_order(layer)]
        assert sorted(order) == sorted(whole.head_order(layer)) == list(range(8))
