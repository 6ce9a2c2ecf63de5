"""InferenceEngine and Chat on a random model with the built-in tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlkv.cache import CacheSettings, HeadReallocationCache
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import Chat, InferenceEngine, _TextStream
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams, Usage, completion_text
from tests.helpers.models import build_tokenizer, make_tiny_model

GREEDY = SamplingParams(max_new_tokens=15)
SIZES = {"sink": 2, "window": 6, "prefill": "local"}
QUESTIONS = ["a=7 . find a ?", "b=2 . c=3 . d = b + c . find d ?", "e=1 . find e ?"]


def make_engine(**options: Any) -> InferenceEngine:
    tokenizer = build_tokenizer()
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    model = make_tiny_model("llama", vocab_size=len(tokenizer), **ids)
    heads = HeadAllocation.random(3, 4, 0.5, seed=0)
    return InferenceEngine(model, tokenizer, heads, CacheSettings(**{**SIZES, **options}))


@pytest.mark.parametrize("prefill", ["full", "local"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_single_and_batched_replies_agree(prefill: str, temperature: float) -> None:
    engine = make_engine(prefill=prefill)
    sampling = SamplingParams(15, temperature=temperature)
    prompts = [render_prompt(engine.tokenizer, question) for question in QUESTIONS]
    batched, usage = engine.batch(prompts, sampling, numbers=[0, 0, 0])
    for prompt, completion in zip(prompts, batched, strict=True):
        pieces: list[str] = []
        reply = engine.reply(engine.tokenize([prompt])[0], sampling, pieces.append)
        assert reply.completion == completion
        assert "".join(pieces) == completion.text
    assert usage.tokens == sum(len(c.token_ids) for c in batched)
    assert 0 < usage.kv_bytes < usage.kv_bytes_full
    assert engine.model.config._attn_implementation == "sdpa"


def test_the_end_of_thoughts_is_streamed_where_it_is_a_special_token() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["</think>"], special_tokens=True)
    ids = tokenizer("a=1 </think> a=1 . <eos>", add_special_tokens=False).input_ids
    pieces: list[str] = []
    stream = _TextStream(tokenizer, pieces.append)
    for token in ids:
        stream.on_token(0, token)
    stream.end()
    assert "".join(pieces) == completion_text(tokenizer, ids)
    assert "</think>" in "".join(pieces)
    assert "<eos>" not in "".join(pieces)


def test_lines_keep_their_first_space_where_texts_lose_theirs() -> None:
    words = {"<unk>": 0, "\u2581def": 1, "\n": 2, "\u2581\u2581return": 3, "\u25811": 4}
    words["<sep>"] = 5
    whole = Tokenizer(WordLevel(words, unk_token="<unk>"))
    whole.decoder = decoders.Sequence(  # that of Llama 2
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, sep_token="<sep>")
    pieces: list[str] = []
    stream = _TextStream(tokenizer, pieces.append)
    ids = [1, 2, 3, 4, 2, 2, 5, 4]
    for token in ids:
        stream.on_token(0, token)
    stream.end()
    assert "".join(pieces) == completion_text(tokenizer, ids) == "def\n  return 1\n\n 1"


def test_full_replies_are_the_stock_ones_with_the_stock_bytes() -> None:
    engine = make_engine()
    prompt = render_prompt(engine.tokenizer, QUESTIONS[1])
    ids = engine.tokenize([prompt])[0]
    stock = engine.model.generate(torch.tensor([ids]), max_new_tokens=15, do_sample=False)
    reply = engine.reply(ids, GREEDY, full=True)
    batched, usage = engine.batch([prompt], GREEDY, full=True)
    assert reply.completion.token_ids == stock[0, len(ids) :].tolist() == batched[0].token_ids
    # K and V, layers, heads, tokens but the last one, floats of 4 bytes in vectors of 16
    expected = 2 * 3 * 4 * (stock.shape[1] - 1) * 16 * 4
    for found in (reply.usage, usage):
        assert found.kv_bytes == found.kv_bytes_full == expected
    compressed = engine.stream([prompt] * 2, GREEDY, [0, 1])
    next(compressed)
    with pytest.raises(ValueError, match="compressed by a stream that has not ended"):
        engine.batch([prompt], GREEDY, full=True)
    compressed.close()
    assert engine.batch([prompt], GREEDY, full=True)[0] == batched


def test_chat_turns_on_the_cache_equal_reading_everything_anew() -> None:
    engine = make_engine(prefill="local")
    chat = Chat(engine, GREEDY)
    caches = []
    for question in QUESTIONS:
        reply = chat.say(question)
        caches.append(reply.cache)
        text = engine.tokenizer.apply_chat_template(
            chat.messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert engine.reply(engine.tokenize([text])[0], GREEDY).completion == reply.completion
    assert caches[0] is caches[1] is caches[2]
    assert isinstance(caches[0], HeadReallocationCache)
    assert chat.restarted == 0
    chat.reset()
    assert chat.say(QUESTIONS[0]).cache is not caches[0]


def test_a_template_that_rewrites_the_past_starts_a_new_cache() -> None:
    engine = make_engine()
    # as templates of reasoning models do, which cut earlier reasoning out
    engine.tokenizer.chat_template = engine.tokenizer.chat_template.replace(
        "{{ message['content'] }}<eos>", "<eos>"
    )
    chat = Chat(engine, GREEDY)
    first, second = chat.say(QUESTIONS[0]), chat.say(QUESTIONS[1])
    assert first.cache is not second.cache
    assert chat.restarted == 1


def test_each_turn_of_a_chat_draws_other_numbers() -> None:
    engine = make_engine()
    sampling = SamplingParams(20, temperature=1.0, seed=3)
    chats = []
    for _ in range(2):
        chat = Chat(engine, sampling)
        replies = []
        for _ in range(2):
            replies.append(chat.say(QUESTIONS[0]).completion.token_ids)
            chat.reset()
        assert replies[0] != replies[1]
        chats.append(replies)
    assert chats[0] == chats[1]


def test_chat_without_a_chat_template() -> None:
    engine = make_engine()
    engine.tokenizer.chat_template = None
    chat = Chat(engine, GREEDY, template="plain")
    text = render_prompt(engine.tokenizer, QUESTIONS[0], "plain")
    text += f"{chat.say(QUESTIONS[0]).completion.text}\n\n{QUESTIONS[1]}"
    expected = engine.reply(engine.tokenize([text])[0], GREEDY)
    assert chat.say(QUESTIONS[1]).completion == expected.completion


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    chat = Chat(engine, GREEDY)
    chat.say(QUESTIONS[0])
    messages = list(chat.messages)
    cache = chat._cache
    with pytest.raises(ValueError, match="512"):
        chat.say("a=7 . " * 300)
    assert chat.messages == messages
    assert chat._cache is cache

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say(QUESTIONS[1], interrupt)
    assert chat.messages == messages
    assert engine.model.config._attn_implementation == "sdpa"
    again = chat.say(QUESTIONS[1])
    other = Chat(engine, GREEDY)
    other.say(QUESTIONS[0])
    assert again.completion == other.say(QUESTIONS[1]).completion


def test_a_chat_keeps_its_first_question_where_the_prompt_is_protected() -> None:
    engine = make_engine(protect_prompt=True)
    chat = Chat(engine, GREEDY)
    first = len(engine.tokenize([chat._render(QUESTIONS[0])])[0])
    for question in QUESTIONS:
        reply = chat.say(question)
    held = reply.cache.held(0)[~engine.allocation.full]
    assert held[:, :first].all()
    assert (held[:, first:].sum(-1) == 6).all()
    plain = make_engine().describe()
    assert engine.describe() == {**plain, "protect_prompt": True}
    assert "protect_prompt" not in plain


def test_a_cache_and_planned_lengths_that_do_not_fit_are_refused() -> None:
    engine = make_engine()
    prompt = render_prompt(engine.tokenizer, QUESTIONS[0])
    ids = engine.tokenize([prompt])[0]
    cache = engine.reply(ids, GREEDY).cache
    with pytest.raises(ValueError, match=r"cache holds \d+ tokens and the text has"):
        engine.reply(ids, GREEDY, cache=cache)
    with pytest.raises(ValueError, match=r"2 lengths for 1 prompts"):
        next(engine.stream([prompt], GREEDY, planned=[20, 30]))


def test_usages_add_up() -> None:
    total = Usage(10, 2.0, 100, 400) + Usage(20, 3.0, 150, 300)
    assert (total.tokens, total.seconds, total.kv_bytes, total.kv_bytes_full) == (30, 5.0, 100, 400)
    assert total.tokens_per_second == 6.0
    assert "100 / 400 (25.0%)" in total.summary()
