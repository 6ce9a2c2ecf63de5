"""Scores of traces are those of decoding; backward elimination on scores whose optimum is known."""

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation.elimination import Trace, TraceScorer, backward_elimination, without_head
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt
from tests.helpers.plain_decoding import decode

ALL = HeadAllocation(torch.ones(2, 3, dtype=torch.bool))
WORTH = torch.tensor([[0.1, 0.5, 0.0], [0.3, 0.0, 0.2]])


def additive(allocation: HeadAllocation) -> float:
    return float((WORTH * allocation.full).sum())


def test_additive_worth_gives_ascending_order() -> None:
    calls = []
    steps = backward_elimination(additive, ALL, lambda: calls.append(1))
    order = [(s.layer, s.head) for s in steps]
    assert order == [(0, 2), (1, 1), (0, 0), (1, 2), (1, 0), (0, 1)]  # ties to the lower index
    assert len(calls) == 6 * 7 // 2


def test_redundant_pair_is_seen_only_by_elimination() -> None:
    """Two heads that replace each other cost nothing alone, but one of them must stay."""

    def either(allocation: HeadAllocation) -> tuple[float, float]:
        one_left = bool(allocation.full[0, 0] or allocation.full[1, 0])
        return float(one_left), float((WORTH * allocation.full).sum())

    assert either(without_head(ALL.full, 0, 0))[0] == either(without_head(ALL.full, 1, 0))[0] == 1.0
    steps = backward_elimination(either, ALL, lambda: None)
    assert (steps[-1].layer, steps[-1].head) == (1, 0)
    assert [s.score[0] for s in steps] == [1.0] * 5 + [0.0]


def test_share_of_traces_is_the_share_of_equal_decodings() -> None:
    model, tokenizer = tiny.load()
    problems = tiny.problems(24, seed=5, max_definitions=8)
    cache = CacheSettings(sink=4, window=16, prefill="local")
    full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
    prompts = [
        tokenizer(render_prompt(tokenizer, p["problem"]), add_special_tokens=False).input_ids
        for p in problems
    ]
    whole, _ = decode(model, tokenizer, problems, full, cache, 130)
    traces = [Trace(tuple(p), tuple(c.token_ids)) for p, c in zip(prompts, whole, strict=True)]
    scorer = TraceScorer(model, traces, sink=4, window=16)
    assert scorer(full)[0] == 1.0
    half = HeadAllocation.random(4, 6, 0.25, seed=1)
    decoded, _ = decode(model, tokenizer, problems, half, cache, 130)
    same = [tuple(c.token_ids) == t.output for c, t in zip(decoded, traces, strict=True)]
    share, log_probability = scorer(half)
    assert 0 < sum(same) < len(same)  # a case in which the score could be wrong
    assert share == sum(same) / len(same)
    assert log_probability < scorer(full)[1]


def test_needs_a_trace() -> None:
    with pytest.raises(ValueError, match="trace"):
        TraceScorer(None, [], 4, 16)  # type: ignore[arg-type]
