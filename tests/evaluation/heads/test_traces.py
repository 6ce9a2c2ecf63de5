"""Teacher forcing scores what decoding would do."""

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation.heads.decoding import decode
from rlkv.evaluation.heads.traces import Trace, TraceScorer
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.prompts import render_prompt


def test_share_of_traces_is_the_share_of_equal_decodings() -> None:
    model, tokenizer = tiny.load()
    problems = tiny.problems(24, seed=5, max_definitions=8)
    cache = CacheSettings(sink=4, window=16, prefill="local")
    full = HeadAllocation(torch.ones(4, 6, dtype=torch.bool))
    prompts = [tokenizer(render_prompt(tokenizer, p["problem"]), add_special_tokens=False).input_ids for p in problems]
    whole = decode(model, tokenizer, problems, full, cache, 130)
    traces = [Trace(tuple(p), tuple(c.token_ids)) for p, c in zip(prompts, whole.completions, strict=True)]
    scorer = TraceScorer(model, traces, sink=4, window=16)
    assert scorer(full)[0] == 1.0
    half = HeadAllocation.random(4, 6, 0.25, seed=1)
    decoded = decode(model, tokenizer, problems, half, cache, 130).completions
    same = [tuple(c.token_ids) == t.output for c, t in zip(decoded, traces, strict=True)]
    share, log_probability = scorer(half)
    assert 0 < sum(same) < len(same)  # a case in which the score could be wrong
    assert share == sum(same) / len(same)
    assert log_probability < scorer(full)[1]


def test_needs_a_trace() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TraceScorer(None, [], 4, 16)  # type: ignore[arg-type]
