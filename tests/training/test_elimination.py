"""Lazy elimination on losses whose order is known, and gates that are re-ranked by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.training.elimination import Removal, eliminate, num_removals, rerank, with_order

# order of the gates: (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
GATES = HeadGates(
    alpha=torch.tensor([[0.0, 0.0, 0.4], [0.5, 0.6, 0.9]]),
    mean_alpha=torch.arange(6).view(2, 3) / 10,
)
HEADS = compression_order(GATES)
ALL = torch.ones(2, 3, dtype=torch.bool)
WORTH = torch.tensor([[9.0, 0.0, 0.7], [0.9, 0.1, 0.8]])


class Known:
    """A loss by formula; a pass per measurement."""

    def __init__(self, formula: Callable[[Tensor], float]) -> None:
        self.formula, self.passes, self.cpu_seconds = formula, 0.0, 0.0

    def of(self, full_LH: Tensor) -> float:
        self.passes += 1
        return self.formula(full_LH)

    def without_each(self, full_LH: Tensor, heads: Sequence[tuple[int, int]]) -> list[float]:
        found = []
        for layer, head in heads:
            reduced = full_LH.clone()
            reduced[layer, head] = False
            found.append(self.of(reduced))
        return found


def additive(full_LH: Tensor) -> float:
    return float((WORTH * ~full_LH).sum())


def either(full_LH: Tensor) -> float:
    """(0, 0) and (1, 0) replace each other: both may not go."""
    return (
        additive(full_LH)
        - 8 * float(not full_LH[0, 0])
        + 20 * float(not (full_LH[0, 0] or full_LH[1, 0]))
    )


def ignore(step: Removal) -> None:
    pass


def test_where_costs_do_not_change_each_head_is_measured_once_more() -> None:
    loss, steps = Known(additive), list[Removal]()
    order = eliminate(loss, ALL, HEADS, 6, 100, steps.append)
    assert order == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (0, 0)]
    assert loss.passes == 1 + 6 + 6  # the start, all heads, and the lowest at every step
    assert [(step.layer, step.head) for step in steps] == order
    assert [step.loss for step in steps] == pytest.approx(
        WORTH.flatten().sort().values.cumsum(0).tolist()
    )
    assert steps[-1].passes == loss.passes


def test_a_cost_that_has_grown_is_seen() -> None:
    order = eliminate(Known(either), ALL, HEADS, 5, 100, ignore)
    assert order == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (0, 0)]
    assert eliminate(Known(either), ALL, HEADS, 3, 100, ignore)[3:] == [(1, 2), (1, 0), (0, 0)]


def test_the_budget_bounds_the_passes() -> None:
    """Without room for a second measurement the first one decides: (0, 0) costs 1 alone, after (1,
    0) it costs 21.
    """
    loss = Known(
        lambda full: either(full) - 0.95 * float(not full[0, 0])
    )  # (0, 0) costs 0.05 alone
    assert eliminate(loss, ALL, HEADS, 5, 7, ignore)[:2] == [(0, 1), (0, 0)]
    assert loss.passes == 7
    loss = Known(either)
    eliminate(loss, ALL, HEADS, 5, 10, ignore)
    assert loss.passes <= 10


def test_equal_heads_go_in_the_order_given() -> None:
    assert (
        eliminate(Known(lambda full: float(~full.sum())), ALL, HEADS[::-1], 6, 100, ignore)
        == HEADS[::-1]
    )


def test_measured_within_the_span() -> None:
    steps: list[Removal] = []
    result = rerank(GATES, Known(additive), 1 / 3, 2 / 3, 100, steps.append)
    assert [(step.layer, step.head) for step in steps] == [(1, 1), (0, 2)]
    # (0, 0) is worth the most, but the gates are trusted below the span; (1, 2) costs less than (1,
    # 0)
    assert compression_order(result) == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (1, 0)]
    before, after = (HeadAllocation.from_gates(gates, 1 / 3) for gates in (GATES, result))
    assert before == after
    assert result.alpha.flatten().sort().values.equal(GATES.alpha.flatten().sort().values)


def test_the_start_is_not_changed() -> None:
    full = ALL.clone()
    eliminate(Known(additive), full, HEADS, 6, 100, ignore)
    assert full.all()


def test_order_survives_equal_gates() -> None:
    flat = HeadGates(alpha=torch.full((2, 3), 0.5))
    order = [(1, 2), (0, 1), (1, 0), (0, 0), (0, 2), (1, 1)]
    assert compression_order(with_order(flat, order)) == order


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.6, 0.5), (0.5, 0.51)])
def test_empty_span(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=f"{low} and {high}"):
        num_removals(6, low, high)
