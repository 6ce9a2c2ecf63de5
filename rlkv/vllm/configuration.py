"""The engine's configuration: what is refused, what is adapted, and where settings are noted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlkv.gates.allocation import num_full_heads
from rlkv.models.layout import Layout
from rlkv.vllm.settings import (
    ARCHITECTURES,
    DRAFTING,
    FULL,
    KEEP,
    KEEPING,
    KEY,
    LEARNED_SINKS,
    LOSSLESS,
    REALLOCATION,
    ROLLOUT,
    SERVED,
    ServingSettings,
    asks_for_rollout,
    deal_heads,
    parse_settings,
    read_request,
    resolve_settings,
)

FP8_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")  # one scale for each tensor
# formats of quantised weights in which whole heads are known to move
_AWQ = ("awq", "awq_marlin", "auto_awq")
_GPTQ = ("gptq", "gptq_marlin", "auto_gptq")
QUANTISED = (*_AWQ, *_GPTQ, "compressed-tensors", "fp8")
# of a draft model, in the engine's configuration of speculative decoding
OF_ANOTHER_MODEL = (
    "revision",
    "code_revision",
    "max_model_len",
    "kv_cache_dtype",
    "attention_backend",
    "moe_backend",
    "draft_load_config",
    "use_local_argmax_reduction",
    "parallel_drafting",
    "use_heterogeneous_vocab",
    "disable_padded_drafter_batch",
)
# written to parameters as they are, or as another process has them
NOT_REORDERED = (
    "sharded_state",
    "runai_streamer_sharded",
    "tensorizer",
    "ipc_cache",
    "modelexpress",
)
TRANSFERS = ("nccl", "ipc", "sparse_nccl")  # of weights, through load_weights of the model


def check_engine(vllm_config: Any, feature: str = REALLOCATION) -> None:
    """Raise ``ValueError`` for the first setting under which ``feature`` would be wrong."""
    quantised = FP8_DTYPES if feature in (KEEPING, DRAFTING) else ()
    or_keep = "mode 'keep' on a CPU or " if feature == REALLOCATION else ""
    found = [*_unsupported(vllm_config), *_unsupported_cache(vllm_config, quantised, or_keep)]
    heads = vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if feature != ROLLOUT and heads % ranks:  # each rank reads the gates of its own heads
        divisor = f"choose a divisor of {heads}"
        found.append(f"--tensor-parallel-size {ranks} and {heads} KV heads a layer: {divisor}")
    if feature == DRAFTING:
        found += _unsupported_by_drafting(vllm_config)
    elif feature != ROLLOUT:
        found += _unsupported_drafts(vllm_config)
    architecture = vllm_config.model_config.architecture
    if feature == REALLOCATION:
        found += _unsupported_by_reallocation(vllm_config, or_keep)
    elif feature == ROLLOUT and architecture not in ARCHITECTURES:
        found.append(f"{architecture}: sample {', '.join(ARCHITECTURES)}, or with --rollout hf")
    elif feature == ROLLOUT and ranks != 1:
        # gates are those of all heads
        found.append("tensor parallelism: run one engine per GPU")
    elif feature == ROLLOUT and vllm_config.speculative_config is not None:
        found.append("speculative decoding: leave out --speculative-config")
    if found:
        raise ValueError(f"rlkv: {feature} does not work with {found[0]}")


def _unsupported(engine: Any) -> Iterator[str]:
    """Yield the settings that do not work with rlkv, each with what to do about it."""
    parallel = engine.parallel_config
    cache = engine.cache_config
    if parallel.pipeline_parallel_size != 1:
        yield (
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size}): "
            "use --tensor-parallel-size"
        )
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        yield (
            "context parallelism: leave out --decode-context-parallel-size and "
            "--prefill-context-parallel-size"
        )
    if parallel.use_ubatching:  # metadata of a part of a step lack what prompts need
        yield "microbatches: leave out --enable-dbo and --ubatch-size"
    if _is_in_mistral_format(engine):
        yield (
            "the config and the tensor names of Mistral's own format: pass --config-format hf "
            "--load-format hf"
        )
    if engine.model_config.architecture in engine.model_config.model_class_overrides:
        yield "--model-class-overrides for this model, which takes rlkv's place: leave it out"
    if cache.sliding_window is not None:
        yield "sliding windows in all layers: no head has a full cache"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill: leave it out"
    if engine.kv_transfer_config is not None:
        yield "KV connectors: leave out --kv-transfer-config"
    if cache.kv_offloading_size is not None:
        yield "offloading of the KV cache: leave out --kv-offloading-size"
    if getattr(engine.model_config.hf_text_config, "dual_chunk_attention_config", None):
        yield "dual chunk attention: remove dual_chunk_attention_config from the model's config"
    graphs = engine.compilation_config.cudagraph_mode
    captures = graphs is not None and graphs.name != "NONE"
    # where the engine notes its own decision; such graphs break at the engine's own operators only,
    # and would capture work of the host
    if captures and os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1":
        yield (
            "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which VLLM_BATCH_INVARIANT=1 "
            "may switch on): set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or pass --enforce-eager"
        )


def _is_in_mistral_format(engine: Any) -> bool:
    """Return whether the engine reads ``params.json`` or ``consolidated*.safetensors``."""
    model = engine.model_config
    formats = {str(model.config_format), str(engine.load_config.load_format)}
    if "auto" not in formats:
        return "mistral" in formats
    from vllm.transformers_utils.repo_utils import is_mistral_model_repo

    return "mistral" in formats or is_mistral_model_repo(str(model.model), model.revision)


def _unsupported_drafts(engine: Any) -> Iterator[str]:
    """Yield the same for speculative decoding."""
    if engine.speculative_config is None:
        return
    method = engine.speculative_config.method
    if method != "ngram":  # the drafts of a model have a cache of their own
        yield (
            f"speculative decoding by {method}: use "
            '--speculative-config \'{"method": "ngram", ...}\', or leave it out'
        )
    if engine.model_config.is_hybrid:
        yield "speculative decoding with linear layers: leave out --speculative-config"


def _unsupported_by_drafting(engine: Any) -> Iterator[str]:
    """Yield the same for drafts of the served model itself."""
    drafts = engine.speculative_config
    model = engine.model_config.model
    asks = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    if drafts is None:
        yield (
            "speculative decoding switched off: the served model drafts for itself, pass "
            f"--speculative-config '{json.dumps(asks)}'"
        )
    elif drafts.method != "draft_model" or drafts.draft_model_config.model != model:
        yield (
            f"speculative decoding by {drafts.model or drafts.method}: the served model drafts "
            f"for itself, pass --speculative-config '{json.dumps(asks)}'"
        )
    else:
        for name in OF_ANOTHER_MODEL:
            if getattr(drafts, name):
                yield f"{name} of --speculative-config: leave it out, the served model drafts"
        if drafts.quantization not in (None, engine.model_config.quantization):
            yield f"quantization {drafts.quantization} of --speculative-config: leave it out"
        if drafts.rejection_sample_method != "standard":
            yield (
                f"rejection_sample_method {drafts.rejection_sample_method!r}: leave it out, its "
                "texts need not be the full model's"
            )
    if engine.lora_config is not None:
        yield "LoRA adapters, which drafts would not have: leave out --enable-lora"
    if engine.use_v2_model_runner:
        yield "the second model runner: set VLLM_USE_V2_MODEL_RUNNER=0"


def _unsupported_cache(engine: Any, quantised: tuple[str, ...], or_keep: str) -> Iterator[str]:
    """Yield the same for a cache that holds neither plain numbers nor ``quantised`` ones.

    ``or_keep`` names the mode that serves them, where there is one.
    """
    found = engine.cache_config.cache_dtype
    # layers of the engine take it for "auto" when they are built, and then note "fp8" as asked for
    if getattr(engine.quant_config, "kv_cache_scheme", None) and found in ("auto", "fp8"):
        if not quantised:
            yield (
                "a checkpoint whose quantization_config has a kv_cache_scheme, which asks for an "
                f"FP8 cache: use {or_keep}a checkpoint without one"
            )
        return
    # the CPU kernels read another plain type than the model's as if it were that
    if found not in ("auto", str(engine.model_config.dtype).removeprefix("torch."), *quantised):
        use = f"use one of {', '.join(quantised)}, or auto"
        if not quantised:
            use = "leave it at auto"
            if or_keep and found in FP8_DTYPES:
                use += ", or use mode 'keep' on a CPU"
        yield f"--kv-cache-dtype {found}: {use}"


def _unsupported_by_reallocation(engine: Any, or_keep: str) -> Iterator[str]:
    """Yield the same for settings of weights that are reordered, and of blocks."""
    quantised = engine.quant_config
    if quantised is not None and quantised.get_name() not in QUANTISED:
        yield (
            f"quantised weights of format {engine.model_config.quantization}, whose heads it "
            f"cannot reorder: serve one of {', '.join(QUANTISED)}, or a checkpoint in float32, "
            "bfloat16 or float16"
        )
    if getattr(quantised, "kv_cache_scheme", None):
        yield (
            "the scales that a checkpoint with a kv_cache_scheme holds, whose heads it cannot "
            f"reorder: use {or_keep}a checkpoint without one"
        )
    load_format = str(engine.load_config.load_format)
    if load_format in NOT_REORDERED:
        yield f"--load-format {load_format}: what it loads is not reordered, leave it at auto"
    transfer = getattr(engine, "weight_transfer_config", None)
    if transfer is not None and transfer.backend not in TRANSFERS:
        yield (
            f"weight transfer by {transfer.backend}, whose weights it cannot reorder: use one of "
            f"{', '.join(TRANSFERS)}"
        )
    if engine.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "--disable-hybrid-kv-cache-manager: leave it out, blocks of several kinds are what "
            "saves memory"
        )
    if engine.model_config.is_hybrid and engine.cache_config.enable_prefix_caching:
        yield "prefix caching of linear layers: pass --no-enable-prefix-caching"


def prepare_engine(vllm_config: Any) -> float | None:
    """Resolve what was asked for, and switch off what contradicts it.

    The resolved settings are noted in ``additional_config``, which reaches every process of the
    engine, and its compilation cache.

    Returns:
        The sparsity if this process reports on ``/metrics`` what is held and saved, else None.

    Raises:
        ValueError: for wrong settings, gates that do not fit the model, a model that is not served,
            and ``prefill: full`` where a prompt may be longer than a step.
    """
    model = vllm_config.model_config
    request = read_request(vllm_config.additional_config)
    if model is None or request is None or asks_for_rollout(vllm_config.additional_config):
        return None
    if model.architecture not in SERVED:
        raise ValueError(
            "rlkv: head reallocation does not work with a model of architecture "
            f"{model.architecture}: serve one of {', '.join(SERVED)}, or leave the rlkv settings "
            "out"
        )
    asked = parse_settings(request)
    check_engine(vllm_config, asked.feature)
    if asked.keeps and not _is_on_cpu():
        raise ValueError(
            f"rlkv: {asked.feature} is served only by the CPU build of vLLM: leave mode out on "
            "a GPU"
        )
    if asked.drafts:
        # the engine reads it off the checkpoint, and drafts nothing for longer texts
        drafts = vllm_config.speculative_config.draft_model_config
        drafts.max_model_len = model.max_model_len
    settings = resolve_settings(vllm_config)
    _check_model(settings, vllm_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if not settings.keeps:
        # refuses an uneven allocation before any process starts
        deal_heads(settings.full_LH, ranks)
    _adapt(vllm_config, settings, rounding(request, settings, ranks))
    caches = vllm_config.cache_config.enable_prefix_caching
    if settings.keep_prompt_window and not caches:
        raise ValueError(
            "rlkv: keep_prompt_window is for prefix caching, which is off: leave it out, or pass "
            "--enable-prefix-caching (not with eviction, nor with prefill 'full')"
        )
    if settings.keep_prompt_window is None:
        # a protected prompt is kept whole, and in mode keep everything is
        window = bool(caches) and not settings.protect_prompt and not settings.keeps
        settings = replace(settings, keep_prompt_window=window)
    if isinstance(vllm_config.additional_config, dict):
        resolved = {KEY: settings.to_request()}
        vllm_config.additional_config = vllm_config.additional_config | resolved
    # with "full" another process has resolved them, or they are not a server's
    return None if "full" in request else settings.allocation.sparsity


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _check_model(settings: ServingSettings, vllm_config: Any) -> None:
    """Raise ``ValueError`` if resolved settings do not fit the model or its drafts."""
    model = vllm_config.model_config
    if (settings.eviction or settings.keeps) and model.architecture == LEARNED_SINKS:
        what = "eviction" if settings.eviction else "mode"
        raise ValueError(
            f"rlkv: {what} {getattr(settings, what)!r} is not served with learned sinks, which "
            f"differ by head, and which no policy's scores know: leave {what} out"
        )
    if settings.eviction and vllm_config.speculative_config is not None:
        raise ValueError(
            "rlkv: eviction does not work with speculative decoding, because what was evicted for "
            "a draft that is then rejected does not come back: leave out --speculative-config, or "
            "use sink and window"
        )
    assert settings.full is not None
    found = [len(row) for row in settings.full]
    heads = list(Layout.from_config(model.hf_config).heads)
    if found != heads:
        raise ValueError(
            f"rlkv: the allocation is for {found} KV heads, layer by layer, but the model has "
            f"{heads} with full attention"
        )
    if settings.aligned_windows and not settings.keeps and model.is_hybrid and _is_on_cpu():
        # the stock kernel multiplies what it masks by 0, and of a reused block the engine clears
        # no more than full heads have (CPUModelRunner._zero_block_ids), so 0 * NaN may be left
        raise ValueError(
            "rlkv: aligned windows are not served with linear layers on a CPU, where the engine "
            "does not clear all of a block that held linear states: leave aligned_windows out, or "
            "use mode 'keep'"
        )
    if settings.drafts and 0 in heads:
        raise ValueError(
            "rlkv: mode 'lossless' serves models with full attention in all layers, so that all "
            "share their blocks: use another mode"
        )


def refuse_beams(engine: Any) -> None:
    """Raise ``ValueError`` if the engine would not serve beam search with a small cache.

    It sends each step as a new prompt, in which compressible heads would see the whole text.
    """
    request = read_request(engine.vllm_config.additional_config, {})
    if request and (request.get("prefill") == FULL or request.get("protect_prompt")):
        raise ValueError(
            "rlkv: beam search does not work with prefill 'full' or a protected prompt, because "
            "the engine reads the text so far as a new prompt at every step: use prefill 'local' "
            "without protect_prompt, or sample"
        )


def refuse_streams(engine: Any) -> None:
    """Raise ``ValueError`` if what compressible heads keep does not suit a prompt that grows.

    The engine takes each part of a streamed input, and what it wrote before, for one longer prompt.
    """
    request = read_request(engine.vllm_config.additional_config, {})
    if not request or request.get("mode") == LOSSLESS:
        return
    # asynchronous scheduling takes the last token back after its step
    goes_back = request.get("eviction") and engine.vllm_config.scheduler_config.async_scheduling
    if request.get("prefill") == FULL or request.get("protect_prompt") or goes_back:
        raise ValueError(
            "rlkv: streamed inputs do not work with prefill 'full', a protected prompt, or "
            "eviction and asynchronous scheduling, because the prompt grows after some of it was "
            "given up: send whole prompts"
        )


def rounding(request: Mapping[str, Any], settings: ServingSettings, ranks: int) -> str | None:
    """Say in a sentence what equal shares of ``ranks`` ranks cost; None: nothing."""
    own = settings.allocation
    asked = request.get("sparsity")
    heads = int(own.gated.sum())
    if ranks == 1 or asked is None or own.num_full == num_full_heads(asked, heads):
        return None
    return (
        f"sparsity {own.sparsity:.4f} instead of {asked}: {own.num_full} of {heads} KV heads are "
        f"full, a multiple of the {ranks} ranks"
    )


def _adapt(vllm_config: Any, settings: ServingSettings, rounded: str | None) -> None:
    """Switch off what is on by default and contradicts the settings, with a warning each."""
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    cache = vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    if rounded:
        logger.warning("rlkv: %s", rounded)
    if settings.whole_prompts:
        _check_steps(scheduler, vllm_config.model_config.max_model_len)
        if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
            scheduler.enable_chunked_prefill = False
            scheduler.long_prefill_token_threshold = 0
            logger.warning(
                "rlkv: prefill 'full' reads every prompt in one step, so chunked prefill is "
                "switched off"
            )
    if cache.enable_prefix_caching and (settings.whole_prompts or settings.eviction):
        cache.enable_prefix_caching = False
        read = "a cached prefix may hold an earlier answer, which was not read in full"
        why = "eviction keeps no prefixes" if settings.eviction else read
        logger.warning("rlkv: %s, so prefix caching is switched off", why)
    if cache.enable_prefix_caching and settings.mode == KEEP and settings.protect_prompt:
        cache.enable_prefix_caching = False
        logger.warning(
            "rlkv: mode 'keep' would cache answers together with prompts, and in a protected "
            "prompt they see more, so prefix caching is switched off"
        )


def _check_steps(scheduler: Any, longest: int) -> None:
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        tokens = getattr(scheduler, name, None)
        if tokens is not None and tokens < longest:
            raise ValueError(
                f"rlkv: prefill 'full' reads every prompt in one step, but a step has {tokens:,} "
                f"tokens and a text up to {longest:,}: raise --{name.replace('_', '-')}, lower "
                "--max-model-len, or use prefill 'local'"
            )
