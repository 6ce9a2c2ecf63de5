"""compress(...): what it gives, that it leaves nothing behind, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel

import rlkv
from rlkv import HeadAllocation
from rlkv.cache import CacheSettings, HeadReallocationCache
from rlkv.eviction import H2O, RKV, TOVA
from rlkv.inference.engine import InferenceEngine
from rlkv.models.layout import Layout
from rlkv.models.loading import attention_of
from rlkv.rollout.base import SamplingParams
from tests.helpers.cached_logits import MIXED as HEADS
from tests.helpers.families import make_family
from tests.helpers.gates import random_gates
from tests.helpers.models import build_tokenizer, dispatched, make_tiny_model

MIXED = HeadAllocation(HEADS)
ALL_FULL = HeadAllocation(torch.ones_like(HEADS))
PROTECTED = {"sink": 2, "window": 4, "protect_prompt": True}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
STARTS = torch.tensor([[0], [4], [9]])
MASK = (torch.arange(12) >= STARTS).long()
ENTRY = 2 * 16 * 4  # bytes of key and value of one token of one head: 2 tensors of 16 float32


def prompt(rows: int = 1, length: int = 12, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    modules = {}
    for name, module in model.named_modules():
        modules[name] = (set(vars(module)), len(module._forward_pre_hooks), module.training)
    configs = (model.config.to_dict(), model.generation_config.to_dict())
    return (model.config._attn_implementation, modules, *configs)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_tiny_model("llama")


# --- equalities


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_models_that_accelerate_dispatched_are_served(
    llama: PreTrainedModel, is_offloaded: bool, tmp_path: Path
) -> None:
    given = {"input_ids": prompt(3), "attention_mask": MASK, **GREEDY}
    texts = []
    for model in (llama, dispatched(llama, tmp_path if is_offloaded else None)):
        with rlkv.compress(model, MIXED, sink=2, window=4):
            texts.append(model.generate(**given))
    assert torch.equal(*texts)


@pytest.mark.parametrize("protect_prompt", [False, True])
def test_sparsity_zero_is_stock_generate_and_exit_restores_everything(
    tiny_model: PreTrainedModel, protect_prompt: bool
) -> None:
    ids = prompt(3)
    stock = tiny_model.generate(ids, attention_mask=MASK, **GREEDY)
    before = state_of(tiny_model)
    gates = random_gates(tiny_model)
    with rlkv.compress(tiny_model, gates, sparsity=0.0, protect_prompt=protect_prompt) as session:
        assert torch.equal(tiny_model.generate(ids, attention_mask=MASK, **GREEDY), stock)
        # generation's length is known: no headroom
        assert session.cache.nbytes() == session.cache.full_nbytes()
    assert state_of(tiny_model) == before


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"sink": 2, "window": 4}),
        ("qwen2", {"sink": 2, "window": 4, "prefill": "local"}),
        ("qwen3", {"sink": 2, "window": 4, "prefill": "published"}),
        ("qwen3", {**PROTECTED}),
        ("llama", {**PROTECTED, "prefill": "local"}),
        ("qwen2", {"eviction": RKV(ratio=0.3, extra=6, buffer=4, observation=3)}),
    ],
)
def test_rows_of_a_padded_batch_decode_as_alone_and_step_by_step(
    kind: str, options: dict[str, Any]
) -> None:
    model = make_tiny_model(kind)
    ids = prompt(3)
    with rlkv.compress(model, MIXED, **options) as session, torch.no_grad():
        batch = model.generate(ids, attention_mask=MASK, **GREEDY)
        for row, start in enumerate(STARTS[:, 0].tolist()):
            alone = model.generate(ids[row : row + 1, start:], **GREEDY)
            assert torch.equal(alone[0, 12 - start :], batch[row, 12:])
        generated = session.cache
        step = ids[:1]
        cache = None
        for token in batch[0, 12:].tolist():
            out = model(step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            step = out.logits[:, -1:].argmax(-1)
            assert int(step) == token
    assert session.cache is cache
    assert cache is not generated


def test_beams_of_a_batch_equal_those_of_single_prompts(llama: PreTrainedModel) -> None:
    ids = prompt(3)
    beams = {**GREEDY, "num_beams": 3, "max_new_tokens": 12}
    with rlkv.compress(llama, MIXED, **PROTECTED):
        batch = llama.generate(ids, attention_mask=MASK, **beams)
        for row, start in enumerate(STARTS[:, 0].tolist()):
            alone = llama.generate(ids[row : row + 1, start:], **beams)
            assert torch.equal(alone[0, 12 - start :], batch[row, 12:])


def test_a_further_turn_continues_the_cache(llama: PreTrainedModel) -> None:
    ones = torch.ones(1, 49, dtype=torch.long)  # or a generated pad token is taken for padding
    turn = {**GREEDY, "attention_mask": ones}
    with rlkv.compress(llama, MIXED, sink=2, window=4, prefill="local") as session:
        talk = torch.cat([llama.generate(prompt(), **GREEDY), prompt(length=7)], dim=1)
        second = llama.generate(talk, past_key_values=session.cache, **turn)
        assert session.cache.get_seq_length() == 49 + 29
        # with prefill local a cached past and a prompt are masked alike
        assert torch.equal(llama.generate(talk, **turn), second)
    with rlkv.compress(llama, MIXED, **PROTECTED) as session:
        talk = torch.cat([llama.generate(prompt(), **GREEDY), prompt(length=7)], dim=1)
        llama.generate(talk, past_key_values=session.cache, **turn)
        held = session.cache.held(0)[~HEADS]
        assert held[:, :12].all()
        assert (held[:, 12:].sum(-1) == 4).all()


def test_a_forward_without_cache_still_goes_through_the_compressed_heads(
    llama: PreTrainedModel,
) -> None:
    ids = prompt(length=30)
    with torch.no_grad():
        stock = llama(ids).logits
        with rlkv.compress(llama, MIXED, sink=2, window=4, prefill="local") as session:
            kept = llama(ids).logits
            cache = session.cache
            assert torch.equal(llama(ids, use_cache=False).logits, kept)
            assert session.cache is cache
            embedded = llama.get_input_embeddings()(ids)
            assert torch.equal(llama(inputs_embeds=embedded).logits, kept)
    assert (kept - stock).abs().max() > 0.01


def test_mixed_attention_with_binary_gates_equals_the_cache(tiny_model: PreTrainedModel) -> None:
    """The chain from training to serving: gates of 0 and 1, and the cache with those heads full."""
    peft = pytest.importorskip("peft")
    from rlkv.attention.head_gate import HeadGateConfig, set_gates

    ids = prompt(2, 40)
    mask = (torch.arange(40) >= torch.tensor([[0], [6]])).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    gated = peft.get_peft_model(tiny_model, HeadGateConfig(sink=3, window=5)).eval()
    set_gates(gated, HEADS.float())
    with torch.no_grad():
        trained = gated(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    with pytest.raises(ValueError, match="gates attached"), rlkv.compress(gated, MIXED):
        pass
    base = gated.unload()
    served = []
    cache = None
    with rlkv.compress(base, MIXED, sink=3, window=5, prefill="local"), torch.no_grad():
        for begin, end in [(0, 20), *[(column, column + 1) for column in range(20, 40)]]:
            out = base(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            served.append(out.logits)
    difference = (torch.cat(served, dim=1) - trained).abs() * mask[..., None]
    assert difference.max() < 2e-5  # logits up to 4, summed in another order


# --- what a session has


def test_gates_object_file_and_allocation_agree(tmp_path: Path, llama: PreTrainedModel) -> None:
    gates = random_gates(llama)
    gates.save(tmp_path / "gates.pt")
    allocation = HeadAllocation.from_gates(gates, 0.5)
    outputs = []
    for given, sparsity in ((gates, 0.5), (str(tmp_path / "gates.pt"), 0.5), (allocation, None)):
        with rlkv.compress(llama, given, sparsity, sink=2, window=4) as session:
            assert session.allocation == allocation
            outputs.append(llama.generate(prompt(), **GREEDY))
            # 12 + 29 tokens: 6 full heads of 41, 6 of 6 entries
            assert session.cache.nbytes() == ENTRY * (6 * 41 + 6 * 6)
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_lora_adapter_on_the_model() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = peft.get_peft_model(make_tiny_model("llama"), lora).eval()
    stock = model.generate(input_ids=prompt(), **GREEDY)
    with rlkv.compress(model, ALL_FULL) as session:
        assert torch.equal(model.generate(input_ids=prompt(), **GREEDY), stock)
        assert isinstance(session.cache, HeadReallocationCache)
    assert model.get_base_model().config._attn_implementation == "sdpa"


def test_prefix_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make_tiny_model("llama"), prefix).eval()
    message = "is a DynamicCache.*, where it is prefix tuning of PEFT that passes it"
    with rlkv.compress(model, MIXED):
        with pytest.raises(ValueError, match=message):
            model.generate(input_ids=prompt(), **GREEDY)
        with model.disable_adapter():
            model.generate(input_ids=prompt(), **GREEDY)


def test_bytes_count_buffers_and_observed_queries(llama: PreTrainedModel) -> None:
    policy = RKV(budget=12, buffer=4, observation=8)
    with rlkv.compress(llama, eviction=policy) as session:
        llama.generate(prompt(2, 20), **GREEDY)
        assert not session.allocation.full.any()
    cache = session.cache
    held = int(cache.state.row_counts.held[0])
    assert 12 <= held < 16
    queries = 2 * 12 * 2 * 8 * 16 * 4  # rows, KV heads, queries of each, tokens, elements, bytes
    assert cache.used_nbytes() == 2 * 12 * held * ENTRY + queries
    assert cache.nbytes() == 2 * 12 * (12 + 4) * ENTRY + queries
    assert cache.full_nbytes() == 2 * 12 * 49 * ENTRY
    with rlkv.compress(llama, eviction=H2O(budget=12)) as session:
        llama.generate(prompt(2, 20), **GREEDY)
    assert session.cache.nbytes() == 2 * 12 * 13 * (ENTRY + 4)  # with accumulated scores
    assert session.cache.used_nbytes() == 2 * 12 * 12 * (ENTRY + 4)


def test_record_lists_every_compaction(llama: PreTrainedModel) -> None:
    policy = RKV(budget=12, buffer=5, observation=3)
    with rlkv.compress(llama, MIXED, eviction=policy, record=True) as session:
        llama.generate(prompt(2, 20), **GREEDY)
        assert session.cache.held(0)[HEADS].all()
    found = {(kept.layer, kept.row, kept.seen) for kept in session.cache.kept}
    # the prompt of 20 is compacted at once, then every 5 of the 29 tokens that were fed
    for layer in (0, 1):
        for row in (0, 1):
            assert {seen for at, of, seen in found if (at, of) == (layer, row)} == set(
                range(20, 50, 5)
            )
    for kept in session.cache.kept:
        assert kept.positions.shape == kept.scores.shape == (len(kept.heads), 12)
        assert (kept.positions.diff(dim=1) > 0).all()
        assert (kept.positions[:, -3:] == torch.arange(kept.seen - 3, kept.seen)).all()
        assert kept.heads == ((1, 3) if kept.layer == 0 else (0, 1, 2, 3))


def test_sizes_are_those_of_the_gates_unless_given(llama: PreTrainedModel) -> None:
    gates = random_gates(llama)
    gates.deploy_sink = 3
    gates.deploy_window = 9
    gates.deploy_protect_prompt = True

    def settings(**given: Any) -> CacheSettings:
        with rlkv.compress(llama, gates, sparsity=0.5, **given) as session:
            return session.settings

    assert settings() == CacheSettings(3, 9, protect_prompt=True)
    assert settings(sink=0, window=5, protect_prompt=False) == CacheSettings(0, 5)
    assert not settings(eviction=RKV(budget=64)).protect_prompt  # a policy has a field of its own
    with rlkv.compress(llama, MIXED) as session:
        assert session.settings == CacheSettings(16, 64)


# --- models with other layers


@pytest.mark.filterwarnings("ignore:.*not changed")
def test_sliding_layers_are_left_alone() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_tiny_model("gemma3", num_hidden_layers=4, sliding_window=8, layer_types=kinds)
    ids = prompt(2, 20)
    stock = model.generate(ids, **GREEDY)
    with rlkv.compress(model, eviction=RKV(budget=100)) as session:
        assert torch.equal(model.generate(ids, **GREEDY), stock)
    assert session.allocation.full.tolist() == [[True] * 4, [False] * 4] * 2
    assert session.allocation.sparsity == 1
    nowhere = HeadAllocation(torch.zeros(4, 4) > 0)
    with (
        pytest.warns(UserWarning, match="layers 0, 2 have no full attention of their own"),
        rlkv.compress(model, nowhere) as session,
    ):
        assert session.allocation == HeadAllocation(session.allocation.full, (0, 4, 0, 4))
    with rlkv.compress(model, eviction=TOVA(budget=10), record=True) as session, torch.no_grad():
        model.generate(ids, **GREEDY)
        cache = session.cache
        assert (cache.held(0)[[1, 3]].sum(-1) == 10).all()
        assert (cache.held(0)[[0, 2]].sum(-1) == 7).all()  # the window counts the current token
        assert cache.nbytes() < cache.full_nbytes()
        expected = model(ids, past_key_values=session.new_cache()).logits
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
    elsewhere = HeadAllocation(torch.ones(4, 4) > 0, (4, 0, 4, 0))
    with (
        pytest.raises(ValueError, match=r"for layers 0, 2 \(4 KV heads\), but .* in 1, 3 \("),
        rlkv.compress(model, elsewhere),
    ):
        pass


def test_a_model_without_rope_is_served_with_a_warning() -> None:
    model = make_family("gpt2", vocab_size=128, n_positions=128)
    stock = model.generate(prompt(), **GREEDY)
    with pytest.warns(UserWarning, match="gpt2"), rlkv.compress(model, eviction=RKV(budget=100)):
        assert torch.equal(model.generate(prompt(), **GREEDY), stock)


# --- refusals: the model is as it was

PLAIN: dict[str, Any] = {"gates": MIXED}
BY_RKV = {"gates": MIXED, "eviction": RKV(budget=12)}
NONE_FULL = HeadAllocation(torch.zeros(3, 4, dtype=torch.bool))
SHORT_GATES = HeadAllocation(torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "gates and eviction are both missing"),
        ({"gates": random_gates(make_tiny_model("llama"))}, "sparsity is missing"),
        ({"gates": random_gates(make_tiny_model("qwen2")), "sparsity": 0.5}, "qwen2"),
        ({"gates": random_gates(make_tiny_model("llama")), "sparsity": 1.5}, "sparsity"),
        ({"gates": SHORT_GATES}, "2 layers x 4 KV heads"),
        ({"gates": torch.ones(3, 4), "sparsity": 0.5}, r"gates is a Tensor: .* HeadGates\(alpha\)"),
        ({**BY_RKV, "sparsity": 0.5}, "pass one of the two"),
        ({"eviction": RKV(budget=12), "sparsity": 0.5}, "sparsity.*without gates"),
        ({**BY_RKV, "protect_prompt": True}, "protect_prompt.*rkv"),
        ({**BY_RKV, "sink": 2, "window": 64}, "sink and window cannot be given with .* rkv"),
        ({**BY_RKV, "sink": 0}, "sink cannot be given with .* rkv"),
        ({**PLAIN, "scope": "layer"}, "scope is 'layer' without a gates file"),
        ({"gates": "", "sparsity": 0.5}, "the name of the gates is empty"),
        ({"eviction": RKV(budget=12), "evict_from": "full"}, "evict_from='full' needs gates"),
        ({**BY_RKV, "gates": NONE_FULL, "evict_from": "full"}, "but none is full"),
        ({**PLAIN, "window": 600}, "window is 600, but the model has 512 positions"),
        ({**PLAIN, "eviction": "rkv", "sink": 2}, "^eviction is 'rkv', which is not a policy"),
    ],
)
def test_what_does_not_fit(llama: PreTrainedModel, arguments: Any, message: str) -> None:
    before = state_of(llama)
    with pytest.raises(ValueError, match=message), rlkv.compress(llama, **arguments):
        pass
    assert state_of(llama) == before


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (PLAIN, {"cache_implementation": "static"}, "cache_implementation='static'"),
        (PLAIN, {"cache_implementation": "paged"}, "continuous batching"),
        (PLAIN, {"past_key_values": DynamicCache()}, "DynamicCache"),
        (PLAIN, {"use_cache": False}, "use_cache=False"),
        (PLAIN, {"prompt_lookup_num_tokens": 3}, "assisted generation"),
        (PLAIN, {"assistant_model": make_tiny_model("llama")}, "assisted generation"),
        (PLAIN, {"guidance_scale": 1.5}, "guidance_scale reads a second text"),
        ({**PLAIN, "prefill": "local"}, {"prefill_chunk_size": 4}, "prefill_chunk_size"),
    ],
)
def test_what_would_bypass_the_cache_is_refused(
    llama: PreTrainedModel, options: Any, arguments: Any, message: str
) -> None:
    with rlkv.compress(llama, **options), pytest.raises(ValueError, match=message):
        llama.generate(prompt(), **GREEDY, **arguments)


def test_turns_that_do_not_go_on_with_the_text(llama: PreTrainedModel) -> None:
    text = prompt(rows=2)
    with rlkv.compress(llama, MIXED) as session:
        text = llama.generate(text, **GREEDY)
        for ids, message in (
            (text[:, 40:], "no new tokens: give generate"),  # the new ones alone
            (text[:1].repeat(4, 1), "holds 2 rows but the call has 4"),
        ):
            with pytest.raises(ValueError, match=message):
                llama.generate(ids, past_key_values=session.cache, **GREEDY)


def test_a_cache_of_inference_mode_is_not_written_outside(llama: PreTrainedModel) -> None:
    text = prompt()
    with rlkv.compress(llama, MIXED) as session:
        with torch.inference_mode():
            llama(text, past_key_values=session.new_cache())
            inside = llama.generate(text, **GREEDY)
        cache = session.cache
        with pytest.raises(ValueError, match=r"begun under torch\.inference_mode"):
            llama.generate(inside, past_key_values=cache, **GREEDY)
        with torch.inference_mode():
            assert len(llama.generate(inside, past_key_values=cache, **GREEDY)[0]) > len(inside[0])


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
def test_a_hybrid_does_not_go_on_after_an_error(family: str) -> None:
    """Its linear and sliding layers have read what the first full one refuses."""
    model = make_family(family)
    none_full = HeadAllocation(torch.zeros(len(Layout.from_config(model.config).layers), 2) > 0)
    ids = prompt(rows=2) % 60
    mask = torch.ones(2, 14, dtype=torch.long)
    with rlkv.compress(model, none_full) as session, torch.no_grad():
        model(ids)
        cache = copy.deepcopy(session.cache)
        expected = model(ids[:, :2], attention_mask=mask, past_key_values=cache).logits
        mask[1, 12] = 0
        with pytest.raises(ValueError, match="left padding only"):
            model(ids[:, :2], attention_mask=mask, past_key_values=session.cache)
        mask[1, 12] = 1
        with pytest.raises(ValueError, match="ended in an error, and layers without full"):
            model(ids[:, :2], attention_mask=mask, past_key_values=session.cache)
        session.cache.reset()
        model(ids, past_key_values=session.cache)
        again = model(ids[:, :2], attention_mask=mask, past_key_values=session.cache).logits
    assert torch.equal(again, expected)


def test_a_branch_of_a_text_under_a_policy_with_tensors(llama: PreTrainedModel) -> None:
    @dataclass(frozen=True)
    class Weighted(TOVA):
        weights: torch.Tensor = field(default_factory=lambda: torch.ones(4))

    with rlkv.compress(llama, MIXED, eviction=Weighted(budget=6)) as session, torch.no_grad():
        llama(prompt())
        branch = copy.deepcopy(session.cache)
        expected = llama(prompt()[:, :1], past_key_values=session.cache).logits
        assert torch.equal(llama(prompt()[:, :1], past_key_values=branch).logits, expected)


def test_a_call_has_one_cache_by_either_name(llama: PreTrainedModel) -> None:
    ids = prompt()
    with rlkv.compress(llama, MIXED) as session, torch.no_grad():
        cache = session.new_cache()
        expected = llama(ids, past_key_values=session.new_cache()).logits
        assert torch.equal(llama(ids, cache=cache).logits, expected)
        assert cache.get_seq_length() == ids.shape[1]
        with pytest.raises(ValueError, match="are two caches, and a call has one"):
            llama.model(ids, past_key_values=session.new_cache(), cache=cache)


def test_caches_of_another_compression_are_refused(llama: PreTrainedModel) -> None:
    before = state_of(llama)
    with rlkv.compress(llama, MIXED) as session:
        llama.generate(prompt(), **GREEDY)
        with pytest.raises(ValueError, match="compressed already"), rlkv.compress(llama, ALL_FULL):
            pass
        with pytest.raises(ValueError, match="DynamicCache"):
            llama(prompt(), past_key_values=DynamicCache())
    for options in ({"window": 9}, {"protect_prompt": True}, {"eviction": RKV(budget=12)}):
        with (
            rlkv.compress(llama, MIXED, **options),
            pytest.raises(ValueError, match=r"comes from a compress.*allocation.*protect_prompt"),
        ):
            llama.generate(prompt(length=50), past_key_values=session.cache, **GREEDY)
    with pytest.raises(RuntimeError, match="mine"), rlkv.compress(llama, MIXED):
        raise RuntimeError("mine")
    assert state_of(llama) == before


def test_parts_of_a_model_keep_their_attention() -> None:
    model = make_family("gemma3")
    own = {"": "sdpa", "vision_config": "sdpa", "text_config": "eager"}
    model.set_attn_implementation(own)
    with rlkv.compress(model, eviction=TOVA(budget=8)):
        assert attention_of(model)["text_config"] != "eager"
    assert attention_of(model) == own
    other = make_family("dbrx")  # parts without a module
    with rlkv.compress(other, eviction=TOVA(budget=8)):
        pass
    assert set(attention_of(other).values()) == {"sdpa"}


def test_streams_that_end_across_a_compression(llama: PreTrainedModel) -> None:
    llama.set_attn_implementation("sdpa")
    engine = InferenceEngine(llama, build_tokenizer(), MIXED, CacheSettings(1, 2), batch_size=1)
    stream = engine.stream(["a = 1", "b = 2"], SamplingParams(6), full=True)
    next(stream)
    with pytest.raises(ValueError, match="stream with the full cache"), rlkv.compress(llama, MIXED):
        pass
    stream.close()
    assert attention_of(llama) == {"": "sdpa"}


def test_planned_lengths_need_a_policy_that_counts_them(llama: PreTrainedModel) -> None:
    own = RKV(ratio=0.3, buffer=6, observation=3, variant="rlkv_tables", compacted=30, kernel=3)
    with (
        rlkv.compress(llama, eviction=own) as session,
        pytest.raises(ValueError, match=r"rlkv_tables.*counts the tokens that were read"),
    ):
        session.new_cache(planned=torch.tensor([45]))


@pytest.mark.parametrize("model", ["tiny", (make_tiny_model("llama"), None), torch.nn.Linear(2, 2)])
def test_what_is_not_a_model(model: Any) -> None:
    sentence = f"the model is a {type(model).__name__}: pass a transformers model"
    with pytest.raises(ValueError, match=sentence), rlkv.compress(model, MIXED):
        pass
    with pytest.raises(ValueError, match=sentence):
        rlkv.generate_lossless(model, prompt(), MIXED)


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.20"), reason="mended there")
def test_generate_of_phi3_drops_its_cache() -> None:
    model = make_tiny_model("phi3", original_max_position_embeddings=32)
    expected = model.generate(prompt(length=28), do_sample=False, max_new_tokens=5)
    long = model.generate(prompt(length=40), do_sample=False, max_new_tokens=5)
    with rlkv.compress(model, ALL_FULL) as session:
        with pytest.raises(ValueError, match=r"drops its cache after 32 tokens .* may have 34"):
            model.generate(prompt(length=28), do_sample=False, max_new_tokens=6)
        found = model.generate(prompt(length=28), do_sample=False, max_new_tokens=5)
        assert torch.equal(found, expected)
        again = {"past_key_values": session.cache, "max_new_tokens": 5}
        with pytest.raises(ValueError, match="drops its cache after 32 tokens"):
            model.generate(prompt(length=40), do_sample=False, **again)
        # a prompt beyond it is read at once
        found = model.generate(prompt(length=40), do_sample=False, max_new_tokens=5)
        assert torch.equal(found, long)


def test_other_models_with_the_field_of_phi3_keep_their_cache() -> None:
    """Falcon-H1 prepares its inputs itself too, and leaves the cache alone."""
    model = make_family("falcon_h1")
    model.config.original_max_position_embeddings = 32
    ids = torch.randint(3, 60, (1, 28), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, **GREEDY)
    with rlkv.compress(model, HeadAllocation(torch.ones(2, 2) > 0)):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert expected.shape[1] > 33


def test_a_cache_is_continued_inside_alone(llama: PreTrainedModel) -> None:
    """Outside the model is not at fault, and a later call inside goes on."""
    more = prompt(length=3)
    with rlkv.compress(llama, MIXED) as session, torch.no_grad():
        llama(prompt())
    cache = session.cache
    before = copy.deepcopy(cache)
    outside = r"^a cache of compress\(\.\.\.\) is continued only inside it"
    with pytest.raises(ValueError, match=outside), torch.no_grad():
        llama(more, past_key_values=cache)
    with rlkv.compress(llama, MIXED), torch.no_grad():
        found = llama(more, past_key_values=cache).logits
        assert torch.equal(found, llama(more, past_key_values=before).logits)


def test_a_copy_made_inside_is_refused(llama: PreTrainedModel) -> None:
    with rlkv.compress(llama, MIXED):
        inside = copy.deepcopy(llama)
        with pytest.raises(ValueError, match=r"copy that was made inside compress"):
            inside(prompt())
    with pytest.raises(ValueError, match=r"copy that was made inside compress"):
        inside.generate(prompt(), **GREEDY)
    assert torch.equal(llama(prompt()).logits, copy.deepcopy(llama)(prompt()).logits)


def test_replicas_of_data_parallel_are_compressed(llama: PreTrainedModel) -> None:
    with rlkv.compress(llama, MIXED), torch.no_grad():
        expected = llama(prompt()).logits
        replica: Any = llama._replicate_for_data_parallel()  # as on each of several GPUs
        replica.model = llama.model._replicate_for_data_parallel()
        assert replica.model._is_replica
        assert torch.equal(replica(prompt()).logits, expected)


def test_a_model_in_training_is_refused() -> None:
    training = make_tiny_model("llama").train()
    with rlkv.compress(training, MIXED), pytest.raises(ValueError, match=r"model.eval\(\)"):
        training(prompt())
