"""HeadAllocation: the exact count, the tie rule, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation, compression_order, is_decided, num_full_heads
from rlkv.gates.head_gates import HeadGates
from tests.helpers.paths import PUBLISHED_GATES

SPARSITIES = [i / 20 for i in range(21)]


def make_gates(seed: int = 0, layers: int = 5, heads: int = 7) -> HeadGates:
    return HeadGates(torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(
    ("sparsity", "total", "expected"),
    [
        (0.0, 10, 10),
        (1.0, 10, 0),
        (0.5, 24, 12),
        (0.5, 5, 3),  # 2.5: a tie goes to full
        (0.9, 5, 1),  # 0.5, which binary floats call 0.4999...
        (0.7, 5, 2),  # 1.5
        (0.3, 5, 4),  # 3.5
        (0.2, 112, 90),  # 89.6
        (0.4, 256, 154),  # 153.6
        (0.6, 288, 115),  # 115.2
        (1e-9, 8, 8),
    ],
)
def test_number_of_full_heads(sparsity: float, total: int, expected: int) -> None:
    assert num_full_heads(sparsity, total) == expected


@pytest.mark.parametrize("total", [1, 24, 112])
def test_sparsity_is_within_half_a_head(total: int) -> None:
    for i in range(1001):
        full = num_full_heads(i / 1000, total)
        assert abs(1 - Fraction(full, total) - Fraction(i, 1000)) <= Fraction(1, 2 * total)


@pytest.mark.parametrize("sparsity", [-0.01, 1.01, 50, float("nan"), float("inf")])
def test_a_sparsity_outside_0_1_is_refused(sparsity: float) -> None:
    for scope in ("global", "layer"):
        with pytest.raises(ValueError, match=r"sparsity.*\[0, 1\]"):
            HeadAllocation.from_gates(make_gates(), sparsity, scope)
    with pytest.raises(ValueError, match=r"sparsity.*\[0, 1\]"):
        HeadAllocation.random(2, 2, sparsity, seed=0)


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.35, 0.5, 0.95, 1.0])
def test_the_largest_gates_are_full(sparsity: float) -> None:
    gates = make_gates()
    allocation = HeadAllocation.from_gates(gates, sparsity)
    full, rest = gates.alpha[allocation.full], gates.alpha[~allocation.full]
    assert len(full) == allocation.num_full == num_full_heads(sparsity, 35)
    assert len(rest) == allocation.num_compressible
    assert abs(allocation.sparsity - sparsity) <= 0.5 / 35 + 1e-12
    if len(full) and len(rest):
        assert full.min() > rest.max()
    assert is_decided(gates, allocation.full)
    if 0 < allocation.num_full < 35:
        assert not is_decided(gates, ~allocation.full)


def test_ties_are_broken_by_rank_then_by_position() -> None:
    alpha = torch.tensor([[0.0, 1.0, 0.0], [0.5, 1.0, 0.0]])
    rank = torch.tensor([[0.3, 0.9, 0.1], [0.6, 0.9, 0.3]])
    gates = HeadGates(alpha, mean_alpha=rank)
    assert compression_order(gates) == [(0, 2), (1, 2), (0, 0), (1, 0), (1, 1), (0, 1)]
    full = [
        HeadAllocation.from_gates(gates, 1 - kept / 6).full.int().tolist() for kept in range(1, 6)
    ]
    assert full == [
        [[0, 1, 0], [0, 0, 0]],
        [[0, 1, 0], [0, 1, 0]],
        [[0, 1, 0], [1, 1, 0]],
        [[1, 1, 0], [1, 1, 0]],
        [[1, 1, 0], [1, 1, 1]],
    ]


def test_equal_gates_keep_the_lower_heads() -> None:
    allocation = HeadAllocation.from_gates(HeadGates(torch.ones(2, 4)), 0.5)
    assert allocation.full.tolist() == [[True] * 4, [False] * 4]
    allocation = HeadAllocation.from_gates(HeadGates(torch.ones(2, 4)), 0.5, scope="layer")
    assert allocation.full.tolist() == [[True, True, False, False]] * 2


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 1.0])
def test_scope_layer_keeps_the_same_number_in_every_layer(sparsity: float) -> None:
    gates = make_gates()
    allocation = HeadAllocation.from_gates(gates, sparsity, scope="layer")
    kept = num_full_heads(sparsity, 7)
    assert allocation.full.sum(1).tolist() == [kept] * 5
    assert allocation.sparsity == pytest.approx(1 - kept / 7)
    for row, full in zip(gates.alpha, allocation.full, strict=True):
        assert set(full.nonzero().flatten().tolist()) == set(
            row.sort(descending=True).indices[:kept].tolist()
        )


def test_scope_layer_rounds_once_for_all_layers() -> None:
    gates = make_gates(heads=4)
    assert HeadAllocation.from_gates(gates, 0.1, scope="layer").sparsity == 0
    assert HeadAllocation.from_gates(gates, 0.4, scope="layer").sparsity == 0.5
    with pytest.raises(ValueError, match="scope 'head'"):
        HeadAllocation.from_gates(gates, 0.5, scope="head")


def test_an_order_names_the_heads_that_go_first() -> None:
    order = [(1, 0), (0, 1), (0, 0)]
    assert HeadAllocation.from_order(order, 2, 2, 0.5).full.tolist() == [
        [True, False],
        [False, True],
    ]
    assert HeadAllocation.from_order([], 2, 2, 0.0).full.all()
    assert not HeadAllocation.from_order([*order, (1, 1)], 2, 2, 1.0).full.any()
    with pytest.raises(ValueError, match=r"4 of 4.*order.*3"):
        HeadAllocation.from_order(order, 2, 2, 1.0)
    for wrong in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match=f"layer {wrong[0]}, head {wrong[1]}"):
            HeadAllocation.from_order([wrong], 2, 2, 0.0)
    with pytest.raises(ValueError, match="layer 1, head 0"):
        HeadAllocation.from_order([*order, (1, 0)], 2, 2, 0.25)
    with pytest.raises(ValueError, match="0 layers"):
        HeadAllocation.from_order([], 0, 4, 0.5)


def test_random_draws_are_seeded_exact_and_nested() -> None:
    draws = [HeadAllocation.random(6, 4, 0.5, seed) for seed in range(20)]
    assert draws[3] == HeadAllocation.random(6, 4, 0.5, 3)
    assert len(set(draws)) == 20
    assert all(draw.num_full == 12 for draw in draws)
    counts = torch.stack([draw.full for draw in draws]).sum(0)
    assert counts.min() > 0  # no head is left out or kept by every draw
    assert counts.max() < 20
    kept = torch.ones(6, 4, dtype=torch.bool)
    for sparsity in SPARSITIES:
        full = HeadAllocation.random(6, 4, sparsity, 7).full
        assert not (full & ~kept).any()
        kept = full


@pytest.mark.parametrize(
    "full",
    [
        torch.ones(2, 2),
        torch.ones(4, dtype=torch.bool),
        torch.ones(0, 2, dtype=torch.bool),
        [[True]],
    ],
)
def test_other_tensors_are_refused(full: object) -> None:
    with pytest.raises(ValueError, match="bool tensor"):
        HeadAllocation(full)  # type: ignore[arg-type]


def test_an_allocation_does_not_follow_the_tensor_it_was_made_of() -> None:
    full = torch.ones(2, 2, dtype=torch.bool)
    allocation = HeadAllocation(full)
    full[0, 0] = False
    assert allocation.num_full == 4


def test_overlap() -> None:
    a = HeadAllocation(torch.tensor([[True, True, False, False]]))
    b = HeadAllocation(torch.tensor([[True, False, True, False]]))
    one = HeadAllocation(torch.tensor([[True, False, False, False]]))
    none = HeadAllocation(torch.zeros(1, 4, dtype=torch.bool))
    assert (a.overlap(a), a.overlap(b), a.overlap(one), one.overlap(a)) == (1, 0.5, 0.5, 0.5)
    assert (a.overlap(none), none.overlap(none)) == (0, 1)
    with pytest.raises(ValueError, match=r"1 x 4 and 2 x 2"):
        a.overlap(HeadAllocation(torch.ones(2, 2, dtype=torch.bool)))


def test_equality_hash_and_text_go_by_value() -> None:
    a = HeadAllocation(torch.tensor([[True, False], [False, True]]))
    assert a == HeadAllocation(a.full)
    assert len({a, HeadAllocation(a.full)}) == 1
    assert a != HeadAllocation(~a.full)
    assert a != HeadAllocation(torch.tensor([[True, False, False, True]]))
    assert repr(a) == "<HeadAllocation 2 x 2: 2 full, 2 compressible, sparsity 0.5>"


def test_heads_are_added_up_to_a_multiple() -> None:
    gates = make_gates()
    few = HeadAllocation.from_gates(gates, 0.8)
    assert few.num_full == 7
    assert few.rounded_up(gates, 4) == HeadAllocation.from_gates(gates, 1 - 8 / 35)
    assert few.rounded_up(gates, 7) == few


def test_published_gates_tie_so_that_a_threshold_misses_and_a_count_does_not() -> None:
    gates = HeadGates.load(PUBLISHED_GATES / "rlkv" / "Qwen-2.5-7B-R1")
    by_threshold = (gates.alpha <= gates.alpha.quantile(0.2)).float().mean().item()
    assert by_threshold == pytest.approx(24 / 112)  # 0.214
    assert abs(by_threshold - 0.2) > 0.5 / 112
    for sparsity in SPARSITIES:
        allocation = HeadAllocation.from_gates(gates, sparsity)
        assert abs(allocation.sparsity - sparsity) <= 0.5 / 112 + 1e-12
