"""Mode lossless: the full model's tokens, drafted by the same model with compressed heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.engines import (
    BLOCK,
    ENGINES,
    ITSELF,
    LENGTHS,
    SINK,
    TWO_RANKS,
    WINDOW,
    Served,
    add_request,
    check_all_free,
    check_equal,
    drafted_and_accepted,
    engine,
    generate,
    need_vllm,
    random_prompts,
    tokens_of,
    watch_preemptions,
)
from tests.vllm.conftest import Serving

need_vllm()

from rlkv.vllm.check import SeenTokens
from rlkv.vllm.drafts import HeadDraftProposer
from rlkv.vllm.settings import ServingSettings

LOSSLESS = ENGINES["lossless"].settings
DRAFTS = {"speculative_config": ITSELF, "disable_log_stats": False}


@pytest.mark.engine("lossless")
def test_tokens_are_the_full_models(serving: Serving) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260), seed=2)
    preempted = watch_preemptions(serving.llm)
    outputs = generate(serving.llm, random_prompts(LENGTHS), 80)
    outputs += generate(serving.llm, prompts, 160)
    again = generate(serving.llm, prompts[-1:], 40)
    assert preempted
    assert again[0].num_cached_tokens >= 4 * BLOCK
    assert check_equal(serving.served, 0.0, outputs + again) == 1480
    drafted, accepted = drafted_and_accepted(serving.llm)
    assert 0 < accepted < drafted
    check_all_free(serving.llm)


@pytest.mark.engine("lossless")
def test_sampled_tokens_have_the_full_models_log_probabilities(serving: Serving) -> None:
    outputs = generate(serving.llm, random_prompts((40, 90)), 60, temperature=1.0, n=2)
    assert check_equal(serving.served, 0.0, outputs, greedy=False) == 240


@pytest.mark.parametrize("served_by", ["drafts", "lossless"])
def test_the_likeliest_token_is_drawn_if_no_other_may_be(serving: Serving, served_by: str) -> None:
    """The engine's sampler loses top_k and top_p of verified tokens on a CPU."""
    prompts = random_prompts((40, 90))
    greedy = tokens_of(generate(serving.llm, prompts, 60))
    for sampling in ({"top_k": 1}, {"top_p": 1e-6}):
        outputs = generate(serving.llm, prompts, 60, temperature=0.7, **sampling)
        assert tokens_of(outputs) == greedy


@pytest.mark.engine("lossless")
def test_a_text_up_to_the_longest_and_aborted_ones(serving: Serving) -> None:
    own = serving.llm.llm_engine
    longest = own.model_config.max_model_len
    for name, prompt in zip("ab", random_prompts((150, 30), seed=5), strict=True):
        add_request(serving.llm, name, prompt, 60)
    for _ in range(4):
        own.step()
    own.abort_request(["a", "b"])
    outputs = generate(serving.llm, random_prompts((longest - 45, 20), seed=4), 60)
    assert check_equal(serving.served, 0.0, outputs) == 45 + 60
    check_all_free(serving.llm)


@pytest.mark.usefixtures("alone")
def test_drafts_of_all_heads_are_accepted(llama: Served) -> None:
    with engine(llama, llama.request(0.0, **LOSSLESS), **DRAFTS) as llm:
        outputs = generate(llm, random_prompts(LENGTHS), 81)  # 1 of the prompt, 4 of each round
        assert check_equal(llama, 0.0, outputs) == 6 * 81
        assert drafted_and_accepted(llm) == [6 * 60, 6 * 60]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("protects", [False, True])
def test_drafts_see_sinks_and_window(
    llama: Served, protects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[int, list[int]]] = []
    stock = HeadDraftProposer.propose

    def noted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = stock(self, *args, **kwargs)
        after_last = int(self.positions[0]) - 2  # of the third of the draft's queries
        rounds.append((after_last, found[0].tolist()))
        return found

    monkeypatch.setattr(HeadDraftProposer, "propose", noted)
    prompt = 70 if protects else 333
    request = llama.request(1.0, protect_prompt=protects, **LOSSLESS)
    with engine(llama, request, **DRAFTS) as llm:
        (output,) = generate(llm, random_prompts((prompt,)), 130)
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    kept = ServingSettings(full=("0000",), sink=SINK, window=WINDOW, protect_prompt=protects)
    seen = SeenTokens(kept, BLOCK)
    assert len(rounds) > 30
    for first, drafts in rounds:
        if first >= len(text):  # after the last token
            continue
        with torch.no_grad():
            cache = llama.model(torch.tensor([text[:first]])).past_key_values
            mask = torch.full((1, 1, 3, first + 3), -torch.inf)
            for row in range(3):
                mask[..., row, seen.positions(first + row, prompt)] = 0
            queries = torch.tensor([[text[first], *drafts[:2]]])
            logits = llama.model(queries, attention_mask=mask, past_key_values=cache).logits
        assert logits[0].argmax(-1).tolist() == drafts


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        pytest.param({"enforce_eager": False}, marks=pytest.mark.slow),
        pytest.param(TWO_RANKS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_the_stock_engines(llama: Served, options: dict[str, Any]) -> None:
    prompts = random_prompts(LENGTHS)
    found = []
    for request, drafts in ((None, {}), (llama.request(0.6, **LOSSLESS), DRAFTS)):
        with engine(llama, request, **options, **drafts) as llm:
            found.append(tokens_of(generate(llm, prompts, 60)))
            if drafts:
                assert drafted_and_accepted(llm)[1] > 0
    # the last bit of a sum may move an entry of 8 bits to its neighbour
    most = 1 if "kv_cache_dtype" in options else 0
    assert sum(stock != own for stock, own in zip(*found, strict=True)) <= most
