"""Heads dealt to the ranks of tensor parallelism: equal shares, every head once, few heads more in
full.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm.settings import ServingSettings, deal_heads, rounding
from tests.helpers.paths import PUBLISHED_GATES

MODELS = ("Llama-3.1-8B-R1", "Qwen-2.5-7B-R1", "Qwen-3-4B-Thinking")
CASES = [(model, ranks) for model in MODELS for ranks in (1, 2, 4, 8)]
CASES.remove(("Qwen-2.5-7B-R1", 8))  # 4 KV heads a layer: refused


@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0])
@pytest.mark.parametrize(("model", "ranks"), CASES, ids=str)
def test_ranks_have_equal_shares(model: str, sparsity: float, ranks: int) -> None:
    gates = HeadGates.load(PUBLISHED_GATES / "rlkv" / model)
    layers, heads = gates.alpha.shape
    asked = HeadAllocation.from_gates(gates, sparsity)
    full = asked.rounded_up(gates, ranks).full
    dealt = deal_heads(full, ranks)
    assert dealt.shape == (ranks, layers, heads // ranks)
    assert all(
        sorted(dealt[:, layer].flatten().tolist()) == list(range(heads)) for layer in range(layers)
    )
    kinds = torch.stack([full.gather(1, own) for own in dealt])
    assert kinds.sum((1, 2)).tolist() == [int(full.sum()) // ranks] * ranks
    assert (
        int((kinds.sum(2).amax(0) - kinds.sum(2).amin(0)).max()) <= 1
    )  # ranks wait for each other in every layer
    added = [head for head in compression_order(gates)[::-1] if full[head] and not asked.full[head]]
    assert len(added) == -asked.num_full % ranks
    assert not (asked.full & ~full).any()
    left = [float(gates.alpha[head]) for head in compression_order(gates) if not full[head]]
    assert all(float(gates.alpha[head]) >= max(left, default=0.0) for head in added)


def test_all_ranks_have_bins_of_the_same_sizes() -> None:
    from rlkv.vllm.packing import plan_heads

    full = HeadAllocation.random(32, 8, 0.9375, 0).full
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


def test_an_allocation_that_is_not_even_is_refused() -> None:
    with pytest.raises(ValueError, match="7 full heads"):
        deal_heads(torch.arange(16).view(4, 4) < 7, 2)


def test_what_equal_shares_cost() -> None:
    request = {"gates": "g", "sparsity": 0.55}
    settings = ServingSettings(full=("1100", "1100", "1100", "1100"), sink=16, window=64)
    found = rounding(request, settings, 2)
    assert (
        found
        == "sparsity 0.5000 instead of 0.55: 8 of 16 KV heads are full, a multiple of the 2 ranks"
    )
    assert rounding(request, settings, 1) is None
    assert rounding({"full": settings.full}, settings, 2) is None
    assert rounding({**request, "sparsity": 0.5}, settings, 2) is None
