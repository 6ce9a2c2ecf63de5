"""Ground-truth files: read whole, or refused in one sentence; agreement with one that is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkv.evaluation.measurements import agreement, elimination_order, read_truth
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape

SHAPE = ModelShape("m", "llama", 2, 3, 6, 8)
TRUTH = {
    "elimination": [{"layer": i // 2, "head": i % 2} for i in (3, 1, 0, 2)],
    "accuracy_lost_by_single_head": [[0.3, 0.1], [0.4, 0.0]],
}
ORDER = [(0, 1), (1, 2), (0, 0), (1, 0), (1, 1), (0, 2)]
LOST: list[list[object]] = [[0.1, 0.0, 0.2], [0.3, -0.1, 0]]


def truth_file(folder: Path, **content: object) -> Path:
    steps = [{"layer": layer, "head": head} for layer, head in ORDER]
    (folder / "t.json").write_text(json.dumps({"elimination": steps, **content}))
    return folder / "t.json"


def test_a_ground_truth_is_read_whole(tmp_path: Path) -> None:
    found = read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=LOST), SHAPE)
    assert found["accuracy_lost_by_single_head"] == LOST
    assert elimination_order(found) == ORDER


@pytest.mark.parametrize(
    "lost", [None, 3, [], LOST[:1], [[0.1, 0.2], [0.3, 0.4]], [LOST[0], ["a", 0, 0]], [1, 2]]
)
def test_a_ground_truth_without_single_heads_is_refused(tmp_path: Path, lost: object) -> None:
    with pytest.raises(ValueError, match="accuracy_lost_by_single_head"):
        read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=lost), SHAPE)


@pytest.mark.parametrize(
    "order", [ORDER[:5], [*ORDER, (0, 1)], [*ORDER[:5], (0, 1)], [*ORDER[:5], (2, 0)]]
)
def test_each_head_goes_once(tmp_path: Path, order: list[tuple[int, int]]) -> None:
    steps = [{"layer": layer, "head": head} for layer, head in order]
    with pytest.raises(
        ValueError, match=r"--oracle.*each head of a model with 2 layers x 3 KV heads once"
    ):
        read_truth(truth_file(tmp_path, elimination=steps), SHAPE)


def test_same_order_and_reverse_order() -> None:
    same = agreement(HeadGates(alpha=torch.tensor([[0.6, 0.2], [0.9, 0.0]])), TRUTH)
    assert same == pytest.approx(
        {"spearman_single_head": 1.0, "spearman_elimination": 1.0, "overlap_at_0.5": 1.0}
    )
    reverse = agreement(HeadGates(alpha=torch.tensor([[0.2, 0.6], [0.0, 0.9]])), TRUTH)
    assert reverse == pytest.approx(
        {"spearman_single_head": -1.0, "spearman_elimination": -1.0, "overlap_at_0.5": 0.0}
    )


def test_equal_gates_have_no_correlation() -> None:
    assert agreement(HeadGates(alpha=torch.ones(2, 2)), TRUTH)["spearman_single_head"] is None
