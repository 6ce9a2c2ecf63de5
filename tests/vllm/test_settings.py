"""What the plugin is asked to do, what it refuses, and heads dealt to ranks."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm.settings import (
    REALLOCATION,
    ROLLOUT,
    ServingSettings,
    check_engine,
    deal_heads,
    parse_settings,
    prepare_engine,
    read_request,
    rounding,
)
from tests.helpers.engines import SINK, WINDOW, Served, engine, engine_config, make_served
from tests.helpers.models import make_tiny_model
from tests.helpers.paths import PUBLISHED_GATES

REQUEST: dict[str, Any] = {"gates": "gates.safetensors", "sparsity": 0.5}
RKV = {"name": "rkv", "budget": 64}


def test_configuration_goes_before_the_environment() -> None:
    environment = {"RLKV_GATES": "other", "RLKV_SPARSITY": "0.25"}
    assert read_request({"rlkv": REQUEST}, environment) == REQUEST
    assert read_request({}, environment) == {"gates": "other", "sparsity": 0.25}
    assert read_request({"other": 1}, {"RLKV_GATES": ""}) is None


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({"rlkv": "gates"}, {}, "must be a mapping"),
        ({}, {"RLKV_GATES": "gates"}, r"^RLKV_SPARSITY is"),
        ({}, {"RLKV_SPARSITY": "0.5"}, r"^RLKV_GATES is"),
        ({}, {"RLKV_GATES": "gates", "RLKV_SPARSITY": "half"}, r"^RLKV_SPARSITY .*half"),
    ],
)
def test_half_a_request_is_an_error(
    config: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_request(config, environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 1.5}, r"^rlkv: sparsity .*1\.5"),
        ({"sparsity": "0.5"}, r"^rlkv: sparsity .*'0\.5'"),
        ({"sparsity": None}, r"^rlkv: sparsity .*None"),
        ({"gates": ""}, r"^rlkv: gates\b"),
        ({"sink": -1}, r"^rlkv: sink\b.*-1"),
        ({"window": 0}, r"^rlkv: window\b.*0"),
        ({"scope": "head"}, r"^rlkv: scope\b.*'head'"),
        ({"prefill": "none"}, r"^rlkv: prefill\b.*'none'"),
        ({"prefill": "published"}, r"^rlkv: prefill\b.*'published'"),
        ({"prefill": "full", "eviction": RKV}, r"^rlkv: prefill\b.*eviction"),
        ({"sparsty": 1}, "'sparsty'"),
        ({"eviction": "rkv"}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"budget": 9}}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"name": "rkw"}}, "'rkw'"),
        ({"eviction": {"name": "rkv", "budgets": 9}}, "budgets"),
        ({"eviction": {"name": "rkv", "budget": 3}}, "budget is 3"),
        ({"eviction": {"name": "h2o", "budget": 64}}, "'h2o'"),
        ({"eviction": {"name": "rkv", "ratio": 0.3}}, "ratio"),
        ({"eviction": {**RKV, "protect_prompt": True}}, "protect_prompt"),
        ({"eviction": RKV, "sink": 4}, "sink, window and protect_prompt"),
        ({"eviction": RKV, "protect_prompt": True}, "sink, window and protect_prompt"),
        ({"protect_prompt": "yes"}, r"^rlkv: protect_prompt\b.*'yes'"),
        ({"one_launch": False}, "^rlkv: unknown setting 'one_launch': choose from"),
        ({"reference_prompt": 0}, r"^rlkv: reference_prompt\b.*0"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings({**REQUEST, **change})


@pytest.mark.parametrize("absent", ["gates", "sparsity"])
def test_missing_settings_are_named(absent: str) -> None:
    with pytest.raises(ValueError, match=rf"^rlkv: {absent}\b"):
        parse_settings({key: value for key, value in REQUEST.items() if key != absent})


def test_settings_are_read_back() -> None:
    settings = parse_settings({**REQUEST, "sink": 4, "scope": "layer"})
    assert parse_settings(settings.to_request()) == settings
    policy = make_policy("snapkv", budget=64, kernel=5)
    for eviction in ({"name": "snapkv", "budget": 64, "kernel": 5}, policy.describe()):
        evicting = parse_settings({**REQUEST, "eviction": eviction})
        assert parse_settings(evicting.to_request()).policy() == policy


def test_gates_that_ask_for_a_protected_prompt(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    gates = HeadGates(torch.rand(3, 4), deploy_protect_prompt=True)
    gates.save(tmp_path / "gates.pt")
    request = {"gates": str(tmp_path / "gates.pt"), "sparsity": 0.5}
    for asked, protects in ((None, True), (False, None), (True, True)):
        own = {"protect_prompt": asked, "reference_prompt": 90}
        resolved = parse_settings({**request, **own}).resolved(model.config)
        assert (resolved.sink, resolved.window, resolved.protect_prompt) == (16, 64, protects)
        assert resolved.reference(500) == (500, 90 if protects else 0)
        assert parse_settings(resolved.to_request()) == resolved
    eviction = {"name": "rkv", "budget": 64}
    evicting = parse_settings({**request, "eviction": eviction}).resolved(model.config)
    assert evicting.policy() == make_policy(**eviction)


# --- settings of the engine


TEXT = "model_config__hf_text_config"


def fake_engine(**changes: Any) -> Any:
    """The settings that are looked at, all supported; ``a__b`` sets ``config.a.b``."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            sliding_window=None,
            kv_sharing_fast_prefill=False,
            kv_offloading_size=None,
            enable_prefix_caching=True,
        ),
        model_config=SimpleNamespace(
            architecture="LlamaForCausalLM",
            hf_config=LlamaConfig(num_hidden_layers=1, num_attention_heads=4),
            hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=1),
            quantization=None,
            is_hybrid=False,
            get_total_num_kv_heads=lambda: 4,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        speculative_config=None,
        quant_config=None,
        lora_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel_config__tensor_parallel_size", 8, "tensor-parallel-size 8 and 4 KV heads"),
        ("parallel_config__pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config__decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config__prefill_context_parallel_size", 2, "context parallelism"),
        ("speculative_config", object(), "speculative decoding"),
        ("cache_config__cache_dtype", "fp8", "fp8"),
        ("quant_config", SimpleNamespace(get_name=lambda: "bitsandbytes"), "quantised weights"),
        ("load_config__load_format", "sharded_state", "load-format sharded_state"),
        ("lora_config", object(), "LoRA"),
        ("lora_config", SimpleNamespace(target_modules=["up_proj", "o_proj"]), "LoRA"),
        ("kv_transfer_config", object(), "KV connectors"),
        ("scheduler_config__disable_hybrid_kv_cache_manager", True, "disable-hybrid-kv-cache"),
        ("cache_config__sliding_window", 512, "sliding windows in all layers"),
        ("model_config__is_hybrid", True, "prefix caching of linear layers"),
        ("cache_config__kv_sharing_fast_prefill", True, "kv-sharing-fast-prefill"),
        ("cache_config__kv_offloading_size", 4.0, "offloading"),
        (f"{TEXT}__dual_chunk_attention_config", {"chunk_size": 8}, "dual chunk attention"),
    ],
)
def test_each_refusal_names_its_cause(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine(fake_engine(**{setting: value}))


@pytest.mark.parametrize("feature", [REALLOCATION, ROLLOUT])
def test_graphs_that_would_capture_work_of_the_host(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", value)
        assert check_engine(fake_engine(), feature) is None
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    eager = fake_engine(compilation_config__cudagraph_mode=SimpleNamespace(name="NONE"))
    assert check_engine(eager, feature) is None
    message = f"{feature} does not work with breakable.*VLLM_USE_BREAKABLE_CUDAGRAPH=0"
    with pytest.raises(ValueError, match=message):
        check_engine(fake_engine(), feature)


def test_rollouts_of_hybrids_are_refused() -> None:
    config = fake_engine(model_config__architecture="Gemma3ForCausalLM")
    assert check_engine(config) is None
    with pytest.raises(ValueError, match="does not work with Gemma3ForCausalLM"):
        check_engine(config, ROLLOUT)


def test_rollouts_run_one_engine_per_gpu() -> None:
    config = fake_engine(parallel_config__tensor_parallel_size=2)
    assert check_engine(config) is None
    with pytest.raises(ValueError, match="rollout does not work with tensor parallelism"):
        check_engine(config, ROLLOUT)


@pytest.mark.parametrize(
    ("architecture", "settings", "refused"),
    [
        ("GPT2LMHeadModel", {"rlkv": {"gates": "g", "sparsity": 0.5}}, True),
        ("GPT2LMHeadModel", {}, False),
        ("Qwen3ForCausalLM", {"rlkv": {"full": ["0110"]}}, False),
        # a rollout's engine, with variables of a server around it
        ("GPT2LMHeadModel", {"rlkv_mixed": {}, "rlkv": {"gates": "g", "sparsity": 0.5}}, False),
    ],
)
def test_other_architectures(architecture: str, settings: dict[str, Any], refused: bool) -> None:
    pytest.importorskip("vllm")
    config = fake_engine(model_config__architecture=architecture, additional_config=settings)
    with pytest.raises(ValueError, match=f"{architecture}") if refused else nullcontext():
        prepare_engine(config)


def test_the_engine_notes_in_the_environment_that_graphs_are_breakable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is where the check looks: a new version that decides elsewhere must be noticed."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig

    config = SimpleNamespace(
        _uses_breakable_cudagraph_by_default=lambda: True,
        compilation_config=SimpleNamespace(mode=None),
    )
    if not hasattr(VllmConfig, "_maybe_enable_breakable_cudagraph"):
        pytest.skip("this version has no breakable graphs")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "")
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    VllmConfig._maybe_enable_breakable_cudagraph(config)
    assert os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] == "1"


FULL = ["1100", "1100", "1100", "1000"]  # 7 heads
SINKS = {"sink": SINK, "window": WINDOW}
IN_FULL = {"prefill": "full"}


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "fp8"),
        ({"disable_hybrid_kv_cache_manager": True}, {}, "disable-hybrid-kv-cache-manager"),
        ({}, {"sparsity": 2}, "sparsity"),
        ({}, {"gates": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({}, {"full": FULL[:3], **SINKS}, "for .4, 4, 4. KV heads, layer by layer"),
        ({"tensor_parallel_size": 8}, {}, "--tensor-parallel-size 8 and 4 KV heads a layer"),
        ({"tensor_parallel_size": 2}, {"full": FULL, **SINKS}, "7 full heads are not spread"),
        ({"max_num_batched_tokens": 300}, IN_FULL, "300 .*1,024.* --max-num-batched-tokens"),
        ({"max_num_scheduled_tokens": 300}, IN_FULL, "300 .*1,024.* --max-num-scheduled-tokens"),
    ],
)
def test_the_engine_does_not_start(
    llama: Served, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    pytest.importorskip("vllm")
    request = {"rlkv": {**llama.request(0.5)["rlkv"], **changes}}
    with pytest.raises((ValueError, OSError), match=message):
        engine_config(llama, request, **options)


def test_other_models_do_not_start(llama: Served, tmp_path: Path) -> None:
    """Without the check they would be served with the full cache."""
    pytest.importorskip("vllm")
    from transformers import GPT2Config, GPT2LMHeadModel

    other = make_served(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="qwen3 with 4 layers"):
        engine_config(llama, other.request(0.5))
    sizes = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=1024)
    GPT2LMHeadModel(sizes).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel"):
        engine_config(replace(llama, path=tmp_path / "gpt2"), llama.request(0.5))


def test_the_settings_are_resolved_once(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the compilation key, and published by the process that resolved them."""
    pytest.importorskip("vllm")
    published: list[float] = []
    monkeypatch.setattr("rlkv.vllm.specs.publish", published.append)
    full = tuple("".join("01"[one] for one in row) for row in llama.allocation(0.5).full.tolist())
    resolved = {"rlkv": {"full": full, **SINKS}}
    engine_config(llama, resolved)
    assert not published
    monkeypatch.setenv("RLKV_GATES", str(llama.gates_path))
    monkeypatch.setenv("RLKV_SPARSITY", "0.5")
    found = engine_config(llama, None).additional_config["rlkv"]
    assert found["full"] == full
    assert "gates" not in found
    assert published == [0.5]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_unasked_a_pooling_model_keeps_its_pooler(llama: Served, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from tests.helpers.models import build_tokenizer

    shutil.copytree(llama.path, tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"runner": "pooling", "skip_tokenizer_init": False, "block_size": 32}
    prompt = [{"prompt_token_ids": [5, 6, 7]}]
    with engine(replace(llama, path=tmp_path / "model"), None, **settings) as llm:
        (output,) = llm.encode(prompt, pooling_task="embed", use_tqdm=False)
    assert output.outputs.data.shape == (256,)


# --- ranks of tensor parallelism

MODELS = ("Llama-3.1-8B-R1", "Qwen-2.5-7B-R1", "Qwen-3-4B-Thinking")
CASES = [(model, ranks) for model in MODELS for ranks in (1, 2, 4)]


@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize(("model", "ranks"), CASES, ids=str)
def test_ranks_have_equal_shares(model: str, sparsity: float, ranks: int) -> None:
    gates = HeadGates.load(PUBLISHED_GATES / "rlkv" / model)
    layers, heads = gates.alpha.shape
    asked = HeadAllocation.from_gates(gates, sparsity)
    full = asked.rounded_up(gates, ranks).full
    dealt = deal_heads(full, ranks)
    assert dealt.shape == (ranks, layers, heads // ranks)
    for layer in range(layers):
        assert sorted(dealt[:, layer].flatten().tolist()) == list(range(heads))
    kinds = torch.stack([full.gather(1, own) for own in dealt])
    assert kinds.sum((1, 2)).tolist() == [int(full.sum()) // ranks] * ranks
    # ranks wait for each other in every layer
    assert int((kinds.sum(2).amax(0) - kinds.sum(2).amin(0)).max()) <= 1
    added = [head for head in compression_order(gates)[::-1] if full[head] and not asked.full[head]]
    assert len(added) == -asked.num_full % ranks
    assert not (asked.full & ~full).any()
    left = [float(gates.alpha[head]) for head in compression_order(gates) if not full[head]]
    assert all(float(gates.alpha[head]) >= max(left, default=0.0) for head in added)


def test_an_allocation_that_is_not_even_is_refused() -> None:
    with pytest.raises(ValueError, match="7 full heads"):
        deal_heads(torch.arange(16).view(4, 4) < 7, 2)


def test_what_equal_shares_cost() -> None:
    request = {"gates": "g", "sparsity": 0.55}
    settings = ServingSettings(full=("1100", "1100", "1100", "1100"), sink=16, window=64)
    sentence = (
        "sparsity 0.5000 instead of 0.55: 8 of 16 KV heads are full, a multiple of the 2 ranks"
    )
    assert rounding(request, settings, 2) == sentence
    assert rounding(request, settings, 1) is None
    assert rounding({"full": settings.full}, settings, 2) is None
    assert rounding({**request, "sparsity": 0.5}, settings, 2) is None
