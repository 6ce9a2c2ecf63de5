"""Ground-truth files: read whole, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkv.evaluation.heads.oracle import read_order, read_truth
from rlkv.models.shape import ModelShape

SHAPE = ModelShape("m", "llama", 2, 3, 6, 8)
LOST: list[list[object]] = [[0.1, 0.0, 0.2], [0.3, -0.1, 0]]


def truth_file(folder: Path, **content: object) -> Path:
    steps = [{"layer": 0, "head": 1}, {"layer": 1, "head": 2}]
    (folder / "t.json").write_text(json.dumps({"elimination": steps, **content}))
    return folder / "t.json"


def test_a_ground_truth_is_read_whole(tmp_path: Path) -> None:
    found = read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=LOST), SHAPE)
    assert found["accuracy_lost_by_single_head"] == LOST
    assert read_order(tmp_path / "t.json", SHAPE) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("lost", [None, 3, [], LOST[:1], [[0.1, 0.2], [0.3, 0.4]], [LOST[0], ["a", 0, 0]], [1, 2]])
def test_a_ground_truth_without_single_heads_is_refused(tmp_path: Path, lost: object) -> None:
    with pytest.raises(ValueError, match="accuracy_lost_by_single_head must be 2 lists of 3 numbers"):
        read_truth(truth_file(tmp_path, accuracy_lost_by_single_head=lost), SHAPE)


def test_a_head_goes_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eliminates a head twice"):
        read_order(truth_file(tmp_path, elimination=[{"layer": 0, "head": 1}] * 2), SHAPE)
