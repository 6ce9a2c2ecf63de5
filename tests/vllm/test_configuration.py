"""What an engine's configuration must not hold, and what is changed in it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from rlkv.attention import LocalSizes
from rlkv.models.loading import load_tokenizer
from rlkv.vllm.configuration import (
    OF_ANOTHER_MODEL,
    _check_model,
    check_engine,
    prepare_engine,
    refuse_beams,
    rounding,
)
from rlkv.vllm.engine import ServingEngine, _mixed_options
from rlkv.vllm.settings import (
    DRAFTING,
    KEEPING,
    REALLOCATION,
    ROLLOUT,
    ServingSettings,
)
from tests.helpers.engines import (
    NGRAM,
    SINK,
    WINDOW,
    Served,
    engine,
    engine_config,
)
from tests.helpers.models import build_tokenizer, make_tiny_model

RKV = {"name": "rkv", "budget": 64}


TEXT = "model_config__hf_text_config"


def fake_engine(**changes: Any) -> Any:
    """The settings that are looked at, all supported; ``a__b`` sets ``config.a.b``."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
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
            model="llama",
            config_format="hf",
            model_class_overrides={},
            dtype="torch.float32",
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        load_config=SimpleNamespace(load_format="hf"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        speculative_config=None,
        quant_config=None,
        lora_config=None,
        use_v2_model_runner=False,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def fake_drafts(**changes: Any) -> Any:
    """Speculative decoding as mode lossless asks for it, of the model of :func:`fake_engine`."""
    own: dict[str, Any] = {"method": "draft_model", "model": "llama", "quantization": None}
    own |= dict.fromkeys(OF_ANOTHER_MODEL) | {"rejection_sample_method": "standard", **changes}
    return SimpleNamespace(draft_model_config=SimpleNamespace(model=own["model"]), **own)


ASKED = ("auto", "fp8")
RANKS = "parallel_config__tensor_parallel_size"
HYBRID = {"model_config__architecture": "Gemma3ForCausalLM"}
EAGLE = {"speculative_config": SimpleNamespace(method="eagle")}
NGRAMS = {"speculative_config": SimpleNamespace(method="ngram")}  # without a cache of their own
QUANTISED = SimpleNamespace(
    get_name=lambda: "compressed-tensors", kv_cache_scheme={"num_bits": 8, "type": "float"}
)
BITSANDBYTES = SimpleNamespace(get_name=lambda: "bitsandbytes")
LLAMA = "LlamaForCausalLM"


def scaled(dtype: str) -> dict[str, Any]:
    """A checkpoint that asks for a cache in FP8; the layers note "auto" as "fp8" later on.

    Its scales lie next to the weights, which are reordered, whatever the cache holds.
    """
    return {"quant_config": QUANTISED, "cache_config__cache_dtype": dtype}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    REALLOCATION: [
        ({"parallel_config__use_ubatching": True}, "microbatches: leave out --enable-dbo"),
        ({"model_config__config_format": "mistral"}, "Mistral's own format: pass --config-format"),
        ({"load_config__load_format": "mistral"}, "Mistral's own format: pass --config-format hf"),
        ({RANKS: 8}, "tensor-parallel-size 8 and 4 KV heads"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        (EAGLE, "speculative decoding by eagle"),
        ({**NGRAMS, "model_config__is_hybrid": True}, "speculative decoding with linear layers"),
        ({"quant_config": BITSANDBYTES}, "quantised weights"),
        ({"load_config__load_format": "sharded_state"}, "load-format sharded_state"),
        ({"load_config__load_format": "ipc_cache"}, "load-format ipc_cache"),
        ({"weight_transfer_config": SimpleNamespace(backend="nccl_m2n")}, "nccl_m2n"),
        ({"weight_transfer_config": SimpleNamespace(backend="sharded_rdt")}, "by sharded_rdt"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"scheduler_config__disable_hybrid_kv_cache_manager": True}, "disable-hybrid-kv-cache"),
        ({"cache_config__sliding_window": 512}, "sliding windows in all layers"),
        ({"model_config__is_hybrid": True}, "prefix caching of linear layers"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "kv-sharing-fast-prefill"),
        ({"cache_config__kv_offloading_size": 4.0}, "offloading"),
        ({f"{TEXT}__dual_chunk_attention_config": {"chunk_size": 8}}, "dual chunk attention"),
        ({"cache_config__cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16: leave it at auto"),
        ({"cache_config__cache_dtype": "fp8"}, "fp8"),
        *((scaled(dtype), "quantization_config has a kv_cache_scheme") for dtype in ASKED),
        (scaled("float32"), "scales that a checkpoint with a kv_cache_scheme holds"),
        ({"model_config__model_class_overrides": {LLAMA: "m:Own"}}, "--model-class-overrides"),
    ],
    KEEPING: [
        ({RANKS: 8}, "tensor-parallel-size 8 and 4 KV heads"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        (EAGLE, "speculative decoding by eagle"),
        ({"cache_config__cache_dtype": "fp8_per_token_head"}, "dtype fp8_per_token_head"),
    ],
    DRAFTING: [
        ({"speculative_config": None}, "switched off: the served model drafts for itself, pass"),
        ({"speculative_config": fake_drafts(method="ngram", model=None)}, "by ngram: the served"),
        ({"speculative_config": fake_drafts(model="smaller")}, "by smaller: the served model"),
        ({"speculative_config": fake_drafts(parallel_drafting=True)}, "parallel_drafting of"),
        ({"speculative_config": fake_drafts(quantization="awq")}, "quantization awq of"),
        (
            {"speculative_config": fake_drafts(rejection_sample_method="synthetic")},
            "rejection_sample_method 'synthetic'",
        ),
        ({"lora_config": object()}, "LoRA adapters, which drafts would not have"),
        ({"use_v2_model_runner": True}, "the second model runner: set VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
    ROLLOUT: [
        ({RANKS: 2}, "tensor parallelism"),
        (HYBRID, "Gemma3ForCausalLM"),
        (NGRAMS, "speculative decoding"),
        *((scaled(dtype), "quantization_config has a kv_cache_scheme") for dtype in ASKED),
    ],
}
TAKEN: dict[str, list[dict[str, Any]]] = {
    REALLOCATION: [{RANKS: 2}, HYBRID, NGRAMS],
    KEEPING: [
        NGRAMS,
        {"cache_config__cache_dtype": "fp8"},
        {"lora_config": object()},
        {"load_config__load_format": "sharded_state"},
        *map(scaled, (*ASKED, "float32")),
    ],
    ROLLOUT: [scaled("float32")],
    DRAFTING: [{"cache_config__cache_dtype": "fp8"}],
}


def check(feature: str, changes: dict[str, Any]) -> None:
    drafts = {"speculative_config": fake_drafts()} if feature == DRAFTING else {}
    check_engine(fake_engine(**{**drafts, **changes}), feature)


@pytest.mark.parametrize(
    ("feature", "changes", "message"),
    [(feature, *row) for feature, rows in REFUSED.items() for row in rows],
)
def test_each_refusal_names_its_cause(feature: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{feature} does not work with.*{message}"):
        check(feature, changes)


@pytest.mark.parametrize(
    ("feature", "changes"),
    [(feature, changes) for feature, rows in TAKEN.items() for changes in rows],
)
def test_what_is_taken(feature: str, changes: dict[str, Any]) -> None:
    check(feature, changes)


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


@pytest.mark.parametrize(
    ("architecture", "settings", "refused"),
    [
        ("GPT2LMHeadModel", {"rlkv": {"gates": "g", "sparsity": 0.5}}, True),
        ("GPT2LMHeadModel", {}, False),
        ("Qwen3ForCausalLM", {"rlkv": {"full": ["0110"], "sink": 4, "window": 8}}, False),
        # a rollout's engine, with variables of a server around it
        ("GPT2LMHeadModel", {"rlkv_mixed": {}, "rlkv": {"gates": "g", "sparsity": 0.5}}, False),
    ],
)
def test_other_architectures(architecture: str, settings: dict[str, Any], refused: bool) -> None:
    pytest.importorskip("vllm")
    config = fake_engine(model_config__architecture=architecture, additional_config=settings)
    with pytest.raises(ValueError, match=architecture) if refused else nullcontext():
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


def test_beam_search_needs_prompts_that_are_read_locally(llama: Served) -> None:
    from vllm.sampling_params import BeamSearchParams

    with (
        engine(llama, llama.request(0.6, protect_prompt=True)) as llm,
        pytest.raises(ValueError, match="rlkv: beam search does not work with prefill 'full'"),
    ):
        llm.beam_search([{"prompt_token_ids": [3, 4, 5]}], BeamSearchParams(1, 30))
    for request in (None, {"prefill": "local", "protect_prompt": False}, {"prefill": "local"}):
        config = SimpleNamespace(additional_config={"rlkv": request})
        refuse_beams(SimpleNamespace(vllm_config=config))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"prefill": "full"}, True),
        ({"protect_prompt": True}, True),
        ({"protect_prompt": True, "mode": "keep"}, True),
        ({"protect_prompt": True, "mode": "lossless"}, False),
        ({"eviction": RKV}, False),
        ({"eviction": RKV, "asynchronous": True}, True),
    ],
)
def test_prompts_that_may_not_grow(changes: dict[str, Any], refused: bool) -> None:
    """As the engine's own method for requests, of streamed inputs and of whole ones."""
    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlkv.vllm.plugin import _check_streams

    async def parts() -> AsyncIterator[Any]:
        yield {"prompt_token_ids": [3, 4, 5]}

    _check_streams()
    config = SimpleNamespace(
        additional_config={"rlkv": {"prefill": "local", **changes}},
        scheduler_config=SimpleNamespace(async_scheduling="asynchronous" in changes),
    )
    asked = SimpleNamespace(vllm_config=config)  # the stock method asks for errored first
    streamed = AsyncLLM.add_request(asked, "0", parts(), None)
    message = "streamed inputs do not work with" if refused else "no attribute 'errored'"
    with pytest.raises(VLLMValidationError if refused else AttributeError, match=message):
        asyncio.run(streamed)
    with pytest.raises(AttributeError, match="no attribute 'errored'"):
        asyncio.run(AsyncLLM.add_request(asked, "0", [3, 4, 5], None))


# in the place of the request's gates
SINKS = {"sink": SINK, "window": WINDOW, "gates": None, "sparsity": None}
IN_FULL = {"prefill": "full"}


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "fp8"),
        ({"tensor_parallel_size": 2}, {"full": FULL, **SINKS}, "7 full heads are not spread"),
        ({}, {"keep_prompt_window": True}, "keep_prompt_window is for prefix caching, which is"),
        ({"speculative_config": NGRAM}, {"eviction": RKV}, "eviction does not work with specul"),
        ({"max_num_batched_tokens": 300}, IN_FULL, "300 .*1,024.* --max-num-batched-tokens"),
        ({"max_num_scheduled_tokens": 300}, IN_FULL, "300 .*1,024.* --max-num-scheduled-tokens"),
    ],
)
def test_the_engine_does_not_start(
    llama: Served, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    request = {"rlkv": {**llama.request(0.5)["rlkv"], **changes}}
    with pytest.raises(ValueError, match=message):
        engine_config(llama, request, **options)


def test_all_tokens_are_kept_only_on_a_cpu(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.vllm.configuration._is_on_cpu", lambda: False)
    with pytest.raises(ValueError, match="mode 'keep' is served only by the CPU build of vLLM"):
        engine_config(llama, llama.request(0.5, mode="keep"))
    with pytest.raises(
        ValueError, match="dtype fp8: leave it at auto, or use mode 'keep' on a CPU"
    ):
        check_engine(fake_engine(cache_config__cache_dtype="fp8"))
    with pytest.raises(ValueError, match="ServingEngine serves mode 'memory', not 'keep'"):
        ServingEngine(
            str(llama.path), ServingSettings(full=("0101",), sink=4, window=16, mode="keep")
        )


def test_tokenizers_of_mistral_models_keep_their_chat_template(tmp_path: Path) -> None:
    """The engine brings mistral-common, whose tokenizers write no prompt as text."""
    tokenizer = build_tokenizer()
    make_tiny_model("mistral", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")  # by which transformers chooses them
    assert load_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template


def test_weights_under_mistrals_names_are_refused(llama: Served, tmp_path: Path) -> None:
    """The engine prefers them where a folder has both."""
    folder = tmp_path / "model"
    shutil.copytree(llama.path, folder)
    (folder / "consolidated.safetensors").touch()
    served = replace(llama, path=folder)
    with pytest.raises(ValueError, match="pass --config-format hf --load-format hf"):
        engine_config(served, llama.request(0.5))
    engine_config(served, llama.request(0.5), config_format="hf", load_format="hf")


def test_aligned_windows_do_not_read_what_linear_layers_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlkv.vllm.configuration._is_on_cpu", lambda: True)
    linear = fake_engine(model_config__is_hybrid=True)
    aligned = ServingSettings(full=("0101",), sink=SINK, window=WINDOW, aligned_windows=True)
    with pytest.raises(ValueError, match="aligned windows are not served with linear layers on a"):
        _check_model(aligned, linear)
    _check_model(aligned, fake_engine())
    _check_model(replace(aligned, mode="keep"), linear)
    _check_model(replace(aligned, aligned_windows=None), linear)


def test_the_settings_are_resolved_once(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the compilation key, and published by the process that resolved them."""
    published: list[tuple[float, int]] = []
    guarded: list[str] = []
    monkeypatch.setattr("rlkv.vllm.specs.publish", lambda *found: published.append(found))
    monkeypatch.setattr("rlkv.vllm.plugin._check_beams", lambda: guarded.append("beams"))
    monkeypatch.setattr("rlkv.vllm.plugin._check_streams", lambda: guarded.append("streams"))
    full = tuple("".join("01"[one] for one in row) for row in llama.allocation(0.5).full.tolist())
    resolved = {"rlkv": {"full": full, **SINKS}}
    engine_config(llama, {"rlkv": None})
    assert not guarded
    with monkeypatch.context() as left:  # of a server; rollouts do not read it
        left.setenv("RLKV_GATES", "left")
        engine_config(llama, _mixed_options(str(llama.path), LocalSizes(2, 6))["additional_config"])
    assert not guarded
    engine_config(llama, resolved)
    assert set(guarded) == {"beams", "streams"}
    assert not published
    monkeypatch.setenv("RLKV_GATES", str(llama.gates_path))
    monkeypatch.setenv("RLKV_SPARSITY", "0.5")
    found = engine_config(llama, None).additional_config["rlkv"]
    assert found["full"] == full
    assert "gates" not in found
    assert published == [(0.5, 1)]
    assert not found["keep_prompt_window"]


@pytest.mark.parametrize(
    ("settings", "caches", "keeps_window"),
    [
        ({}, True, True),
        ({"protect_prompt": True}, True, False),
        ({"mode": "keep"}, True, False),
        # answers, which see less than prompts do, would be cached with them
        ({"mode": "keep", "protect_prompt": True}, False, False),
        ({"prefill": "full"}, False, False),
        # what an eviction kept is not a prefix
        ({"eviction": RKV}, False, False),
    ],
)
def test_a_prefix_cache_that_would_be_wrong_is_switched_off(
    llama: Served, settings: dict[str, Any], caches: bool, keeps_window: bool
) -> None:
    config = engine_config(llama, llama.request(0.5, **settings), enable_prefix_caching=True)
    assert config.cache_config.enable_prefix_caching == caches
    assert config.additional_config["rlkv"]["keep_prompt_window"] == keeps_window
    assert config.scheduler_config.enable_chunked_prefill == (settings != {"prefill": "full"})


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_unasked_a_pooling_model_keeps_its_pooler(llama: Served, tmp_path: Path) -> None:
    from tests.helpers.models import build_tokenizer

    shutil.copytree(llama.path, tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"runner": "pooling", "skip_tokenizer_init": False, "block_size": 32}
    prompt = [{"prompt_token_ids": [5, 6, 7]}]
    with engine(replace(llama, path=tmp_path / "model"), None, **settings) as llm:
        (output,) = llm.encode(prompt, pooling_task="embed", use_tqdm=False)
    assert output.outputs.data.shape == (256,)


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
