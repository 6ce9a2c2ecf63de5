"""compress(...): what it gives, that it leaves nothing behind, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

import rlkv
from rlkv import HeadAllocation, HeadGates
from rlkv.cache import CacheSettings, HeadReallocationCache
from rlkv.eviction import RKV
from rlkv.models.shape import ModelShape
from tests.helpers.models import make_tiny_model

MIXED = HeadAllocation(
    torch.tensor(
        [[True, False, True, False], [False, False, False, False], [True, True, True, True]]
    )
)
ALL_FULL = HeadAllocation(torch.ones(3, 4, dtype=torch.bool))
GREEDY = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}


def prompt(rows: int = 1, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(3))


def make_gates(model: PreTrainedModel) -> HeadGates:
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    return HeadGates(alpha=alpha, model=ModelShape.from_config(model.config))


def state_of(model: PreTrainedModel) -> tuple:
    modules = {
        name: (set(vars(m)), len(m._forward_pre_hooks), m.training)
        for name, m in model.named_modules()
    }
    return (
        model.config._attn_implementation,
        modules,
        model.config.to_dict(),
        model.generation_config.to_dict(),
    )


def test_sparsity_zero_is_stock_generate_and_exit_restores_everything(
    tiny_model: PreTrainedModel,
) -> None:
    ids = prompt(3)
    mask = (torch.arange(12) >= torch.tensor([[0], [4], [9]])).long()
    stock = tiny_model.generate(ids, attention_mask=mask, **GREEDY)
    before = state_of(tiny_model)
    with rlkv.compress(tiny_model, make_gates(tiny_model), sparsity=0.0) as session:
        assert torch.equal(tiny_model.generate(ids, attention_mask=mask, **GREEDY), stock)
        assert (
            session.cache.nbytes() == session.cache.full_nbytes()
        )  # generation's length is known: no headroom
    assert state_of(tiny_model) == before
    assert torch.equal(tiny_model.generate(ids, attention_mask=mask, **GREEDY), stock)


@pytest.mark.parametrize("prefill", ["full", "local", "published"])
def test_generate_equals_a_step_by_step_loop(tiny_model: PreTrainedModel, prefill: str) -> None:
    with (
        rlkv.compress(tiny_model, MIXED, sink=2, window=4, prefill=prefill) as session,
        torch.no_grad(),
    ):
        generated = tiny_model.generate(prompt(), **GREEDY)
        first_cache = session.cache
        ids, tokens, cache = prompt(), [], None
        for _ in range(30):
            out = tiny_model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    assert generated[0, 12:].tolist() == tokens
    assert session.cache is cache
    assert first_cache is not cache


def test_a_forward_without_cache_still_goes_through_the_compressed_heads(
    tiny_model: PreTrainedModel,
) -> None:
    stock = tiny_model(prompt(length=30)).logits
    with (
        rlkv.compress(tiny_model, MIXED, sink=2, window=4, prefill="local") as session,
        torch.no_grad(),
    ):
        kept = tiny_model(prompt(length=30)).logits
        cache = session.cache
        unkept = tiny_model(prompt(length=30), use_cache=False).logits
        assert session.cache is cache
        by_keyword = tiny_model(
            inputs_embeds=tiny_model.get_input_embeddings()(prompt(length=30))
        ).logits
    assert torch.equal(kept, unkept)
    assert torch.equal(kept, by_keyword)
    assert (kept - stock).abs().max() > 0.01


def test_chat_turn_on_top_of_the_cache(tiny_model: PreTrainedModel) -> None:
    with (
        rlkv.compress(tiny_model, MIXED, sink=2, window=4, prefill="local") as session,
        torch.no_grad(),
    ):
        first = tiny_model.generate(prompt(), **GREEDY)
        talk = torch.cat([first, prompt(length=7)], dim=1)
        ones = torch.ones_like(talk)  # or generate takes a generated pad token for padding
        second = tiny_model.generate(
            talk, attention_mask=ones, past_key_values=session.cache, **GREEDY
        )
        held = session.cache.get_seq_length()
        again = tiny_model.generate(talk, attention_mask=ones, **GREEDY)
    assert held == talk.shape[1] + 29
    assert torch.equal(
        second, again
    )  # with prefill local a cached past and a prompt are masked alike


def test_sampling_with_several_sequences(tiny_model: PreTrainedModel) -> None:
    settings = {
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 10,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    stock = tiny_model.generate(prompt(2), **settings)
    torch.manual_seed(0)
    with rlkv.compress(tiny_model, ALL_FULL):
        assert torch.equal(tiny_model.generate(prompt(2), **settings), stock)


def test_gates_object_file_and_allocation_agree(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    gates = make_gates(model)
    gates.save(tmp_path / "gates.pt")
    allocation = HeadAllocation.from_gates(gates, 0.5)
    outputs = []
    for given, sparsity in (
        (gates, 0.5),
        (tmp_path / "gates.pt", 0.5),
        (str(tmp_path / "gates.pt"), 0.5),
    ):
        with rlkv.compress(model, given, sparsity, sink=2, window=4) as session:
            assert session.allocation == allocation
            outputs.append(model.generate(prompt(), **GREEDY))
            assert int(session.cache.full.sum()) == 6
            # 12 + 29 tokens: 6 full heads of 41, 6 of 6 entries; K and V of 16 floats each
            assert session.cache.nbytes() == 2 * 16 * 4 * (6 * 41 + 6 * 6)
    with rlkv.compress(model, allocation, sink=2, window=4):
        outputs.append(model.generate(prompt(), **GREEDY))
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_two_models_and_two_sizes_at_once() -> None:
    one, two = make_tiny_model("llama"), make_tiny_model("qwen3")

    def alone(model: PreTrainedModel, window: int) -> torch.Tensor:
        with rlkv.compress(model, MIXED, sink=2, window=window):
            return model.generate(prompt(), **GREEDY)

    want = alone(one, 3), alone(two, 9)
    with rlkv.compress(one, MIXED, sink=2, window=3), rlkv.compress(two, MIXED, sink=2, window=9):
        assert torch.equal(one.generate(prompt(), **GREEDY), want[0])
        assert torch.equal(two.generate(prompt(), **GREEDY), want[1])


def test_lora_adapter_on_the_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make_tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)
    ).eval()
    stock = model.generate(input_ids=prompt(), **GREEDY)
    with rlkv.compress(model, ALL_FULL) as session:
        assert torch.equal(model.generate(input_ids=prompt(), **GREEDY), stock)
        assert isinstance(session.cache, HeadReallocationCache)
    assert model.get_base_model().config._attn_implementation == "sdpa"


def test_exceptions_inside_restore_too() -> None:
    model = make_tiny_model("llama")
    before = state_of(model)
    with pytest.raises(RuntimeError, match="mine"), rlkv.compress(model, MIXED):
        raise RuntimeError("mine")
    assert state_of(model) == before
    with pytest.raises(ValueError, match="sink is -1"), rlkv.compress(model, MIXED, sink=-1):
        pass
    assert state_of(model) == before


def test_nested_use_is_refused_and_leaves_the_outer_one_alone() -> None:
    model = make_tiny_model("llama")
    with rlkv.compress(model, MIXED) as session:
        with pytest.raises(ValueError, match="compressed already"), rlkv.compress(model, ALL_FULL):
            pass
        model.generate(prompt(), **GREEDY)
        assert int(session.cache.full.sum()) == 6
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"past_key_values": DynamicCache()}, "DynamicCache"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_model": make_tiny_model("llama")}, "assisted generation"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"cache_implementation": "paged"}, "continuous batching"),
    ],
)
def test_what_would_bypass_the_cache_is_refused(arguments: dict, message: str) -> None:
    model = make_tiny_model("llama")
    with rlkv.compress(model, MIXED), pytest.raises(ValueError, match=message):
        model.generate(prompt(), **GREEDY, **arguments)


def test_caches_of_another_compression_are_refused() -> None:
    model = make_tiny_model("llama")
    with rlkv.compress(model, MIXED) as session:
        model.generate(prompt(), **GREEDY)
    with (
        rlkv.compress(model, MIXED, window=9),
        pytest.raises(ValueError, match=r"past_key_values.*allocation"),
    ):
        model.generate(prompt(length=50), past_key_values=session.cache, **GREEDY)
    with rlkv.compress(model, MIXED), pytest.raises(ValueError, match="DynamicCache"):
        model(prompt(), past_key_values=DynamicCache())


def test_gates_and_allocations_that_do_not_fit() -> None:
    model = make_tiny_model("llama")
    other = make_gates(make_tiny_model("qwen2"))
    cases = [
        (make_gates(model), None, "sparsity is missing"),
        (MIXED, 0.5, "pass one of the two"),
        (HeadAllocation(torch.ones(2, 4, dtype=torch.bool)), None, "2 layers x 4 KV heads"),
        (other, 0.5, "qwen2"),
        (make_gates(model), 1.5, "sparsity"),
        ("absent/gates.pt", 0.5, "absent"),
    ]
    for gates, sparsity, message in cases:
        with pytest.raises(ValueError, match=message), rlkv.compress(model, gates, sparsity):
            pass
    assert model.config._attn_implementation == "sdpa"


def test_sizes_are_those_of_the_gates_unless_given() -> None:
    model = make_tiny_model("llama")
    gates = make_gates(model)
    gates.deploy_sink, gates.deploy_window, gates.deploy_protect_prompt = 3, 9, True

    def settings(**given: Any) -> CacheSettings:
        with rlkv.compress(model, gates, sparsity=0.5, **given) as session:
            return session.settings

    assert settings() == CacheSettings(3, 9, protect_prompt=True)
    assert settings(sink=0, window=5, protect_prompt=False) == CacheSettings(0, 5)
    assert not settings(eviction=RKV(budget=64)).protect_prompt  # a policy has a field of its own
    with rlkv.compress(model, MIXED) as session:
        assert session.settings == CacheSettings(16, 64)


def test_models_that_cannot_be_served_are_refused() -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    mistral = MistralForCausalLM(
        MistralConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, sliding_window=4)
    ).eval()
    with (
        pytest.raises(ValueError, match="mistral"),
        rlkv.compress(mistral, MIXED),
    ):
        pass
    training = make_tiny_model("llama").train()
    with rlkv.compress(training, MIXED), pytest.raises(ValueError, match=r"model.eval\(\)"):
        training(prompt())
