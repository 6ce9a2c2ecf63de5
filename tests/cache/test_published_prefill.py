"""Prompts as RLKV's evaluator reads them: all but the last tokens in full, these as if they were
decoded.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, HeadReallocationCache, schedule
from rlkv.eviction.base import EvictionPolicy
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.eviction_matrix import INSTANCES
from tests.helpers.models import make_tiny_model
from tests.helpers.naive_eviction import naive_logits

DECODED = 6
CALLS = [
    22,
    1,
    1,
    1,
    9,
    1,
    1,
    4,
    1,
]  # a prompt and two more turns, one of them shorter than what is decoded
PADDING = [0, 3, 16, 18, 21]  # prompts of 22, 19, 6, 4 and 1 tokens


@pytest.fixture(autouse=True)
def fewer_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "DECODED", DECODED)


def one_by_one(calls: list[int]) -> list[int]:
    """The calls with their last tokens fed one by one."""
    return [
        part
        for n in calls
        for part in ([n - DECODED] if n > DECODED else []) + [1] * min(n, DECODED)
    ]


def batched_logits(model, policy: EvictionPolicy | None, record: bool = False):
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(len(PADDING), sum(CALLS))
    real = real_tokens(PADDING, ids.shape[1])
    cache = HeadReallocationCache(MIXED, 3, 5, "published", eviction=policy, record=record)
    return ids, cached_logits(model, ids, cache, CALLS, real), cache


@pytest.mark.parametrize("policy", INSTANCES.values(), ids=INSTANCES)
def test_eviction_in_left_padded_rows_equals_naive_runs(policy: EvictionPolicy) -> None:
    model = make_tiny_model("llama")
    ids, got, cache = batched_logits(model, policy, record=True)
    for row, pad in enumerate(PADDING):
        prompt = CALLS[0] - pad
        calls = one_by_one([prompt, *CALLS[1:]])
        want, run = naive_logits(model, ids[row : row + 1, pad:], calls, policy, MIXED, prompt)
        assert (got[row, pad:] - want[0]).abs().max() < TOLERANCE
        held = cache.held(row)
        for layer, naive in run.layers.items():
            for head, entries in enumerate(naive.heads):
                assert held[layer, head].nonzero()[:, 0].tolist() == entries.positions


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sinks_and_window_equal_tokens_fed_one_by_one(family: str) -> None:
    model = make_tiny_model(family)
    ids, got, _ = batched_logits(model, None)
    for row, pad in enumerate(PADDING):
        cache = HeadReallocationCache(MIXED, 3, 5)
        calls = one_by_one([CALLS[0] - pad, *CALLS[1:]])
        want = cached_logits(model, ids[row : row + 1, pad:], cache, calls)
        assert (got[row, pad:] - want[0]).abs().max() < TOLERANCE


def test_the_three_ways_differ() -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(1, 22)
    full, local, published = (
        cached_logits(model, ids, HeadReallocationCache(MIXED, 3, 5, prefill), [22])[0]
        for prefill in ("full", "local", "published")
    )
    assert torch.equal(published[: 22 - DECODED], full[: 22 - DECODED])
    assert (published - full)[22 - DECODED :].abs().amax(-1).min() > 100 * TOLERANCE
    assert (published - local).abs().max() > 100 * TOLERANCE


def test_fifty_tokens_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert schedule.split_call("published", 0, 120) == [(0, 70, True), (70, 50, False)]
    assert schedule.split_call("published", 7, 51) == [(7, 1, True), (8, 50, False)]
    for length in (50, 49, 1):
        assert schedule.split_call("published", 0, length) == [(0, length, False)]
    assert schedule.split_call("full", 0, 120) == [(0, 120, True)]
    assert schedule.split_call("local", 0, 120) == [(0, 120, False)]
