"""Draws per row, tokens from draws, and rows that join and leave a batch as if they were alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.evaluation.metrics import RepetitionRule
from rlkv.eviction import H2O, RKV, RPC
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout import decoding
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.rollout.decoding import AT_ONCE, draw_tokens, row_draws
from rlkv.rollout.hf import HFEngine
from tests.helpers.models import build_tokenizer, make_tiny_model

VOCAB = 340  # covers the tiny tokenizer


# --- draws


def test_draws_belong_to_the_row_and_the_rollout() -> None:
    together = row_draws(3, 5, range(6), 40)
    assert torch.equal(together[4:], row_draws(3, 5, range(4, 6), 40))
    assert torch.equal(together[:, :7], row_draws(3, 5, range(6), 7))
    assert together.unique().numel() == 240
    for seed, rollout in ((4, 5), (3, 6)):
        assert not (row_draws(seed, rollout, range(6), 40) == together).any()
    assert 0 <= together.min() < together.max() < 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.6, 0.95, 20), (1.3, 0.5, 0), (1.0, 1.0, 3)],
)
def test_tokens_follow_the_distribution_of_transformers(
    temperature: float, top_p: float, top_k: int
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 30) * 2
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0]
    count = 100_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # an even grid: no chance
    tokens = draw_tokens(logits.expand(count, -1), draws, temperature, top_p, top_k)
    found = torch.bincount(tokens, minlength=30) / count
    # two ends of an interval, each within half a grid step, and rounding
    assert (found - expected).abs().max() < 5e-5
    assert set(tokens.tolist()) <= set(expected.nonzero()[:, 0].tolist())


def of_a_sorted_vocabulary(
    logits: torch.Tensor, draws: torch.Tensor, temperature: float, top_p: float, top_k: int
) -> torch.Tensor:
    """The definition: sort all tokens, of equal ones the first comes first."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    probs, tokens = probs.sort(descending=True, stable=True)
    if top_k:
        probs[:, top_k:] = 0
    probs[probs.cumsum(-1) - probs >= top_p * probs.sum(-1, keepdim=True)] = 0
    cumulative = probs.cumsum(-1)
    index = (cumulative <= draws[:, None] * cumulative[:, -1:]).sum(-1)
    return tokens.gather(1, index[:, None])[:, 0]


@pytest.mark.parametrize(
    ("spread", "kinds", "sorted_tokens"),
    [
        (6.0, (1.0, 0.95, 0), AT_ONCE),
        (6.0, (1.0, 1.0, 2000), 5000),
        (1.0, (1.0, 0.95, 0), 5000),
        (1.0, (1.3, 0.93, 20), AT_ONCE),
        (0.0, (1.0, 0.93, 20), 5000),
    ],
)
def test_few_tokens_are_sorted_and_equal_ones_keep_their_order(
    spread: float, kinds: Any, sorted_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits in bfloat16 have many equal ones; a flat distribution needs many of them."""
    logits = (spread * torch.randn(7, 5000, generator=torch.Generator().manual_seed(0))).bfloat16()
    draws = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = of_a_sorted_vocabulary(logits, draws, *kinds)
    widths: list[int] = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda self, **how: widths.append(self.shape[1]) or sort(self, **how)
    )
    assert torch.equal(draw_tokens(logits, draws, *kinds), wanted)
    assert max(widths) == sorted_tokens


def test_draws_at_the_ends_find_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    draws = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits, draws, 1.0, 1.0, 0).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(temperature: float) -> None:
    model = make_tiny_model("llama")
    model.lm_head.weight.data[7] = torch.nan  # an overflow in float16 gives NaN too
    with pytest.raises(ValueError, match=r"not finite in torch.float32: check its"):
        HFEngine(model, build_tokenizer()).generate(["1"], SamplingParams(4, temperature))


# --- the end of rows

RULE = RepetitionRule(window=8, distinct=7)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    model, tokenizer = tiny.load()
    return HFEngine(model, tokenizer, batch_size=9)


@pytest.fixture(scope="module")
def prompts(engine: HFEngine) -> list[str]:
    problems = tiny.problems(9, seed=3, max_definitions=6)
    return [render_prompt(engine.tokenizer, problem["problem"]) for problem in problems]


def refused_at(ids: list[int]) -> int | None:
    """Where the rule ends a text: at the first window that it refuses, but for the very first."""
    for end in range(2 * RULE.window, len(ids) + 1, RULE.window):
        if len(set(ids[end - RULE.window : end])) < RULE.distinct:
            return end
    return None


def count_cut(free: list[Completion], stopped: list[Completion]) -> int:
    """Check that every text is the free one up to the end that the rule asks for."""
    cut = 0
    for before, after in zip(free, stopped, strict=True):
        end = refused_at(before.token_ids)
        if end is None or (end == len(before.token_ids) and before.finish_reason == "stop"):
            assert after == before
            continue
        cut += 1
        assert after.finish_reason == "repetition"
        assert after.token_ids == before.token_ids[:end]
    return cut


@pytest.mark.parametrize("kind", ["greedy", "sampled", "window", "evicting"])
def test_texts_before_the_stop_are_those_without_it(
    engine: HFEngine, prompts: list[str], kind: str
) -> None:
    sampling = SamplingParams(60, temperature=4.0 if kind == "sampled" else 0.0, seed=4)
    tested = engine
    if kind in ("window", "evicting"):
        half = HeadAllocation.random(4, 6, 0.5, seed=1)
        policy = RKV(budget=24, buffer=4, observation=4) if kind == "evicting" else None
        settings = CacheSettings(4, 16, eviction=policy)
        tested = InferenceEngine(engine.model, engine.tokenizer, half, settings, batch_size=9)
    free = tested.generate(prompts, sampling)
    assert count_cut(free, tested.generate(prompts, sampling, stop=RULE)) > 0


def test_each_row_is_yielded_when_it_ends(engine: HFEngine, prompts: list[str]) -> None:
    reads = 0

    def count(*_: Any) -> None:
        nonlocal reads
        reads += 1

    handle = engine.model.register_forward_hook(count)
    started = time.perf_counter()
    completions = {}
    steps = []  # calls of the model before a row was yielded
    for index, completion in engine.stream(prompts, SamplingParams(50)):
        completions[index] = completion
        steps.append(reads)
    handle.remove()
    assert sorted(completions) == list(range(9))
    assert 0 < sum(c.seconds for c in completions.values()) < time.perf_counter() - started
    assert steps == [len(completion.token_ids) for completion in completions.values()]
    assert len(set(steps)) > 2, "rows must end at different times"
    assert {c.finish_reason for c in completions.values()} == {"stop", "length"}


@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_that_have_ended_may_hold_logits_that_are_not_finite(
    engine: HFEngine, prompts: list[str], top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(50, temperature=1.0, top_k=top_k, seed=4)
    texts = [completion.token_ids for completion in engine.generate(prompts, sampling)]
    choose = decoding._Batch._choose
    spoilt = 0

    def spoil(batch: Any, logits_RV: Tensor) -> Any:
        nonlocal spoilt
        ended_R = ~batch.running_R
        spoilt += int(ended_R.sum())
        return choose(batch, logits_RV.masked_fill(ended_R[:, None], torch.nan))

    monkeypatch.setattr(decoding._Batch, "_choose", spoil)
    # rows that have ended stay, as beside a graph
    monkeypatch.setattr(decoding._Batch, "leave_at", lambda batch, are_others_waiting: 0.0)
    found = engine.generate(prompts, sampling)
    assert spoilt > 0
    assert [completion.token_ids for completion in found] == texts


# --- rows that join

POLICY = RKV(budget=24, buffer=4, observation=2)


@pytest.mark.parametrize(
    ("family", "temperature", "sizes"),
    [
        ("llama", 0.0, None),
        ("qwen3", 1.0, None),
        ("qwen2", 1.0, {"sink": 2, "window": 5}),
        ("llama", 0.0, {"sink": 2, "window": 5, "prefill": "local"}),
        ("qwen3", 0.0, {"sink": 2, "window": 5, "protect_prompt": True}),
        ("qwen3", 0.0, {"eviction": RKV(budget=10, buffer=4, observation=2)}),
        ("llama", 1.0, {"eviction": H2O(budget=12)}),
        ("qwen2", 0.0, {"eviction": RPC(P=12, R=3, c=3)}),
        ("qwen2", 1.0, {"eviction": POLICY, "prefill": "published"}),
    ],
)
def test_rows_that_join_a_batch_are_decoded_as_alone(
    family: str, temperature: float, sizes: dict[str, Any] | None
) -> None:
    tokenizer = build_tokenizer()
    model = make_tiny_model(family, vocab_size=VOCAB)
    model.generation_config.eos_token_id = list(range(2, 340, 12))  # rows end at many steps
    sampling = SamplingParams(30, temperature=temperature, seed=3)
    texts = [render_prompt(tokenizer, p["problem"]) for p in tiny.problems(13, seed=1)]
    heads = HeadAllocation.random(3, 4, 0.5, seed=1)
    widths: list[int] = []
    model.register_forward_hook(lambda module, args, output: widths.append(len(output.logits)))
    found = []
    settings = CacheSettings(**(sizes or {}))
    for size in (1, 4):
        engine = InferenceEngine(model, tokenizer, heads, settings, batch_size=size)
        del widths[:]
        found.append(engine.batch(texts, sampling, full=sizes is None)[0])
    single, joined = found
    assert joined == single
    assert len({len(completion.token_ids) for completion in single}) > 3
    assert max(widths) == 4
    # of 13 prompts, batches that wait for their last row would take more calls
    assert len(widths) < 0.5 * sum(len(completion.token_ids) for completion in single)


@pytest.mark.parametrize("full", [True, False])
def test_prompts_are_read_with_others_of_about_their_length(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkv.rollout.decoding.READ_TOGETHER", 4)
    monkeypatch.setattr("rlkv.rollout.decoding.READ_AT_ONCE", 400)
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=VOCAB)
    texts = [render_prompt(tokenizer, p["problem"]) for p in tiny.problems(60, seed=5)]
    heads = HeadAllocation.random(3, 4, 0.5, seed=1)
    shapes: list[torch.Size] = []

    def note(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        shapes.append(kwargs["input_ids"].shape)

    model.register_forward_pre_hook(note, with_kwargs=True)
    found = []
    for rows in (1, len(texts)):
        engine = InferenceEngine(model, tokenizer, heads, CacheSettings(2, 5), batch_size=rows)
        del shapes[:]
        found.append(engine.batch(texts, SamplingParams(12), full=full)[0])
    assert found[0] == found[1]
    lengths = engine.prompt_lengths(texts)
    assert max(lengths) > 1.5 * min(lengths)
    reads = [shape for shape in shapes if shape[1] > 1]
    assert sum(shape[0] for shape in reads) == len(texts)
    assert sum(shape.numel() for shape in reads) < 1.15 * sum(lengths)
    assert max(shape[0] for shape in reads) > 4
    assert max(shape.numel() for shape in reads) <= 400
    assert max(shape[0] for shape in shapes) == len(texts)


def test_the_last_states_of_prompts_lie_together() -> None:
    """Rows of a slice are each multiplied alone: 180 times the time for 16 rows of 49k tokens."""
    model = make_tiny_model("llama", vocab_size=VOCAB)
    shapes: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        assert args[0].is_contiguous()
        shapes.append(tuple(args[0].shape))

    model.get_output_embeddings().register_forward_pre_hook(note)
    HFEngine(model, build_tokenizer()).generate(
        ["a=7 .", "a=7 . b=2 .", "b=2 ."], SamplingParams(3)
    )
    assert shapes == [(3, 1, model.config.hidden_size)] * 3
