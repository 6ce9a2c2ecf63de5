"""Budgets that are a share of a length known before: each row has its own, and keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.eviction import H2O, RKV, TOVA, EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.tiny import load, problems
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.models import make_tiny_model

POLICIES = {
    "rkv": RKV(ratio=0.3, extra=4, buffer=4, observation=3),
    "h2o": H2O(ratio=0.3, extra=4),
    "tova, prompt kept": TOVA(ratio=0.3, extra=4, buffer=2, protect_prompt=True),
}
PLANNED, PADDING, CALLS = [30, 60, 45], [0, 3, 9], [20] + [1] * 20


def with_budget(policy: EvictionPolicy, prompt: int, planned: int) -> EvictionPolicy:
    counted = planned - prompt if policy.protect_prompt else planned
    return replace(policy, ratio=None, budget=int(policy.ratio * counted) + policy.extra)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_rows_of_a_batch_equal_single_rows_with_their_budgets(policy: EvictionPolicy) -> None:
    model = make_tiny_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    ids = draw_ids(3, sum(CALLS))
    real = real_tokens(PADDING, ids.shape[1])
    cache = HeadReallocationCache(MIXED, eviction=policy)
    cache.state.planned = torch.tensor(PLANNED)
    got = cached_logits(model, ids, cache, CALLS, real)
    size = EntrySize.of(model)
    for row, pad in enumerate(PADDING):
        prompt, tokens = CALLS[0] - pad, sum(CALLS) - pad
        own = with_budget(policy, prompt, PLANNED[row])
        alone = HeadReallocationCache(MIXED, eviction=own)
        want = cached_logits(model, ids[row : row + 1, pad:], alone, [prompt, *CALLS[1:]])
        assert (got[row, pad:] - want[0]).abs().max() < TOLERANCE
        lengths = torch.tensor([prompt]), torch.tensor([tokens])
        held, _ = kv_nbytes(
            CacheSettings(eviction=policy), MIXED, size, *lengths, torch.tensor([PLANNED[row]])
        )
        assert int(held) == alone.used_nbytes()


def test_rows_that_join_a_batch_bring_their_budgets() -> None:
    model, tokenizer = load()
    texts = [
        render_prompt(tokenizer, p["problem"])
        for p in problems(5, seed=1, min_definitions=3, max_definitions=6)
    ]
    planned = [60, 110, 80, 200, 95]
    policy = RKV(ratio=0.3, extra=10, buffer=3, observation=2)
    heads, sampling = HeadAllocation.random(4, 6, 0.7, seed=1), SamplingParams(40)
    together = InferenceEngine(model, tokenizer, heads, batch_size=2, eviction=policy)
    got = dict(together.stream(texts, sampling, planned=planned))
    for row, text in enumerate(texts):
        own = with_budget(policy, 0, planned[row])
        alone = InferenceEngine(model, tokenizer, heads, batch_size=1, eviction=own)
        assert got[row].token_ids == alone.generate([text], sampling)[0].token_ids
