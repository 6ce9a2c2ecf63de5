"""Rows seen one by one: reported when they end, ended early by a rule, the others untouched."""

from __future__ import annotations

import pytest
import torch

from rlkv import tiny
from rlkv.evaluation.stats.metrics import RepetitionRule
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.rollout.watch import RowHooks, RowWatch
from rlkv.tiny.tokenizer import build_tokenizer
from tests.helpers.models import make_tiny_model

RULE = RepetitionRule(window=8, distinct=7)
PROBLEMS = tiny.problems(9, seed=3, max_definitions=6)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    model, tokenizer = tiny.load()
    return HFEngine(model, tokenizer, batch_size=9)


def prompts(engine: HFEngine) -> list[str]:
    return [render_prompt(engine.tokenizer, p["problem"]) for p in PROBLEMS]


def refused_at(ids: list[int]) -> int | None:
    """Where the rule ends a text: the end of the first window that it refuses."""
    ends = range(RULE.window, len(ids) + 1, RULE.window)
    return next((end for end in ends if len(set(ids[end - RULE.window : end])) < RULE.distinct), None)


def check_is_cut(free: list[Completion], stopped: list[Completion], engine: HFEngine) -> int:
    """Every text is the free one up to the end that the rule asks for; returns how many were cut."""
    cut = 0
    for before, after in zip(free, stopped, strict=True):
        end = refused_at(before.token_ids)
        if end is None or (end == len(before.token_ids) and before.finish_reason == "stop"):
            assert after == before
            continue
        cut += 1
        assert after.finish_reason == "repetition"
        assert after.token_ids == before.token_ids[:end]
        assert after.text == engine.tokenizer.decode(after.token_ids, skip_special_tokens=True)
    return cut


@pytest.mark.parametrize("sampling", [SamplingParams(60), SamplingParams(60, temperature=4.0, seed=4)])
def test_texts_before_the_stop_are_those_without_it(engine: HFEngine, sampling: SamplingParams) -> None:
    free = engine.generate(prompts(engine), sampling)
    stopped = engine.generate(prompts(engine), sampling, RowHooks(stop=RULE))
    assert 0 < check_is_cut(free, stopped, engine) < len(free), "the rule must end some texts and leave some"


def test_the_rule_ends_rows_of_a_compressed_cache_too(engine: HFEngine) -> None:
    half = HeadAllocation.random(4, 6, 0.5, seed=1)
    for eviction in (None, RKV(budget=24, buffer=4, observation=4)):
        compressed = InferenceEngine(engine.model, engine.tokenizer, half, 4, 16, batch_size=9, eviction=eviction)
        free, _ = compressed.batch(prompts(engine), SamplingParams(60))
        stopped, _ = compressed.batch(prompts(engine), SamplingParams(60), hooks=RowHooks(stop=RULE))
        assert check_is_cut(free, stopped, engine) > 0


def test_each_row_is_reported_once_when_it_ends(engine: HFEngine) -> None:
    seen: list[tuple[int, Completion]] = []
    steps: list[int] = []  # tokens that the model had read when a row was reported
    read = 0

    def count(module: torch.nn.Module, args: object, output: object) -> None:
        nonlocal read
        read += 1

    def on_end(index: int, completion: Completion) -> None:
        seen.append((index, completion))
        steps.append(read)

    handle = engine.model.register_forward_hook(count)
    try:
        completions = engine.generate(prompts(engine), SamplingParams(50), RowHooks(on_end))
    finally:
        handle.remove()
    assert completions == engine.generate(prompts(engine), SamplingParams(50))
    assert sorted(index for index, _ in seen) == list(range(9))
    assert all(completions[index] == completion for index, completion in seen)
    # the forward that gives the last token of a row is the last before its report
    assert steps == [len(completion.token_ids) for _, completion in seen]
    assert len(set(steps)) > 2, "rows must end at different times"
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_the_end_token_wins_over_the_rule() -> None:
    ended: list[tuple[int, list[int], bool]] = []
    watch = RowWatch(2, 10, [9], RepetitionRule(3, 3), lambda *end: ended.append(end))
    rows = torch.tensor([[0, 0, 1, 1, 9], [0, 0, 1, 1, 1], [0, 0, 1, 2, 3]])
    for length in (3, 4):
        assert not watch(rows[:, :length], None).any()
    assert watch(rows, None).tolist() == [False, True, False]
    assert ended == [(0, [1, 1, 9], False), (1, [1, 1, 1], True)]
    # ended rows are not looked at again, though their padding repeats itself
    more = torch.cat([rows, torch.tensor([[9, 9, 9], [9, 9, 9], [1, 2, 3]])], dim=1)
    assert not watch(more[:, :6], None).any()
    assert not watch(more, None).any()
    assert len(ended) == 2


def test_a_failing_callback_ends_the_call(engine: HFEngine) -> None:
    def fail(index: int, completion: Completion) -> None:
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="disk"):
        engine.generate(prompts(engine)[:2], SamplingParams(5), RowHooks(fail))


def test_pad_tokens_after_a_stop_are_not_part_of_the_text() -> None:
    model = make_tiny_model("llama", vocab_size=340)
    engine = HFEngine(model, build_tokenizer(), batch_size=4)
    texts = [render_prompt(engine.tokenizer, p["problem"]) for p in PROBLEMS[:4]]
    free = engine.generate(texts, SamplingParams(24))
    stopped = engine.generate(texts, SamplingParams(24), RowHooks(stop=RepetitionRule(6, 6)))
    for before, after in zip(free, stopped, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert after.finish_reason != "repetition" or len(after.token_ids) % 6 == 0
