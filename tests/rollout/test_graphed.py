"""Decoding by CUDA graphs: on a CPU what a graph would compute (the graphs: ``tests/gpu``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlkv.attention.mixed import fast_decoding
from rlkv.cache.reallocation import GrowingLayer, full_cache
from rlkv.rollout.base import Sample
from rlkv.rollout.hf import HFEngine
from rlkv.utils.runtime import GRAPH
from tests.helpers.child import printed
from tests.helpers.graphed import (
    SAMPLED,
    WAYS,
    NoWait,
    Standin,
    recorded,
    sample_gated,
    sample_plain,
)
from tests.helpers.models import build_tokenizer, make_tiny_model


@pytest.fixture(scope="module")
def lines() -> list[str]:
    pytest.importorskip("triton")
    return printed("graphed", "", TRITON_INTERPRET="1", **{GRAPH: "1"})


@torch.inference_mode()
def test_what_waits_for_a_device_is_refused_in_a_captured_step() -> None:
    with NoWait(), pytest.raises(AssertionError, match="a captured step calls"):
        bool((torch.ones(1, 2).diff() != 1).any())


@pytest.mark.slow
def test_texts_are_those_without_graphs(lines: list[str]) -> None:
    ways = [line.split()[1:] for line in lines if line.startswith("texts")]
    assert len(ways) == len(WAYS)
    for equal, graphs, replayed in ways:
        assert equal == "True"
        assert int(graphs) >= 1
        assert int(replayed) >= 10


@pytest.mark.slow
def test_a_model_of_which_no_graph_can_be_made_is_tried_once(lines: list[str]) -> None:
    (refused,) = [line for line in lines if line.startswith("refused")]
    said = "no CUDA graph could be made of the model (it waits): tokens take longer"
    assert refused == f"refused True 1 {said}"


@pytest.mark.parametrize("sample", [sample_gated, sample_plain])
def test_full_caches_give_the_same_texts(sample: Callable[[str], Any]) -> None:
    expected = sample("cpu")
    standin = Standin()
    with recorded(standin.record):
        found = sample("cpu")
    assert standin.recorded >= 3
    assert standin.replayed >= 20
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        if isinstance(own, Sample):
            assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("ends_in", ["the recording", "the buffers"])
def test_a_model_is_tried_again_where_memory_ended(
    ends_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkv.rollout.decoding.GRAPH_AGAIN", 5)
    expected = sample_plain("cpu")
    standin = Standin()
    record = standin.fail_once
    if ends_in == "the buffers":
        record = standin.record
        grow = GrowingLayer._grow
        asked: list[int] = []

        def grow_later(layer: GrowingLayer, needed: int, *like: torch.Tensor) -> None:
            if layer.get_seq_length():
                asked.append(needed)
                if len(asked) == 1:
                    raise torch.OutOfMemoryError
            grow(layer, needed, *like)

        monkeypatch.setattr(GrowingLayer, "_grow", grow_later)
    said = r"no CUDA graph could be made of the model \(out of memory\)"
    with recorded(record), pytest.warns(UserWarning, match=said):
        found = sample_plain("cpu")
    assert standin.replayed >= 10
    assert [own.token_ids for own in found] == [other.token_ids for other in expected]


def test_a_caller_that_stops_early_finds_its_cache_as_it_is() -> None:
    """A graph counts its tokens on the device: the cache is told of them when the loop ends."""
    model = make_tiny_model("llama", num_hidden_layers=2, vocab_size=340)
    engine = HFEngine(model, build_tokenizer())
    engine.eos_ids = []
    cache = full_cache(model.config, 64)
    seen: list[int] = []

    def stop(index: int, token: int) -> None:
        seen.append(token)
        if len(seen) == 12:
            raise KeyboardInterrupt

    standin = Standin()
    decoding = engine._decoding(SAMPLED, lambda limit, rows: cache, on_token=stop)
    with (
        recorded(standin.record),
        fast_decoding(model),
        pytest.raises(KeyboardInterrupt),
    ):
        list(decoding.run([[5, 6, 7, 8]]))
    assert standin.replayed >= 5
    assert cache.get_seq_length() == 4 + len(seen) - 1, "all but the last token"
