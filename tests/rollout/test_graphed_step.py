"""Decoding by CUDA graphs: on a CPU what a graph would compute, on a GPU the graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from rlkv.rollout import graphed_step
from tests.helpers.child import printed
from tests.helpers.graphed_texts import AHEAD, WAYS, decode_texts


@pytest.fixture(scope="module")
def lines() -> list[str]:
    pytest.importorskip("triton")
    return printed("graphed_decode", "")


def test_texts_are_those_without_graphs(lines: list[str]) -> None:
    ways = [line.split()[1:] for line in lines if line.startswith("texts")]
    assert len(ways) == len(WAYS)
    for equal, recorded, replayed in ways:
        assert equal == "True"
        assert int(recorded) >= 2
        assert int(replayed) >= 10


def test_a_model_of_which_no_graph_can_be_made_is_tried_once(lines: list[str]) -> None:
    (refused,) = [line for line in lines if line.startswith("refused")]
    assert refused == "refused True 1 no CUDA graph could be made of the model (it waits): tokens take longer"


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
