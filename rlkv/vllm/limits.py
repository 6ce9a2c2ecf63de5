"""What the plugin does not serve: refused at start, by name, with what to do instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlkv.gates.allocation import num_full_heads
from rlkv.vllm.blocks.dealing import deal_heads
from rlkv.vllm.settings import KEY, MIXED, SERVED, ServingSettings, parse_settings, read_request

# formats of quantised weights in which whole heads are known to move
QUANTISED = ("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors", "fp8")
NOT_REORDERED = ("sharded_state", "runai_streamer_sharded", "tensorizer")  # written to parameters as they are
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")  # what an adapter would have to reorder


def prepare_engine(vllm_config: Any) -> None:
    """Resolve what was asked for, note it in ``additional_config``, and switch off what contradicts it.

    The note reaches every process of the engine, and its compilation cache.  ValueError for wrong settings, gates that
    do not fit the model, a model that is not served, and ``prefill: full`` where a prompt may be longer than a step.
    What is held and saved will be on this process's ``/metrics``.
    """
    model, request = vllm_config.model_config, read_request(vllm_config.additional_config)
    if model is None or request is None or model.architecture.startswith(MIXED):
        return
    if model.architecture not in SERVED:
        raise ValueError(
            f"rlkv: head reallocation does not work with a model of architecture {model.architecture}: serve one of "
            f"{', '.join(SERVED)}, or leave the rlkv settings out"
        )
    check_engine(vllm_config)
    settings, ranks = resolve_settings(vllm_config), vllm_config.parallel_config.tensor_parallel_size
    check_shape(settings, model)
    deal_heads(settings.allocation.full, ranks)  # refuses an uneven allocation before any process starts
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {**vllm_config.additional_config, KEY: settings.to_request()}
    _adapt(vllm_config, settings, rounding(request, settings, ranks))
    if "full" not in request:  # else another process has resolved them, or they are not a server's
        from rlkv.vllm.metrics import publish

        publish(settings.allocation.sparsity)


def check_shape(settings: ServingSettings, model: Any) -> None:
    """Raise ``ValueError`` unless the allocation is for a model (vLLM's config) of this shape."""
    found = list(settings.allocation.full.shape)
    shape = [model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()]
    if found != shape:
        raise ValueError(f"rlkv: the allocation is for {found} layers and KV heads, but the model has {shape}")


def rounding(request: Mapping[str, Any], settings: ServingSettings, ranks: int) -> str | None:
    """What equal shares of ``ranks`` ranks cost, in a sentence; None: nothing, or an allocation was asked for."""
    own, asked = settings.allocation, request.get("sparsity")
    if ranks == 1 or asked is None or own.num_full == num_full_heads(asked, own.full.numel()):
        return None
    return (
        f"sparsity {own.sparsity:.4f} instead of {asked}: {own.num_full} of {own.full.numel()} KV heads are full, a "
        f"multiple of the {ranks} ranks"
    )


def resolve_settings(vllm_config: Any) -> ServingSettings:
    """The settings of an engine that was asked for head reallocation."""
    request = read_request(vllm_config.additional_config)
    assert request is not None
    return parse_settings(request).resolved(
        vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
    )


def _adapt(vllm_config: Any, settings: ServingSettings, rounded: str | None) -> None:
    """Switch off what is on by default and contradicts the settings; warn of that and of what was ``rounded``."""
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if rounded:
        logger.warning("rlkv: %s", rounded)
    is_full = settings.whole_prompts
    if is_full:
        longest = vllm_config.model_config.max_model_len
        for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
            tokens = getattr(scheduler, name, None)
            if tokens is not None and tokens < longest:
                raise ValueError(
                    f"rlkv: prefill 'full' reads every prompt in one step, but a step has {tokens:,} tokens and a text "
                    f"up to {longest:,}: raise --{name.replace('_', '-')}, lower --max-model-len, or use prefill "
                    "'local'"
                )
        if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
            scheduler.enable_chunked_prefill, scheduler.long_prefill_token_threshold = False, 0
            logger.warning("rlkv: prefill 'full' reads every prompt in one step, so chunked prefill is switched off")
    if cache.enable_prefix_caching and (is_full or settings.eviction):
        cache.enable_prefix_caching = False
        why = "cached answers were not read in full" if is_full else "eviction keeps no prefixes"
        logger.warning("rlkv: %s, so prefix caching is switched off", why)


def check_engine(vllm_config: Any, feature: str = "head reallocation") -> None:
    """Raise ``ValueError`` for the first setting of the engine under which ``feature`` would give wrong results."""
    refusals = _always(vllm_config)
    if feature == "head reallocation":
        refusals |= _reallocation(vllm_config)
    else:  # mixed attention leaves blocks and weights as they are, but its gates are those of all heads
        refusals |= {"tensor parallelism: run one engine per GPU": vllm_config.parallel_config.tensor_parallel_size > 1}
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"rlkv: {feature} does not work with {refusal}")


def _always(vllm_config: Any) -> dict[str, bool]:
    """What does not work, and what to do instead; whether it was asked for."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    stages = parallel.pipeline_parallel_size
    context = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    dual_chunk = getattr(vllm_config.model_config.hf_text_config, "dual_chunk_attention_config", None)
    plain_cache = cache.cache_dtype in ("auto", "float16", "bfloat16", "float32")
    # such graphs break at the engine's own operators only: what rlkv does on the host would be captured once
    breakable = "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH=1, which VLLM_BATCH_INVARIANT=1 may switch on)"
    return {
        f"pipeline parallelism (--pipeline-parallel-size {stages}): use --tensor-parallel-size": stages > 1,
        "context parallelism: leave out --decode-context-parallel-size and --prefill-context-parallel-size": context,
        "speculative decoding: leave out --speculative-config": vllm_config.speculative_config is not None,
        f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype}): leave it at auto": not plain_cache,
        "KV connectors: leave out --kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "offloading of the KV cache: leave out --kv-offloading-size": cache.kv_offloading_size is not None,
        "dual chunk attention: remove dual_chunk_attention_config from the model's config": bool(dual_chunk),
        f"{breakable}: set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or pass --enforce-eager": _breaks_graphs(vllm_config),
    }


def _breaks_graphs(vllm_config: Any) -> bool:
    """Whether the engine captures breakable graphs; it notes its own decision in the environment."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1" and mode is not None and mode.name != "NONE"


def _reallocation(vllm_config: Any) -> dict[str, bool]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    config, scheduler = model.hf_text_config, vllm_config.scheduler_config
    sliding = cache.sliding_window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    weights = (
        f"quantised weights of format {model.quantization}, whose heads it cannot reorder: serve one of "
        f"{', '.join(QUANTISED)}, or a checkpoint in float32, bfloat16 or float16"
    )
    quantised, adapters = vllm_config.quant_config, vllm_config.lora_config
    named = {name.rsplit(".")[-1] for name in getattr(adapters, "target_modules", None) or PROJECTIONS}
    form = str(vllm_config.load_config.load_format)
    lora = adapters is not None and not named.isdisjoint(PROJECTIONS)
    heads, ranks = model.get_total_num_kv_heads(), vllm_config.parallel_config.tensor_parallel_size
    uneven = f"--tensor-parallel-size {ranks} and {heads} KV heads a layer: choose a divisor of {heads}"
    hybrid = "--disable-hybrid-kv-cache-manager: leave it out, blocks of several kinds are what saves memory"
    return {
        weights: quantised is not None and quantised.get_name() not in QUANTISED,
        "LoRA adapters of attention, whose heads are reordered: merge the adapter into the model, or name the modules "
        "of an adapter of others with --lora-target-modules gate_proj up_proj down_proj": lora,
        uneven: heads % ranks > 0,
        f"--load-format {form}: what it loads is not reordered, leave it at auto": form in NOT_REORDERED,
        hybrid: bool(scheduler.disable_hybrid_kv_cache_manager),
        "sliding-window layers: their heads have no full cache to reallocate": sliding,
        "--kv-sharing-fast-prefill: leave it out": cache.kv_sharing_fast_prefill,
    }
