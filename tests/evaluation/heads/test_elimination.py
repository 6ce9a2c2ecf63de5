"""Backward elimination on scores whose optimum is known."""

import torch

from rlkv.evaluation.heads.elimination import backward_elimination, single_head_scores
from rlkv.gates.allocation import HeadAllocation

WORTH = torch.tensor([[0.1, 0.5, 0.0], [0.3, 0.0, 0.2]])


def additive(allocation: HeadAllocation) -> float:
    return float((WORTH * allocation.full).sum())


def test_additive_worth_gives_ascending_order() -> None:
    calls = []
    steps = backward_elimination(additive, 2, 3, lambda: calls.append(1))
    order = [(s.layer, s.head) for s in steps]
    assert order == [(0, 2), (1, 1), (0, 0), (1, 2), (1, 0), (0, 1)]  # ties to the lower index
    assert len(calls) == 6 * 7 // 2


def test_redundant_pair_is_seen_only_by_elimination() -> None:
    """Two heads that replace each other cost nothing alone, but one of them must stay."""

    def either(allocation: HeadAllocation) -> tuple[float, float]:
        one_left = bool(allocation.full[0, 0] or allocation.full[1, 0])
        return float(one_left), float((WORTH * allocation.full).sum())

    alone = single_head_scores(either, 2, 3, lambda: None)
    assert alone[0][0][0] == alone[1][0][0] == 1.0
    steps = backward_elimination(either, 2, 3, lambda: None)
    assert (steps[-1].layer, steps[-1].head) == (1, 0)
    assert [s.score[0] for s in steps] == [1.0] * 5 + [0.0]
