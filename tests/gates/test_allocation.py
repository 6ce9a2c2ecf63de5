"""HeadAllocation: the exact count, the tie rule, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from rlkv.gates.allocation import HeadAllocation, compression_order, is_decided, num_full_heads
from rlkv.gates.head_gates import HeadGates

GATES = HeadGates(torch.rand(5, 7, generator=torch.Generator().manual_seed(0)))
TWO = [(1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("sparsity", "total", "expected"),
    [
        (0.0, 10, 10),
        (1.0, 10, 0),
        (0.5, 5, 3),  # 2.5: a tie goes to full
        (0.9, 5, 1),  # 0.5, which binary floats call 0.4999...
        (0.3, 5, 4),  # 3.5
        (0.2, 112, 90),  # 89.6
        (0.4, 256, 154),  # 153.6
        (1e-9, 8, 8),
    ],
)
def test_number_of_full_heads(sparsity: float, total: int, expected: int) -> None:
    assert num_full_heads(sparsity, total) == expected


@pytest.mark.parametrize("sparsity", [None, [0.5], "0.5", True])
def test_what_is_not_a_number_is_no_sparsity(sparsity: Any) -> None:
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        num_full_heads(sparsity, 8)


@pytest.mark.parametrize("total", [1, 24, 112])
def test_sparsity_is_within_half_a_head(total: int) -> None:
    for i in range(1001):
        full = num_full_heads(i / 1000, total)
        assert abs(1 - Fraction(full, total) - Fraction(i, 1000)) <= Fraction(1, 2 * total)


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.35, 0.5, 0.95, 1.0])
def test_the_largest_gates_are_full(sparsity: float) -> None:
    allocation = HeadAllocation.from_gates(GATES, sparsity)
    full, rest = GATES.alpha[allocation.full], GATES.alpha[~allocation.full]
    assert len(full) == allocation.num_full == num_full_heads(sparsity, 35)
    assert len(rest) == allocation.num_compressible
    assert abs(allocation.sparsity - sparsity) <= 0.5 / 35 + 1e-12
    assert is_decided(GATES, allocation.full)
    if len(full) and len(rest):
        assert full.min() > rest.max()
        assert not is_decided(GATES, ~allocation.full)
    by_layer = HeadAllocation.from_gates(GATES, sparsity, scope="layer")
    kept = num_full_heads(sparsity, 7)
    for row, heads in zip(GATES.alpha, by_layer.full, strict=True):
        assert torch.equal(heads.nonzero()[:, 0], row.topk(kept).indices.sort().values)


def test_ties_are_broken_by_the_mean_over_training_then_by_position() -> None:
    alpha = torch.tensor([[0.0, 1.0, 0.0], [0.5, 1.0, 0.0]])
    mean = torch.tensor([[0.3, 0.9, 0.1], [0.6, 0.9, 0.3]])
    gates = HeadGates(alpha, mean_alpha=mean)
    order = [(0, 2), (1, 2), (0, 0), (1, 0), (1, 1), (0, 1)]
    assert compression_order(gates) == order
    for kept in range(7):
        full = HeadAllocation.from_gates(gates, 1 - kept / 6).full
        assert [tuple(head) for head in (~full).nonzero().tolist()] == sorted(order[: 6 - kept])


def test_an_order_names_the_heads_that_go_first() -> None:
    found = HeadAllocation.from_order([*TWO, (0, 0)], 2, 2, 0.5)
    assert found.full.tolist() == [[True, False], [False, True]]
    assert HeadAllocation.from_order([], 2, 2, 0.0).full.all()


def test_heads_are_added_up_to_a_multiple() -> None:
    few = HeadAllocation.from_gates(GATES, 0.8)
    assert few.num_full == 7
    assert few.rounded_up(GATES, 4) == HeadAllocation.from_gates(GATES, 1 - 8 / 35)
    assert few.rounded_up(GATES, 7) == few


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadAllocation.from_gates(GATES, -0.01), r"sparsity.*\[0, 1\]"),
        (lambda: HeadAllocation.from_gates(GATES, 50, "layer"), r"sparsity.*\[0, 1\]"),
        (lambda: HeadAllocation.random(2, 2, float("nan"), seed=0), r"sparsity.*\[0, 1\]"),
        (lambda: HeadAllocation.from_gates(GATES, 0.5, scope="head"), "scope 'head'"),
        (lambda: HeadAllocation.from_order(TWO, 2, 2, 1.0), "4 of 4.*order.*2"),
        (lambda: HeadAllocation.from_order([(2, 0)], 2, 2, 0.0), "layer 2, head 0"),
        (lambda: HeadAllocation.from_order([(0, -1)], 2, 2, 0.0), "layer 0, head -1"),
        (lambda: HeadAllocation.from_order([*TWO, (1, 0)], 2, 2, 0.25), "layer 1, head 0 twice"),
        (lambda: HeadAllocation.from_order([], 0, 4, 0.5), "0 layers"),
        (lambda: HeadAllocation(torch.ones(2, 2)), "bool tensor"),
        (lambda: HeadAllocation(torch.ones(0, 2, dtype=torch.bool)), "bool tensor"),
        (lambda: HeadAllocation([[True]]), "bool tensor"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Callable[[], HeadAllocation], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_random_draws_are_seeded_exact_and_nested() -> None:
    draws = [HeadAllocation.random(6, 4, 0.5, seed) for seed in range(20)]
    assert draws[3] == HeadAllocation.random(6, 4, 0.5, 3)
    assert len(set(draws)) == 20
    assert all(draw.num_full == 12 for draw in draws)
    counts = torch.stack([draw.full for draw in draws]).sum(0)
    assert counts.min() > 0  # no head is left out or kept by every draw
    assert counts.max() < 20
    kept = torch.ones(6, 4, dtype=torch.bool)
    for sparsity in (0.1, 0.5, 0.55, 0.9):
        full = HeadAllocation.random(6, 4, sparsity, 7).full
        assert not (full & ~kept).any()
        kept = full


def test_random_draws_of_a_hybrid_are_among_its_gates() -> None:
    heads = (0, 4, 0, 0, 2, 4)
    gated = torch.arange(4) < torch.tensor(heads)[:, None]
    draws = [HeadAllocation.random(6, 4, 0.5, seed, heads) for seed in range(20)]
    assert len(set(draws)) > 15
    assert all(draw.num_full == draw.num_compressible == 5 for draw in draws)
    counts = torch.stack([draw.full for draw in draws]).sum(0)
    assert (counts[~gated] == 20).all()
    assert 0 < counts[gated].min() <= counts[gated].max() < 20


def test_overlap() -> None:
    a, b, one, none = (
        HeadAllocation(torch.tensor([full]))
        for full in (
            [True, True, False, False],
            [True, False, True, False],
            [True, False, False, False],
            [False] * 4,
        )
    )
    assert (a.overlap(a), a.overlap(b), a.overlap(one), one.overlap(a)) == (1, 0.5, 0.5, 0.5)
    assert (a.overlap(none), none.overlap(none)) == (0, 1)
    with pytest.raises(ValueError, match=r"1 x 4 and 2 x 2"):
        a.overlap(HeadAllocation(torch.ones(2, 2, dtype=torch.bool)))


def test_equality_hash_and_text_go_by_value() -> None:
    full = torch.tensor([[True, False], [False, True]])
    a = HeadAllocation(full)
    assert len({a, HeadAllocation(a.full)}) == 1
    full[0, 0] = False  # the allocation does not follow the tensor that it was made of
    assert a.num_full == 2
    assert a != HeadAllocation(~a.full)
    assert a != HeadAllocation(torch.tensor([[True, False, False, True]]))
    assert repr(a) == "<HeadAllocation 2 x 2: 2 full, 2 compressible, sparsity 0.5>"
