"""What is refused at start, each by its name; and a plugin that is not asked for, which is
inactive.
"""

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

from rlkv.vllm.settings import check_engine, prepare_engine
from tests.helpers.engines import Served, engine, generate, make_served, need_vllm, random_prompts
from tests.helpers.models import build_tokenizer

need_vllm()

from vllm.config import CUDAGraphMode, VllmConfig


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
            hf_config=None,
            hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=1),
            quantization=None,
            get_total_num_kv_heads=lambda: 4,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
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


def test_what_is_supported_passes() -> None:
    assert check_engine(fake_engine()) is None


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
        (
            "scheduler_config__disable_hybrid_kv_cache_manager",
            True,
            "disable-hybrid-kv-cache-manager",
        ),
        ("cache_config__sliding_window", 512, "sliding-window layers"),
        ("cache_config__kv_sharing_fast_prefill", True, "kv-sharing-fast-prefill"),
        ("cache_config__kv_offloading_size", 4.0, "offloading"),
        (
            "model_config__hf_text_config",
            SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
            "sliding-window layers",
        ),
        (
            "model_config__hf_text_config",
            SimpleNamespace(model_type="qwen2", dual_chunk_attention_config={"chunk_size": 8}),
            "dual chunk attention",
        ),
    ],
)
def test_each_refusal_names_its_cause(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine(fake_engine(**{setting: value}))


@pytest.mark.parametrize("feature", ["head reallocation", "a mixed-attention rollout"])
def test_graphs_that_would_capture_work_of_the_host(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", value)
        assert check_engine(fake_engine(), feature) is None
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert (
        check_engine(fake_engine(compilation_config__cudagraph_mode=CUDAGraphMode.NONE), feature)
        is None
    )
    with pytest.raises(
        ValueError, match=f"{feature} does not work with breakable.*VLLM_USE_BREAKABLE_CUDAGRAPH=0"
    ):
        check_engine(fake_engine(), feature)


def test_the_engine_notes_in_the_environment_that_graphs_are_breakable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is where the check looks: a new version that decides elsewhere must be noticed."""
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


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("sliding_window", 64, "a sliding window"),
        ("kv_sharing_target_layer_name", "layers.0", "keys and values of another layer"),
        ("attn_type", "encoder_only", "attention in both directions"),
        ("num_kv_heads", 2, "another number or size of heads"),
        ("impl", SimpleNamespace(scale=1.0, logits_soft_cap=30.0), "soft-capped logits"),
        ("impl", SimpleNamespace(scale=1.0, sinks=torch.ones(4)), "learned sinks"),
        ("impl", SimpleNamespace(scale=1.0, alibi_slopes=torch.ones(4)), "ALiBi"),
        ("impl", SimpleNamespace(scale=0.5), "another scale"),
    ],
)
def test_layers_with_more_than_plain_attention(attribute: str, value: Any, message: str) -> None:
    from rlkv.vllm.reallocation import check_layers

    plain = {"sliding_window": None, "kv_sharing_target_layer_name": None, "attn_type": "decoder"}
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_size": 32, "impl": SimpleNamespace(scale=1.0)}
    layers = [
        SimpleNamespace(layer_name=f"layers.{number}.attn", **plain, **heads) for number in range(3)
    ]
    assert check_layers(layers) is None
    setattr(layers[2], attribute, value)
    with pytest.raises(ValueError, match=f"layers.2.attn has {message}"):
        check_layers(layers)


def test_rollouts_run_one_engine_per_gpu() -> None:
    config = fake_engine(parallel_config__tensor_parallel_size=2)
    assert check_engine(config) is None
    with pytest.raises(
        ValueError, match="a mixed-attention rollout does not work with tensor parallelism"
    ):
        check_engine(config, "a mixed-attention rollout")


@pytest.mark.parametrize(
    ("architecture", "settings", "refused"),
    [
        ("GPT2LMHeadModel", {"rlkv": {"gates": "g", "sparsity": 0.5}}, True),
        ("GPT2LMHeadModel", {}, False),
        ("Qwen3ForCausalLM", {"rlkv": {"full": ["0110"]}}, False),
        ("RLKVMixedLlamaForCausalLM", {"rlkv": {"gates": "g", "sparsity": 0.5}}, False),
    ],
)
def test_other_architectures(architecture: str, settings: dict[str, Any], refused: bool) -> None:
    config = fake_engine(model_config__architecture=architecture, additional_config=settings)
    with pytest.raises(ValueError, match=f"{architecture}") if refused else nullcontext():
        prepare_engine(config)


def test_an_engine_of_another_architecture_does_not_start(llama: Served, tmp_path: Path) -> None:
    """Without the check it would serve the full cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=1024)
    ).save_pretrained(tmp_path)
    other = replace(llama, path=tmp_path)
    with (
        pytest.raises(ValueError, match="architecture GPT2LMHeadModel"),
        engine(other, llama.request(0.5)),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "request_changes", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "fp8"),
        ({"disable_hybrid_kv_cache_manager": True}, {}, "disable-hybrid-kv-cache-manager"),
        ({}, {"sparsity": 2}, "sparsity"),
        ({}, {"gates": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({}, {"one_launch": True}, "unknown setting 'one_launch'"),
    ],
)
def test_the_engine_does_not_start(
    llama: Served, options: dict[str, Any], request_changes: dict[str, Any], message: str
) -> None:
    request = {"rlkv": {**llama.request(0.5)["rlkv"], **request_changes}}
    with pytest.raises((ValueError, OSError), match=message), engine(llama, request, **options):
        pass


def test_gates_of_another_model_are_refused(llama: Served, tmp_path: Any) -> None:
    other = make_served(tmp_path, "qwen3")
    message = "qwen3 with 4 layers"
    with pytest.raises(ValueError, match=message), engine(llama, other.request(0.5)):
        pass


def test_another_version_is_refused(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.vllm.plugin.installed_version", lambda: "0.99.0")
    with pytest.raises(ValueError, match=r"0\.99\.0"), engine(llama, llama.request(0.5)):
        pass


def test_unasked_the_model_stays_as_it_is(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # nor is another version an error where rlkv was not asked for
    monkeypatch.setattr("rlkv.vllm.plugin.installed_version", lambda: "0.99.0")
    with engine(llama, None) as llm:
        model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.get_model()
        assert model.rlkv is None
        assert not hasattr(model, "rlkv_bins")
        assert type(model.model.layers[0].self_attn.attn).__name__ == "Attention"
        (output,) = generate(llm, random_prompts((90,)), 40)
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    with torch.no_grad():
        logits = llama.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def test_the_environment_asks_too(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKV_GATES", str(llama.gates_path))
    monkeypatch.setenv("RLKV_SPARSITY", "0.5")
    with engine(llama, None) as llm:
        config = llm.llm_engine.vllm_config.additional_config["rlkv"]
        allocation = llama.allocation(
            0.5
        )  # part of the compilation key, and read once for all processes
        assert config["full"] == tuple(
            "".join("01"[kept] for kept in row) for row in allocation.full.tolist()
        )
        assert "gates" not in config
        assert (
            len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
            > 1
        )


def test_unasked_a_pooling_model_keeps_its_pooler(llama: Served, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"runner": "pooling", "skip_tokenizer_init": False, "block_size": 32}
    with engine(replace(llama, path=tmp_path / "model"), None, **settings) as llm:
        (output,) = llm.encode(
            [{"prompt_token_ids": [5, 6, 7]}], pooling_task="embed", use_tqdm=False
        )
    assert output.outputs.data.shape == (256,)


def test_weights_are_reordered(llama: Served) -> None:
    """Heads of 2 numbers, groups of 2 query heads: rows and columns are named after their heads."""
    from rlkv.vllm.packing import SinkWindowDemand, plan_packing
    from rlkv.vllm.reallocation import HeadOrder

    full = torch.tensor([[False, True, False], [True, True, True]])
    plan = plan_packing(full, SinkWindowDemand(32, 16, 64), 1000)
    changed = HeadOrder([plan.head_order(layer) for layer in range(2)], group_size=2, head_size=2)
    heads = torch.arange(3).repeat_interleave(2)
    rows = heads.repeat_interleave(2)
    weights = {
        "model.layers.0.self_attn.q_proj.weight": rows[:, None].expand(12, 5),
        "model.layers.0.self_attn.k_proj.bias": heads,
        "model.layers.0.self_attn.v_proj.weight": heads[:, None].expand(6, 5),
        "model.layers.0.self_attn.o_proj.weight": rows.expand(5, 12),
        "model.layers.0.self_attn.o_proj.bias": torch.arange(5),
        "model.layers.1.self_attn.k_proj.bias": heads,
        "model.norm.weight": torch.arange(5),
    }
    found = dict(changed.reordered(weights.items()))
    order = plan.head_order(0)
    assert order[0] == 1  # the full one comes first
    assert found["model.layers.0.self_attn.k_proj.bias"].tolist() == [
        h for h in order for _ in range(2)
    ]
    assert found["model.layers.0.self_attn.v_proj.weight"][:, 3].tolist() == [
        h for h in order for _ in range(2)
    ]
    assert found["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == [
        h for h in order for _ in range(4)
    ]
    assert found["model.layers.0.self_attn.o_proj.weight"][2].tolist() == [
        h for h in order for _ in range(4)
    ]
    for name in (
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
        "model.norm.weight",
    ):
        assert torch.equal(found[name], weights[name])
