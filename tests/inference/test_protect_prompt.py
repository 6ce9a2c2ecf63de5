"""compress(..., protect_prompt=True) and engines with it: batches, beams, further turns, and what
is refused.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import rlkv
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import Chat, InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from tests.helpers.cached_logits import MIXED as HEADS
from tests.helpers.cached_logits import draw_ids
from tests.helpers.models import build_tokenizer, make_tiny_model

MIXED = HeadAllocation(HEADS)
SIZES = {"sink": 2, "window": 4, "protect_prompt": True}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
QUESTIONS = [
    "a=7 . find a ?",
    "b=2 . c=3 . d = b + c . find d ?",
    "e=1 . find e ?",
    "f=5 . g=2 . h = f + g . find h ?",
]


@pytest.fixture
def engine() -> InferenceEngine:
    tokenizer = build_tokenizer()
    ids = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    model = make_tiny_model("llama", vocab_size=len(tokenizer), **ids)
    return InferenceEngine(model, tokenizer, HeadAllocation.random(3, 4, 0.5, seed=0), **SIZES)


@pytest.mark.parametrize("prefill", ["full", "local", "published"])
def test_rows_decode_as_they_do_alone(tiny_model: PreTrainedModel, prefill: str) -> None:
    ids, padding = draw_ids(3, 20), [0, 7, 17]
    mask = (torch.arange(20) >= torch.tensor(padding)[:, None]).long()
    with rlkv.compress(tiny_model, MIXED, prefill=prefill, **SIZES) as session:
        batch = tiny_model.generate(ids, attention_mask=mask, **GREEDY)
        for row, pad in enumerate(padding):
            held = session.cache.held(row)[~HEADS]
            assert held[:, : 20 - pad].all()
            assert (held[:, 20 - pad :].sum(-1) == 4).all()
        for row, pad in enumerate(padding):
            alone = tiny_model.generate(ids[row : row + 1, pad:], **GREEDY)
            assert torch.equal(alone[0, 20 - pad :], batch[row, 20:])


def test_sparsity_zero_is_stock_generate(tiny_model: PreTrainedModel) -> None:
    ids = draw_ids(2, 12)
    stock = tiny_model.generate(ids, **GREEDY)
    with rlkv.compress(tiny_model, HeadAllocation(torch.ones_like(HEADS)), **SIZES) as session:
        assert torch.equal(tiny_model.generate(ids, **GREEDY), stock)
        assert session.cache.nbytes() == session.cache.full_nbytes()


def test_beams_of_a_batch_equal_those_of_single_prompts(tiny_model: PreTrainedModel) -> None:
    ids, mask = draw_ids(2, 12), (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    beams = {**GREEDY, "num_beams": 3, "max_new_tokens": 12}
    with rlkv.compress(tiny_model, MIXED, **SIZES):
        batch = tiny_model.generate(ids, attention_mask=mask, **beams)
        for row, pad in ((0, 0), (1, 5)):
            assert torch.equal(
                tiny_model.generate(ids[row : row + 1, pad:], **beams)[0, 12 - pad :],
                batch[row, 12:],
            )


def test_a_further_turn_is_kept_as_generated_tokens_are(tiny_model: PreTrainedModel) -> None:
    turn = draw_ids(1, 9, seed=3)
    with rlkv.compress(tiny_model, MIXED, **SIZES) as session:
        text = tiny_model.generate(draw_ids(1, 12), **GREEDY)
        text = torch.cat([text, turn], dim=1)
        tiny_model.generate(text, past_key_values=session.cache, **GREEDY)
        held = session.cache.held(0)[~HEADS]
        assert held[:, :12].all()
        assert (held[:, 12:].sum(-1) == 4).all()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_prompts_that_join_a_batch_decode_as_they_do_together(
    engine: InferenceEngine, batch_size: int
) -> None:
    prompts = [render_prompt(engine.tokenizer, question) for question in QUESTIONS]
    sampling = SamplingParams(max_new_tokens=20)
    together, _ = engine.batch(prompts, sampling)
    engine.batch_size = batch_size
    assert [c.token_ids for c in engine.batch(prompts, sampling)[0]] == [
        c.token_ids for c in together
    ]


def test_a_chat_keeps_its_first_question(engine: InferenceEngine) -> None:
    chat = Chat(engine, SamplingParams(max_new_tokens=15))
    first = len(engine.encode(chat._render(QUESTIONS[1])))
    for question in QUESTIONS[1:]:
        reply = chat.say(question)
    assert chat.restarted == 0
    held = reply.cache.held(0)[~engine.allocation.full]
    assert held[:, :first].all()
    assert (held[:, first:].sum(-1) == 4).all()


def test_what_completions_depend_on_names_it_where_it_is_on(engine: InferenceEngine) -> None:
    plain = InferenceEngine(engine.model, engine.tokenizer, engine.allocation, 2, 4)
    assert engine.describe() == {**plain.describe(), "protect_prompt": True}
    assert "protect_prompt" not in plain.describe()


def test_what_does_not_go_with_it_is_refused(tiny_model: PreTrainedModel) -> None:
    with (
        pytest.raises(ValueError, match=r"protect_prompt.*rkv"),
        rlkv.compress(tiny_model, MIXED, eviction=RKV(budget=12), protect_prompt=True),
    ):
        pass
    chunks = {**GREEDY, "prefill_chunk_size": 4}
    with (
        rlkv.compress(tiny_model, MIXED, prefill="local", **SIZES) as session,
        pytest.raises(ValueError, match=r"prefill_chunk_size.*protect_prompt"),
    ):
        tiny_model.generate(draw_ids(1, 12), **chunks)
    cache = session.new_cache()
    with (
        rlkv.compress(tiny_model, MIXED, sink=2, window=4, prefill="local"),
        pytest.raises(ValueError, match=r"past_key_values.*protect_prompt"),
    ):
        tiny_model.generate(draw_ids(1, 12), past_key_values=cache, **GREEDY)
