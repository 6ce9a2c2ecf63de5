"""generate_lossless(...): tokens and distribution of the full model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import rlkv
from rlkv import HeadAllocation, tiny
from rlkv.eviction import RKV
from rlkv.inference.lossless import accept_sampled
from tests.helpers.cached_logits import MIXED as HEADS
from tests.helpers.cached_logits import draw_ids, real_tokens
from tests.helpers.families import make_family
from tests.helpers.gates import random_gates
from tests.helpers.models import SOFTMAXES, make_tiny_model

MIXED = HeadAllocation(HEADS)
SIZES: dict[str, Any] = {"sink": 2, "window": 4}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
IDS = draw_ids(3, 12)
MASK = real_tokens([0, 4, 9], 12).long()
PADDED = {"attention_mask": MASK}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("llama")


# --- greedy


@pytest.mark.parametrize(
    ("kind", "rows", "sparsity", "drafted"),
    [
        ("llama", 1, 0.5, 1),
        ("llama", 1, 1.0, 8),
        ("llama", 3, 0.0, 3),
        ("llama", 3, 0.5, 8),
        ("qwen2", 1, 0.0, 8),
        ("qwen2", 3, 1.0, 1),
        ("qwen3", 3, 0.5, 3),
    ],
)
def test_greedy_tokens_are_those_of_generate(
    kind: str, rows: int, sparsity: float, drafted: int
) -> None:
    model = make_tiny_model(kind)
    given = {"attention_mask": MASK[:rows], **GREEDY}
    stock = model.generate(IDS[:rows], **given)
    gates = random_gates(model)
    out = rlkv.generate_lossless(model, IDS[:rows], gates, sparsity, drafted, **SIZES, **given)
    assert torch.equal(out.sequences, stock)
    assert out.tokens == 40 * rows
    assert (out.accepted == out.drafted) == (sparsity == 0)
    # every token but the first comes from a draft or from the verification after it
    assert out.tokens == rows + out.accepted + out.verifications
    if sparsity == 0:
        assert out.verifications == rows * -(-39 // (drafted + 1))
        assert out.tokens_per_verification == pytest.approx(39 * rows / out.verifications)


@pytest.mark.parametrize("kind", SOFTMAXES)
def test_learned_sinks_and_capped_logits_are_drafted_too(kind: str) -> None:
    model = make_tiny_model(kind)
    stock = model.generate(IDS, **PADDED, **GREEDY)
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **PADDED, **GREEDY)
    assert torch.equal(out.sequences, stock)


def test_texts_that_fill_all_learned_positions() -> None:
    model = make_family("gpt2", vocab_size=128, n_positions=40)
    given = GREEDY | {"max_new_tokens": 28}
    out = rlkv.generate_lossless(
        model, IDS, HeadAllocation(torch.zeros(2, 4, dtype=torch.bool)), **SIZES, **PADDED, **given
    )
    assert torch.equal(out.sequences, model.generate(IDS, **PADDED, **given))


def test_rows_end_at_their_end_tokens_inside_of_drafts(model: PreTrainedModel) -> None:
    stock = model.generate(IDS, **PADDED, **GREEDY)
    ends = [int(stock[0, 12 + 5]), int(stock[1, 12 + 17])]  # neither after a draft of 8
    given = {**PADDED, **GREEDY, "eos_token_id": ends, "pad_token_id": 0}
    stock = model.generate(IDS, **given)
    out = rlkv.generate_lossless(model, IDS, random_gates(model), 0.0, 8, **SIZES, **given)
    assert torch.equal(out.sequences, stock)
    assert (stock == 0)[:, 12:].any()
    assert out.accepted == out.drafted
    for row in range(2):
        alone = IDS[row : row + 1, MASK[row].bool()]
        one = rlkv.generate_lossless(
            model, alone, MIXED, num_draft_tokens=8, **SIZES, **given | {"attention_mask": None}
        )
        new = one.sequences[0, alone.shape[1] :]
        assert torch.equal(new, stock[row, 12 : 12 + len(new)])
        assert int(new[-1]) in ends


def test_processors_see_the_text_before_each_token(model: PreTrainedModel) -> None:
    given = {**PADDED, **GREEDY, "repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2}
    stock = model.generate(IDS, **given)
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **given)
    assert torch.equal(out.sequences, stock)
    assert not torch.equal(stock, model.generate(IDS, **PADDED, **GREEDY))


class Tokens(BaseStreamer):
    """What a streamer is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_tokens_are_streamed_one_by_one(model: PreTrainedModel) -> None:
    streamers = [Tokens(), Tokens()]
    model.generate(IDS[:1], streamer=streamers[0], **GREEDY)
    rlkv.generate_lossless(model, IDS[:1], MIXED, **SIZES, streamer=streamers[1], **GREEDY)
    assert streamers[0].calls == streamers[1].calls
    assert streamers[1].ended


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "sparsity", "drafted"), [(1, 0.5, 3), (3, 1.0, 8), (3, 0.5, 1)])
def test_a_thousand_tokens(rows: int, sparsity: float, drafted: int) -> None:
    model, _ = tiny.load()
    given = {"attention_mask": MASK[:rows], **GREEDY, "max_new_tokens": 1000}
    stock = model.generate(IDS[:rows] % 64, **given)
    out = rlkv.generate_lossless(model, IDS[:rows] % 64, "tiny", sparsity, drafted, **given)
    assert torch.equal(out.sequences, stock)
    assert out.tokens == 1000 * rows


def test_adapters_of_single_rows() -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(make_tiny_model("llama"), lora).eval()
    given = {**PADDED, **GREEDY, "adapter_names": ["__base__", "default", "__base__"]}
    stock = model.generate(input_ids=IDS, **given)
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **given)
    assert torch.equal(out.sequences, stock)
    assert not torch.equal(stock, model.generate(input_ids=IDS, **PADDED, **GREEDY))


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("rotation", [{"rope_type": "dynamic"}, LONGROPE])
def test_frequencies_that_follow_from_the_length_of_a_text(rotation: dict[str, Any]) -> None:
    rope = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, **rotation}
    model = make_tiny_model("llama", rope_parameters=rope, max_position_embeddings=32)
    short = GREEDY | {"max_new_tokens": 21}  # the last token is not read
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **PADDED, **short)
    assert torch.equal(out.sequences, model.generate(IDS, **PADDED, **short))
    message = "other frequencies in texts longer than 32.*, or use model.generate"
    with pytest.raises(ValueError, match=message):
        rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **PADDED, **GREEDY)


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.20"), reason="mended there")
def test_generate_of_phi3_is_no_way_out() -> None:
    """It drops its cache where the frequencies change, and goes on with one token alone."""
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **LONGROPE}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"head_dim": 8, "original_max_position_embeddings": 32}
    model = make_tiny_model("phi3", rope_parameters=rope, **sizes)
    with pytest.raises(ValueError, match=r"or use transformers 5.20 or newer and model\.generate"):
        rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **GREEDY)


def test_texts_that_have_the_long_frequencies_from_the_start() -> None:
    rope = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, **LONGROPE}
    model = make_tiny_model("llama", rope_parameters=rope)
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **GREEDY)
    assert torch.equal(out.sequences, model.generate(IDS, **GREEDY))


# --- sampled


def bound(freedom: int) -> float:
    """Chi-squared of so many degrees of freedom is above it once in a million times."""
    return freedom + 6 * (2 * freedom) ** 0.5


def test_accepted_tokens_have_the_distribution_of_the_full_model() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 20000
    scores = torch.randn(3, 6, generator=generator).mul(2)
    draft_scores = [torch.randn(6, generator=generator).expand(rows, -1) for _ in range(2)]
    torch.manual_seed(0)
    draws = [torch.multinomial(of.softmax(-1), 1) for of in draft_scores]
    drafts = torch.cat(draws, dim=1)
    accepted, following = accept_sampled(drafts, draft_scores, scores.expand(rows, -1, -1))
    assert set(accepted.tolist()) == {0, 1, 2}
    tokens = torch.cat([drafts, following[:, None]], dim=1)
    tokens[torch.arange(rows), accepted] = following
    for place in range(3):
        decided = tokens[accepted >= place, place]  # rows whose earlier drafts were accepted
        counts = torch.bincount(decided, minlength=6)
        expected = scores[place].softmax(-1) * len(decided)
        assert ((counts - expected) ** 2 / expected).sum() < bound(5)


def test_sampled_texts_have_the_distribution_of_the_full_model(model: PreTrainedModel) -> None:
    rows = 2000
    given: dict[str, Any] = {"do_sample": True, "eos_token_id": None, "temperature": 3.0}
    given |= {"top_k": 3, "top_p": 0.97}
    torch.manual_seed(0)
    many = {"num_return_sequences": rows, "max_new_tokens": 4, "num_draft_tokens": 2}
    out = rlkv.generate_lossless(model, IDS[:1], MIXED, **SIZES, **many, **given)
    assert 0.1 < out.accepted / out.drafted < 0.9
    expected: dict[tuple[int, ...], float] = {(): rows}
    one = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    for _ in range(4):
        longer = {}
        for text, count in expected.items():
            ids = torch.cat([IDS[:1], torch.tensor([text], dtype=torch.long)], dim=1)
            probabilities = model.generate(ids, **one, **given).scores[0].softmax(-1)[0]
            for token in probabilities.nonzero()[:, 0].tolist():
                longer[*text, token] = count * float(probabilities[token])
        expected = longer
    found = dict.fromkeys(expected, 0)
    for row in out.sequences[:, 12:].tolist():
        found[tuple(row)] += 1  # a token outside of top-k and top-p is not in the table
    likely = [text for text, count in expected.items() if count >= 5]
    chi = sum((found[text] - expected[text]) ** 2 / expected[text] for text in likely)
    assert len(likely) > 20
    assert chi < bound(len(likely))


def test_sampling_from_one_token_is_greedy(model: PreTrainedModel) -> None:
    given = {**PADDED, **GREEDY, "do_sample": True, "top_k": 1}
    out = rlkv.generate_lossless(model, IDS, MIXED, **SIZES, **given)
    assert torch.equal(out.sequences, model.generate(IDS, **PADDED, **GREEDY))


# --- refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0: it must be a whole number from 1"),
        ({"gates": None}, "gates is None: pass gates"),
        ({"eviction": RKV(budget=8)}, "does not take eviction: nothing is evicted"),
        ({"position_ids": IDS}, "does not take position_ids"),
        ({"past_key_values": 1}, "does not take past_key_values: it has a cache of its own"),
        ({"stop_strings": ["a"]}, "does not take stop_strings: pass stopping_criteria="),
        ({"num_beams": 2}, "greedily or samples, without beam_search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "greedily or samples, without contrastive_search"),
        ({"guidance_scale": 1.5}, "guidance_scale reads a second text"),
        ({"guidance_scale": 0.0}, "guidance_scale reads a second text"),
        ({"stopping_criteria": [lambda ids, scores: ids[:, -1] == 5]}, "pass one, or one row"),
        ({"return_dict_in_generate": True}, "leave return_dict_in_generate out"),
        ({"streamer": Tokens()}, "a streamer takes one row, not 3"),
        ({"labels": IDS}, "reads only token ids and attention_mask, not labels"),
        ({"watermarking_config": WatermarkingConfig()}, "watermarking_config counts every call"),
        ({"use_cache": False}, "use_cache=False"),
        ({"attention_mask": MASK.flip(1)}, "left padding only"),
        ({"sparsity": 0.5}, "sparsity is given together with a HeadAllocation"),
    ],
)
def test_refused_calls(model: PreTrainedModel, given: dict[str, Any], message: str) -> None:
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        rlkv.generate_lossless(model, IDS, **{"gates": MIXED, **GREEDY, **given})
    assert model.config._attn_implementation == before


def test_learned_prompts_are_refused() -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(make_tiny_model("llama"), prompt).eval()
    with pytest.raises(ValueError, match="puts learned tokens before them"):
        rlkv.generate_lossless(model, IDS, MIXED, **GREEDY)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])  # linear layers, sliding windows
def test_hybrids_are_refused(family: str) -> None:
    hybrid = make_tiny_model(family, num_hidden_layers=6)
    with pytest.raises(ValueError, match="takes drafted tokens back"):
        rlkv.generate_lossless(hybrid, IDS, MIXED)
