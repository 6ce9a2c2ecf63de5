"""Decoding by CUDA graphs: on a CPU what a graph would compute, on a GPU the graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from rlkv.rollout import graphed_step
from tests.helpers.child import printed
from tests.helpers.graphed_texts import AHEAD, WAYS, decode_texts


def test_texts_are_those_without_graphs() -> None:
    pytest.importorskip("triton")
    lines = [line.split() for line in printed("graphed_decode", "texts")]
    assert len(lines) == len(WAYS)
    for equal, recorded, replayed in lines:
        assert equal == "True"
        assert int(recorded) >= 2
        assert int(replayed) >= 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_graphs_of_a_gpu_write_the_same_texts(way: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch("rlkv.rollout.decoding.graphed_step", return_value=None):
        expected = decode_texts(way, "cuda")
    monkeypatch.setattr(graphed_step, "AHEAD", AHEAD)
    with mock.patch.object(graphed_step, "record_graph", wraps=graphed_step.record_graph) as recordings:
        assert decode_texts(way, "cuda") == expected
    assert recordings.call_count >= 2
