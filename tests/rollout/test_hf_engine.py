"""HFEngine: batches equal single rows, ends are trimmed, limits are named."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.tiny import problems
from tests.helpers.models import build_tokenizer, make_tiny_model

VOCAB = 340  # covers the tiny tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture
def model(family: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    assert len(tokenizer) <= VOCAB
    return make_tiny_model(family, vocab_size=VOCAB)


@pytest.fixture
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [render_prompt(tokenizer, p["problem"]) for p in problems(7, seed=0)]


def test_batched_equals_single_greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    greedy = SamplingParams(max_new_tokens=24)
    batched = HFEngine(model, tokenizer, batch_size=4).generate(prompts, greedy)
    single = [HFEngine(model, tokenizer, batch_size=1).generate([p], greedy)[0] for p in prompts]
    assert batched == single
    assert len({tuple(c.token_ids) for c in batched}) > 1, (
        "all completions alike: the test would prove nothing"
    )


def test_greedy_equals_the_argmax_loop(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    ids = tokenizer(prompts[0], add_special_tokens=False, return_tensors="pt").input_ids
    expected = []
    with torch.no_grad():
        for _ in range(10):
            token = int(model(ids).logits[0, -1].argmax())
            expected.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            if token == tokenizer.eos_token_id:
                break
    assert (
        HFEngine(model, tokenizer).generate(prompts[:1], SamplingParams(10))[0].token_ids
        == expected
    )


def test_stops_at_the_first_of_several_end_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    model = make_tiny_model("llama", vocab_size=VOCAB)
    free = HFEngine(model, tokenizer).generate(prompts, SamplingParams(20))
    ends = [free[0].token_ids[5], free[1].token_ids[3], tokenizer.eos_token_id]
    model.generation_config.eos_token_id = ends
    stopped = HFEngine(model, tokenizer, batch_size=3).generate(prompts, SamplingParams(20))
    for before, after in zip(free, stopped, strict=True):
        first = next((i for i, t in enumerate(before.token_ids) if t in ends), None)
        assert after.finish_reason == ("length" if first is None else "stop")
        assert after.token_ids == (
            before.token_ids if first is None else before.token_ids[: first + 1]
        )
        assert after.text == tokenizer.decode(after.token_ids, skip_special_tokens=True)
    assert {c.finish_reason for c in stopped[:2]} == {"stop"}


def test_generation_defaults_of_the_model_are_not_applied(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    model = make_tiny_model("qwen2", vocab_size=VOCAB)
    plain = HFEngine(model, tokenizer).generate(prompts, SamplingParams(12))
    model.generation_config.update(
        repetition_penalty=1.8, temperature=0.6, top_p=0.5, do_sample=True
    )
    assert HFEngine(model, tokenizer).generate(prompts, SamplingParams(12)) == plain


def test_sampling_follows_the_seed_and_leaves_the_global_state(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    engine = HFEngine(make_tiny_model("qwen3", vocab_size=VOCAB), tokenizer, batch_size=3)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = engine.generate(prompts, SamplingParams(12, temperature=1.0, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.generate(prompts, SamplingParams(12, temperature=1.0, seed=1)) == first
    assert engine.generate(prompts, SamplingParams(12, temperature=1.0, seed=2)) != first
    same_prompt = engine.generate([prompts[0]] * 6, SamplingParams(12, temperature=1.0))
    assert len({tuple(c.token_ids) for c in same_prompt}) > 1


def test_top_k_one_is_greedy(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> None:
    engine = HFEngine(make_tiny_model("llama", vocab_size=VOCAB), tokenizer)
    sampled = engine.generate(prompts, SamplingParams(12, temperature=1.0, top_k=1))
    assert sampled == engine.generate(prompts, SamplingParams(12))


def test_samples_do_not_depend_on_the_batch(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    model = make_tiny_model("qwen3", vocab_size=VOCAB)
    sampling = SamplingParams(12, temperature=1.0, top_p=0.9, seed=1)
    together = HFEngine(model, tokenizer, batch_size=7).generate(prompts, sampling)
    assert HFEngine(model, tokenizer, batch_size=2).generate(prompts, sampling) == together
    resumed = dict(
        HFEngine(model, tokenizer, batch_size=2).stream(prompts[3:], sampling, numbers=range(3, 7))
    )
    assert [resumed[i] for i in range(4)] == together[3:]


def test_too_long_names_both_numbers(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> None:
    engine = HFEngine(
        make_tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=64), tokenizer
    )
    length = engine.prompt_lengths(prompts[:1])[0]
    with pytest.raises(ValueError, match=rf"{length} .*max_new_tokens=60.*64"):
        engine.generate(prompts[:1], SamplingParams(60))
    assert len(engine.generate(prompts[:1], SamplingParams(64 - length))) == 1


def test_empty_inputs(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = HFEngine(make_tiny_model("llama", vocab_size=VOCAB), tokenizer)
    assert engine.generate([], SamplingParams(4)) == []
    with pytest.raises(ValueError, match="prompt 1"):
        engine.generate(["a=1 .", ""], SamplingParams(4))


@pytest.mark.parametrize(
    "bad",
    [
        *({"max_new_tokens": value} for value in (0, 10**30, 7.0, True, None)),
        *(
            {"temperature": value}
            for value in (-1, float("nan"), float("inf"), 1e-320, 1e-7, 1e38, "1", False, None)
        ),
        *({"top_p": value} for value in (0, 1e-320, 1.0000001, float("nan"), True, "1")),
        *({"top_k": value} for value in (-1, 10**30, 1.0)),
        *({"seed": value} for value in (-1, 2**63, 1.0, None)),
    ],
)
def test_impossible_sampling_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**{"max_new_tokens": 4, **bad})
