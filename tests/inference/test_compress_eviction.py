"""rlkv.compress with eviction policies: alone, with gates, generation, bytes, and the models that
differ.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

import rlkv
from rlkv.eviction import H2O, RKV, RPC, TOVA, RandomEviction, SinkWindow
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.compress import CompressedSession, resolve_allocation
from rlkv.inference.engine import InferenceEngine
from rlkv.rollout.base import SamplingParams
from tests.helpers.models import make_tiny_model

MIXED = HeadAllocation(
    torch.tensor(
        [[True, False, True, False], [False, False, False, False], [True, True, True, True]]
    )
)
ENTRY = 2 * 16 * 4  # bytes of key and value of one token of one head: 2 tensors of 16 float32


def generate(
    model, ids, session: CompressedSession | None = None, new: int = 40, **options
) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        **options,
    )


def prompt(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def test_alone_all_heads_evict_and_the_model_is_as_before() -> None:
    model = make_tiny_model("llama")
    before = generate(model, prompt())
    with rlkv.compress(model, eviction=RKV(budget=12, buffer=4)) as session:
        generate(model, prompt())
        assert not session.allocation.full.any()
        assert session.cache is not None
        assert not session.cache.full.any()
    assert torch.equal(generate(model, prompt()), before)


def test_a_budget_beyond_the_text_generates_the_stock_tokens() -> None:
    model = make_tiny_model("qwen3")
    want = generate(model, prompt())
    for policy in (
        RKV(budget=100),
        RPC(P=100),
        H2O(budget=100),
        TOVA(budget=100),
        SinkWindow(budget=100),
    ):
        with rlkv.compress(model, MIXED, eviction=policy):
            assert torch.equal(generate(model, prompt()), want)


@pytest.mark.parametrize("observation", [2, 8])
def test_bytes_count_buffers_and_observed_queries(observation: int) -> None:
    model = make_tiny_model("llama")
    policy = RKV(budget=12, buffer=4, observation=observation)
    with rlkv.compress(model, eviction=policy) as session:
        generate(model, prompt(), new=40)
    cache = session.cache
    assert cache is not None
    held = int(cache.state.row_counts.held[0])
    queries = (
        2 * 12 * 2 * observation * 16 * 4
    )  # rows, KV heads, query heads of each, tokens, elements, bytes
    assert cache.get_seq_length() == 59
    assert 12 <= held < 16
    assert cache.used_nbytes() == 2 * 12 * held * ENTRY + queries
    assert cache.nbytes() == 2 * 12 * (12 + 4) * ENTRY + queries
    assert cache.full_nbytes() == 2 * 12 * 59 * ENTRY


def test_bytes_count_accumulated_scores() -> None:
    model = make_tiny_model("llama")
    with rlkv.compress(model, eviction=H2O(budget=12)) as session:
        generate(model, prompt(), new=40)
    assert session.cache is not None
    assert session.cache.nbytes() == 2 * 12 * 13 * (ENTRY + 4)
    assert session.cache.used_nbytes() == 2 * 12 * 12 * (ENTRY + 4)


def test_with_gates_full_heads_hold_everything() -> None:
    model = make_tiny_model("llama")
    with rlkv.compress(model, MIXED, eviction=TOVA(budget=10), record=True) as session:
        generate(model, prompt(), new=40)
    assert session.cache is not None
    held = session.cache.held(0)
    assert held.shape == (3, 4, 59)
    assert held[MIXED.full].all()
    assert (held[~MIXED.full].sum(-1) == 10).all()
    assert held[..., -1].all()


def test_record_lists_every_compaction() -> None:
    model = make_tiny_model("llama")
    policy = RKV(budget=12, buffer=5, observation=3)
    with rlkv.compress(model, MIXED, eviction=policy, record=True) as session:
        generate(model, prompt(), new=40)
    kept = session.cache.kept
    # the prompt of 20 is compacted at once, then every 5 of the 39 tokens that were fed: 20, 25,
    # 30, ..., 55
    assert sorted({(k.layer, k.row, k.seen) for k in kept}) == [
        (layer, row, seen) for layer in (0, 1) for row in (0, 1) for seen in range(20, 60, 5)
    ]
    for k in kept:
        assert k.positions.shape == k.scores.shape == (len(k.heads), 12)
        assert (k.positions.diff(dim=1) > 0).all()
        assert k.positions[:, -3:].tolist() == [[k.seen - 3, k.seen - 2, k.seen - 1]] * len(k.heads)
    assert next(k.heads for k in kept if k.layer == 0) == (1, 3)


def test_the_prompt_can_be_protected() -> None:
    model = make_tiny_model("llama")
    for policy in (
        RandomEviction(budget=6, buffer=2, observation=2),
        H2O(budget=6, protect_prompt=True),
    ):
        with rlkv.compress(model, eviction=policy, record=True) as session:
            generate(model, prompt(), new=40)
        held = session.cache.held(1)
        assert held[..., :20].all()
        assert (held[..., 20:].sum(-1) <= 8).all()


def test_rows_decode_as_they_do_alone() -> None:
    model = make_tiny_model("qwen2")
    ids = prompt(3, 24)
    mask = (torch.arange(24) >= torch.tensor([[0], [7], [15]])).long()
    policy = RKV(ratio=0.3, extra=6, buffer=4, observation=3)
    with rlkv.compress(model, MIXED, eviction=policy):
        together = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, min_new_tokens=30, do_sample=False
        )
        for row, pad in enumerate((0, 7, 15)):
            alone = generate(model, ids[row : row + 1, pad:], new=30)
            assert torch.equal(alone[0], together[row, pad:])


def test_beams_and_another_turn() -> None:
    model = make_tiny_model("llama")
    policy = RKV(budget=12, buffer=4)
    with rlkv.compress(model, MIXED, eviction=policy) as session:
        assert generate(model, prompt(), num_beams=3).shape == (2, 60)
        first = generate(model, prompt(1), new=10)
        cache = session.cache
        more = torch.cat([first, prompt(1, 15)], dim=1)
        assert generate(model, more, new=5, past_key_values=cache).shape == (1, 50)
        assert cache.get_seq_length() == 49
    with (
        rlkv.compress(model, MIXED, eviction=RKV(budget=13, buffer=4)),
        pytest.raises(ValueError, match=r"past_key_values.*eviction"),
    ):
        generate(model, more, past_key_values=cache)


def test_a_chunked_prompt_cannot_be_protected() -> None:
    model = make_tiny_model("llama")
    with (
        rlkv.compress(model, eviction=RandomEviction(budget=12), prefill="local"),
        pytest.raises(ValueError, match="prefill_chunk_size"),
    ):
        generate(model, prompt(), prefill_chunk_size=8)
    with rlkv.compress(model, eviction=TOVA(budget=12), prefill="local") as session:
        generate(model, prompt(), new=5, prefill_chunk_size=8)
        assert session.cache.get_seq_length() == 24


@pytest.mark.parametrize("policy", ["rkv", RKV, 256])
def test_what_is_no_policy(policy) -> None:
    with (
        pytest.raises(ValueError, match=r"^eviction is"),
        rlkv.compress(make_tiny_model("llama"), eviction=policy),
    ):
        pass


def test_what_is_missing_or_too_much() -> None:
    model = make_tiny_model("llama")
    cases = [
        ({}, "gates and eviction"),
        ({"eviction": RKV(budget=12), "sparsity": 0.5}, "sparsity.*without gates"),
        ({"gates": MIXED, "sparsity": 0.5, "eviction": RKV(budget=12)}, "pass one of the two"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message), rlkv.compress(model, **arguments):
            pass
    with rlkv.compress(model, MIXED) as session:
        generate(model, prompt())
        assert session.cache.held(0).shape == (3, 4, 59)  # sinks and a window need no record
    with rlkv.compress(model, eviction=RKV(budget=12)) as session:
        generate(model, prompt())
        with pytest.raises(ValueError, match="record=True"):
            session.cache.held(0)


def gemma3() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=2,
    )
    return Gemma3ForCausalLM(config).eval()


def test_sliding_layers_are_left_alone() -> None:
    model = gemma3()
    want = generate(model, prompt(), new=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with rlkv.compress(model, eviction=RKV(budget=100)) as session:
            got = generate(model, prompt(), new=20)
            generate(model, prompt(), new=20)
    assert torch.equal(got, want)
    assert [
        str(w.message).split(" and ")[0] for w in caught if "not changed" in str(w.message)
    ] == ["layers 0, 2 have sliding windows"]
    with (
        pytest.warns(UserWarning, match="not changed"),
        rlkv.compress(model, eviction=TOVA(budget=10), record=True) as s,
    ):
        generate(model, prompt(), new=20)
    held = s.cache.held(0)
    assert (held[[1, 3]].sum(-1) == 10).all()
    assert (held[[0, 2]].sum(-1) == 7).all()  # the window counts the current token
    assert s.cache.nbytes() < s.cache.full_nbytes()
    assert session.allocation.full.tolist() == [[True] * 4, [False] * 4] * 2
    s.cache.reset()
    assert s.cache.get_seq_length() == 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with rlkv.compress(model, eviction=TOVA(budget=10)) as again:
            want = model(prompt(), past_key_values=again.new_cache()).logits
            cache = again.new_cache()
            model(prompt(2, 12), past_key_values=cache)
            cache.reset()
            assert torch.equal(model(prompt(), past_key_values=cache).logits, want)
    gates = HeadGates(torch.rand(4, 4))
    with (
        pytest.raises(ValueError, match=r"sliding windows.*HeadAllocation"),
        rlkv.compress(model, gates, 0.5),
    ):
        pass


def test_sliding_layers_through_the_engine() -> None:
    model = gemma3()
    tokenizer = SimpleNamespace(
        pad_token_id=0, eos_token_id=2, decode=lambda ids, **kwargs: " ".join(map(str, ids))
    )
    allocation = resolve_allocation(model, None)
    engine = InferenceEngine(model, tokenizer, allocation, eviction=TOVA(budget=10), record=True)
    with pytest.warns(UserWarning, match="not changed"):
        reply = engine.reply(prompt(1).tolist()[0], SamplingParams(max_new_tokens=10))
    assert (reply.cache.held(0)[[1, 3]].sum(-1) <= 10).all()


def test_a_model_without_rope_is_served_with_a_warning() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    ).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    want = generate(model, prompt(), new=20)
    with pytest.warns(UserWarning, match="gpt2"), rlkv.compress(model, eviction=RKV(budget=100)):
        got = generate(model, prompt(), new=20)
    assert torch.equal(got, want)
