"""Rows seen one by one: yielded when they end, ended early by a rule, joined by others, all as if
they were alone.
"""

from __future__ import annotations

import time

import pytest
import torch

from rlkv import tiny
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.eviction import H2O, RKV, RPC, RandomEviction
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.rollout.hf import HFEngine
from tests.helpers.models import build_tokenizer, make_tiny_model

VOCAB = 340  # covers the tiny tokenizer
RULE = RepetitionRule(window=8, distinct=7)
PROBLEMS = tiny.problems(9, seed=3, max_definitions=6)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    model, tokenizer = tiny.load()
    return HFEngine(model, tokenizer, batch_size=9)


def prompts(engine: HFEngine) -> list[str]:
    return [render_prompt(engine.tokenizer, p["problem"]) for p in PROBLEMS]


def refused_at(ids: list[int]) -> int | None:
    """Where the rule ends a text: the end of the first window that it refuses, the very first one
    excepted.
    """
    ends = range(2 * RULE.window, len(ids) + 1, RULE.window)
    return next(
        (end for end in ends if len(set(ids[end - RULE.window : end])) < RULE.distinct), None
    )


def check_is_cut(free: list[Completion], stopped: list[Completion], engine: HFEngine) -> int:
    """Every text is the free one up to the end that the rule asks for.

    Returns how many were cut.
    """
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


@pytest.mark.parametrize(
    "sampling", [SamplingParams(60), SamplingParams(60, temperature=4.0, seed=4)]
)
def test_texts_before_the_stop_are_those_without_it(
    engine: HFEngine, sampling: SamplingParams
) -> None:
    free = engine.generate(prompts(engine), sampling)
    stopped = engine.generate(prompts(engine), sampling, stop=RULE)
    assert 0 < check_is_cut(free, stopped, engine) < len(free), (
        "the rule must end some texts and leave some"
    )


def test_the_rule_ends_rows_of_a_compressed_cache_too(engine: HFEngine) -> None:
    half = HeadAllocation.random(4, 6, 0.5, seed=1)
    for eviction in (None, RKV(budget=24, buffer=4, observation=4)):
        compressed = InferenceEngine(
            engine.model, engine.tokenizer, half, 4, 16, batch_size=9, eviction=eviction
        )
        free = compressed.generate(prompts(engine), SamplingParams(60))
        stopped = compressed.generate(prompts(engine), SamplingParams(60), stop=RULE)
        assert check_is_cut(free, stopped, engine) > 0


def test_each_row_is_yielded_when_it_ends(engine: HFEngine) -> None:
    steps: list[int] = []  # tokens that the model had read when a row was yielded
    read = 0

    def count(module: torch.nn.Module, args: object, output: object) -> None:
        nonlocal read
        read += 1

    handle = engine.model.register_forward_hook(count)
    started = time.perf_counter()
    try:
        completions = {}
        for index, completion in engine.stream(prompts(engine), SamplingParams(50)):
            assert index not in completions
            completions[index] = completion
            steps.append(read)
    finally:
        handle.remove()
    assert sorted(completions) == list(range(9))
    assert 0 < sum(c.seconds for c in completions.values()) < time.perf_counter() - started
    # the forward that gives the last token of a row is the last before it is yielded
    assert steps == [len(completion.token_ids) for completion in completions.values()]
    assert len(set(steps)) > 2, "rows must end at different times"
    assert {c.finish_reason for c in completions.values()} == {"stop", "length"}


CACHES = {
    "full": {},
    "ring": {"sink": 2, "window": 5},
    "rkv": {"eviction": RKV(budget=10, buffer=4, observation=2)},
    "h2o": {"eviction": H2O(budget=12)},
    "rpc": {"eviction": RPC(P=12, R=3, c=3)},
    "ratio": {"eviction": RandomEviction(ratio=0.4, extra=9, buffer=3)},
    "local prefill": {"sink": 2, "window": 5, "prefill": "local"},
    "published prefill": {
        "prefill": "published",
        "eviction": RKV(budget=24, buffer=4, observation=2),
    },
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_join_a_batch_are_decoded_as_alone(
    family: str, cache: str, temperature: float
) -> None:
    tokenizer = build_tokenizer()
    model = make_tiny_model(family, vocab_size=VOCAB)
    model.generation_config.eos_token_id = list(
        range(2, 340, 12)
    )  # rows end at many different steps
    sampling = SamplingParams(40, temperature=temperature, seed=3)
    texts = [render_prompt(tokenizer, p["problem"]) for p in tiny.problems(13, seed=1)]
    sizes = CACHES[cache] or {"sink": 2, "window": 5}
    heads = HeadAllocation.random(3, 4, 0.5, seed=1)
    engines = [
        InferenceEngine(model, tokenizer, heads, **sizes, batch_size=size) for size in (1, 4)
    ]
    widths: list[int] = []
    handle = model.register_forward_hook(
        lambda module, args, output: widths.append(len(output.logits))
    )
    single, joined = (engine.batch(texts, sampling, full=cache == "full")[0] for engine in engines)
    handle.remove()
    assert joined == single
    assert len({len(completion.token_ids) for completion in single}) > 3
    steps = sum(len(completion.token_ids) for completion in single)
    assert max(widths) == 4
    # of 13 prompts, batches that wait for their last row would take more forwards
    assert len(widths) - steps < 0.5 * steps


def test_pad_tokens_after_a_stop_are_not_part_of_the_text() -> None:
    model = make_tiny_model("llama", vocab_size=340)
    engine = HFEngine(model, build_tokenizer(), batch_size=4)
    texts = [render_prompt(engine.tokenizer, p["problem"]) for p in PROBLEMS[:4]]
    free = engine.generate(texts, SamplingParams(24))
    stopped = engine.generate(texts, SamplingParams(24), stop=RepetitionRule(6, 6))
    for before, after in zip(free, stopped, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert after.finish_reason != "repetition" or len(after.token_ids) % 6 == 0


@pytest.mark.parametrize("full", [True, False])
def test_prompts_are_read_with_others_of_about_their_length(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkv.rollout.decoding.READ_TOGETHER", 4)
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=VOCAB)
    texts = [render_prompt(tokenizer, p["problem"]) for p in tiny.problems(60, seed=5)]
    lengths = sorted(len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    assert lengths[-1] > 1.5 * lengths[0]
    heads = HeadAllocation.random(3, 4, 0.5, seed=1)
    alone, together = (
        InferenceEngine(model, tokenizer, heads, sink=2, window=5, batch_size=rows)
        for rows in (1, len(texts))
    )
    shapes: list[torch.Size] = []

    def note(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        shapes.append(kwargs["input_ids"].shape)

    single, _ = alone.batch(texts, SamplingParams(12), full=full)
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    joined, _ = together.batch(texts, SamplingParams(12), full=full)
    handle.remove()
    assert joined == single
    reads = [shape for shape in shapes if shape[1] > 1]
    assert sum(shape[0] for shape in reads) == len(texts)
    assert sum(shape.numel() for shape in reads) < 1.15 * sum(lengths) < len(texts) * lengths[-1]
    assert max(shape[0] for shape in shapes) == len(texts)


def test_the_last_states_of_prompts_lie_together(family: str) -> None:
    """Rows of a slice would each be multiplied alone, which took 180 times as long for 16 rows of
    49k tokens.
    """
    model = make_tiny_model(family, vocab_size=VOCAB)
    shapes: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        assert args[0].is_contiguous()
        shapes.append(tuple(args[0].shape))

    model.get_output_embeddings().register_forward_pre_hook(note)
    tokenizer = build_tokenizer()
    HFEngine(model, tokenizer, batch_size=4).generate(
        [render_prompt(tokenizer, p["problem"]) for p in PROBLEMS[:4]], SamplingParams(3)
    )
    assert shapes == [(4, 1, model.config.hidden_size)] * 3
