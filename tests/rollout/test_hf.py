"""HFEngine: batches equal single rows and transformers' own generate; limits are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rlkv
from rlkv.cache import HeadReallocationCache
from rlkv.cache.reallocation import GrowingLayer
from rlkv.models.loading import cache_argument
from rlkv.rollout.base import Rows, SamplingParams, end_tokens
from rlkv.rollout.hf import HFEngine, roll_out
from tests.helpers.models import build_tokenizer, make_tiny_model

VOCAB = 340  # covers the tiny tokenizer
TOKENIZER = build_tokenizer()
PROMPTS = ["a=7 . b=2 .", "a=7 .", "c = b + a . d = c * b . find d ?", "b=2 . c = b + a ."]
GREEDY = SamplingParams(40)
SAMPLED = SamplingParams(12, temperature=1.0, top_p=0.9, seed=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("llama", vocab_size=VOCAB)


@torch.no_grad()
def generated(model: Any, prompts: list[list[int]], ends: list[int]) -> list[list[int]]:
    """One prompt after the other through ``generate`` with transformers' own cache."""
    options = {"max_new_tokens": 40, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    found = []
    for ids in prompts:
        out = model.generate(input_ids=torch.tensor([ids]), eos_token_id=ends, **options)
        found.append(out[0, len(ids) :].tolist())
    return found


def stock_tokens(model: Any) -> list[list[int]]:
    return generated(model, TOKENIZER(PROMPTS, add_special_tokens=False).input_ids, [2])


def engine_tokens(model: Any, batch_size: int = 16) -> list[list[int]]:
    completions = HFEngine(model, TOKENIZER, batch_size).generate(PROMPTS, GREEDY)
    assert len({tuple(c.token_ids) for c in completions}) > 1, "the test would prove nothing"
    return [c.token_ids for c in completions]


def watch_caches(model: PreTrainedModel) -> list[Any]:
    """The caches that the model is called with from now on, each once."""
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs[cache_argument()]
        if not any(cache is one for one in seen):
            seen.append(cache)

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 16), ("qwen2", 3), ("qwen3", 1)])
def test_greedy_tokens_are_those_of_generate(kind: str, batch_size: int) -> None:
    model = make_tiny_model(kind, vocab_size=VOCAB)
    expected = stock_tokens(model)
    # neither the model's own sampling nor a config that training has left without a cache counts
    model.generation_config.update(repetition_penalty=1.8, temperature=0.6, do_sample=True)
    model.generation_config.use_cache = model.config.use_cache = False
    caches = watch_caches(model)
    assert engine_tokens(model, batch_size) == expected
    assert {type(layer) for cache in caches for layer in cache.layers} == {GrowingLayer}


def test_same_tokens_with_gates_attached() -> None:
    peft = pytest.importorskip("peft")
    from rlkv.attention.head_gate import HeadGateConfig, set_gates

    model = make_tiny_model("llama", vocab_size=VOCAB)
    gated = peft.get_peft_model(model, HeadGateConfig(sink=2, window=5)).eval()
    set_gates(gated, torch.linspace(0, 1, 12).view(3, 4))
    expected = stock_tokens(gated)
    with gated.disable_adapter():
        assert stock_tokens(gated) != expected, "the gates change nothing"
    assert engine_tokens(gated) == expected


def test_the_compressed_cache_is_used_where_there_is_one(model: PreTrainedModel) -> None:
    full = torch.zeros(3, 4, dtype=torch.bool)
    full[1] = True
    plain = engine_tokens(model)
    with rlkv.compress(model, rlkv.HeadAllocation(full), sink=2, window=5) as session:
        expected = stock_tokens(model)
        assert engine_tokens(model) == expected
        assert type(session.cache) is HeadReallocationCache
    assert expected != plain
    assert engine_tokens(model) == plain


def test_models_with_sliding_windows_keep_their_own_cache() -> None:
    model = make_tiny_model("mistral", vocab_size=VOCAB, sliding_window=8)
    expected = stock_tokens(model)
    caches = watch_caches(model)
    assert engine_tokens(model) == expected
    assert type(caches[0]) is DynamicCache


def test_stops_at_the_first_of_several_end_tokens() -> None:
    model = make_tiny_model("llama", vocab_size=VOCAB)
    free = HFEngine(model, TOKENIZER).generate(PROMPTS, GREEDY)
    ends = [free[0].token_ids[5], free[1].token_ids[3], TOKENIZER.eos_token_id]
    model.generation_config.eos_token_id = ends[:2]
    engine = HFEngine(model, TOKENIZER, batch_size=3)
    assert engine.eos_ids == ends
    stopped = engine.generate(PROMPTS, GREEDY)
    assert [completion.finish_reason for completion in stopped[:2]] == ["stop", "stop"]
    for before, after in zip(free, stopped, strict=True):
        kept = len(after.token_ids)
        assert after.token_ids == before.token_ids[:kept]
        assert not set(after.token_ids[:-1]) & set(ends)
        assert (after.token_ids[-1] in ends) == (after.finish_reason == "stop")
        assert after.text == TOKENIZER.decode(after.token_ids, skip_special_tokens=True)


def test_samples_follow_the_seed_and_the_row_not_the_batch(model: PreTrainedModel) -> None:
    engine = HFEngine(model, TOKENIZER, batch_size=4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    together = engine.generate(PROMPTS, SAMPLED)
    assert torch.equal(torch.get_rng_state(), state)
    other_seed = SamplingParams(12, temperature=1.0, top_p=0.9, seed=2)
    assert engine.generate(PROMPTS, other_seed) != together
    engine.batch_size = 2
    assert engine.generate(PROMPTS, SAMPLED) == together
    assert engine.generate(PROMPTS[2:], SAMPLED, numbers=range(2, 4)) == together[2:]
    same_prompt = engine.generate([PROMPTS[0]] * 4, SAMPLED)
    assert len({tuple(c.token_ids) for c in same_prompt}) > 1
    only_likeliest = SamplingParams(12, temperature=1.0, top_k=1)
    assert engine.generate(PROMPTS, only_likeliest) == engine.generate(PROMPTS, SamplingParams(12))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_that_would_change_the_frequencies_of_others(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    positions = 32
    if kind == "longrope":
        positions = 128
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": 32}
    model = make_tiny_model(
        "llama", vocab_size=VOCAB, rope_parameters=rope, max_position_embeddings=positions
    )
    encoded = TOKENIZER(PROMPTS, add_special_tokens=False).input_ids
    longest = max(map(len, encoded))
    within = SamplingParams(33 - longest)  # the last token is not read
    beyond = SamplingParams(34 - longest)
    assert len(HFEngine(model, TOKENIZER, 2).generate(PROMPTS, within)) == len(PROMPTS)
    assert len(HFEngine(model, TOKENIZER, 2).generate(PROMPTS[2:3], beyond)) == 1
    with pytest.raises(ValueError, match=r"longer than 32 .* with which the others would be read"):
        HFEngine(model, TOKENIZER, 2).generate(PROMPTS, beyond)
    alone = HFEngine(model, TOKENIZER, 1)
    if kind == "longrope":
        assert len(alone.generate(PROMPTS, beyond)) == len(PROMPTS)
    else:  # transformers keeps the frequencies of the longest text so far
        with pytest.raises(ValueError, match=r"by fewer new tokens$"):
            alone.generate(PROMPTS, beyond)


def test_prompts_that_do_not_fit_are_named(model: PreTrainedModel) -> None:
    engine = HFEngine(model, TOKENIZER)
    assert engine.generate([], GREEDY) == []
    with pytest.raises(ValueError, match=r"the prompt has 4 .*max_new_tokens=509.*512"):
        engine.generate(["a=7 . b=2 ."], SamplingParams(509))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate(["a=1 .", ""], GREEDY)
    with pytest.raises(ValueError, match="batch_size"):
        HFEngine(model, TOKENIZER, batch_size=0)
    nothing = type("Nothing", (), {"eos_token_id": None})
    with pytest.raises(ValueError, match="eos_token_id"):
        end_tokens(None, nothing)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_new_tokens", value) for value in (0, 10**30, 7.0, True, None)],
        *[("temperature", value) for value in (-1, float("nan"), 1e-7, 1e38, "1", False)],
        *[("top_p", value) for value in (0, 1e-320, 1.0000001, float("nan"), True)],
        *[("top_k", value) for value in (-1, 10**30, 1.0)],
        *[("seed", value) for value in (-1, 2**63, 1.0, None)],
    ],
)
def test_impossible_sampling_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_new_tokens": 4, field: value})


# --- rollouts of a training

IDS = [[5, 6, 7], [9] * 11, [30, 31], [40, 50, 60, 70, 80, 90], [12]]


def test_cold_rollouts_equal_greedy_generate(family: str) -> None:
    model = make_tiny_model(family)
    ends = [2, 17, 44]
    sampling = SamplingParams(40, temperature=1e-6, seed=1)
    rows = Rows(IDS, list(range(len(IDS))), 0)
    found = {row.index: row.token_ids for row in roll_out(model, rows, sampling, ends, 0, 64)}
    assert [found[i] for i in range(len(IDS))] == generated(model, IDS, ends)


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    model = make_tiny_model("llama")
    sampling = SamplingParams(20, temperature=0.7, top_p=0.6, top_k=9, seed=1)
    rows = Rows(IDS, list(range(5)), 0)
    found = list(roll_out(model, rows, sampling, [2, 17], 0, max_rows=3))
    assert len(found) == 5
    others = roll_out(model, Rows(IDS, list(range(5)), 1), sampling, [2, 17], 0, max_rows=3)
    assert {tuple(row.token_ids) for row in others} != {tuple(row.token_ids) for row in found}
    for row in found:
        prompt = IDS[row.index]
        logits = model(torch.tensor([prompt + row.token_ids])).logits[0, len(prompt) - 1 : -1]
        picked = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(row.token_ids)[:, None])
        # before top-k and top-p
        assert (torch.tensor(row.logprobs) - picked[:, 0]).abs().max() < 2e-5
