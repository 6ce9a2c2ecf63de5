"""Agreement with a ground truth that is known."""

import pytest
import torch

from rlkv.evaluation.heads.agreement import agreement
from rlkv.gates.head_gates import HeadGates

TRUTH = {
    "elimination": [{"layer": i // 2, "head": i % 2} for i in (3, 1, 0, 2)],
    "accuracy_lost_by_single_head": [[0.3, 0.1], [0.4, 0.0]],
}


def test_same_order_and_reverse_order() -> None:
    same = agreement(HeadGates(alpha=torch.tensor([[0.6, 0.2], [0.9, 0.0]])), TRUTH)
    assert same == pytest.approx({"spearman_single_head": 1.0, "spearman_elimination": 1.0, "overlap_at_0.5": 1.0})
    reverse = agreement(HeadGates(alpha=torch.tensor([[0.2, 0.6], [0.0, 0.9]])), TRUTH)
    assert reverse == pytest.approx({"spearman_single_head": -1.0, "spearman_elimination": -1.0, "overlap_at_0.5": 0.0})


def test_equal_gates_have_no_correlation() -> None:
    assert agreement(HeadGates(alpha=torch.ones(2, 2)), TRUTH)["spearman_single_head"] is None


def test_heads_that_an_elimination_leaves_out_are_needed_most() -> None:
    early = {**TRUTH, "elimination": TRUTH["elimination"][:2]}
    # positions 2, 1, 2, 0: the two that stay full share the last place
    found = agreement(HeadGates(alpha=torch.tensor([[0.9, 0.2], [0.9, 0.0]])), early)
    assert found["spearman_elimination"] == pytest.approx(1.0)
    assert found["overlap_at_0.5"] == 1.0
