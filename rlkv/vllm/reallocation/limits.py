"""What head reallocation in vLLM does not serve: refused at start, by name, with what to do instead."""

from __future__ import annotations

from typing import Any

from rlkv.vllm.names import ARCHITECTURES, PREFIX
from rlkv.vllm.settings import read_request

MODEL_TYPES = ("llama", "qwen2", "qwen3")


def check_architecture(vllm_config: Any) -> None:
    """Raise ``ValueError`` if rlkv was asked for and the engine would build another model, with its full cache."""
    model = vllm_config.model_config
    if model is None or read_request(vllm_config.additional_config) is None:
        return
    name = model.architecture
    if name not in ARCHITECTURES and not name.startswith(PREFIX):
        raise ValueError(
            f"rlkv: head reallocation does not work with a model of architecture {name}: serve one of "
            f"{', '.join(ARCHITECTURES)}, or leave the rlkv settings out"
        )


def adapt_engine(vllm_config: Any) -> None:
    """Switch off what contradicts the settings of rlkv and is on by default, with a warning.

    Raises:
        ValueError: if ``prefill: full`` was asked for and a prompt may be longer than a step.
    """
    request = read_request(vllm_config.additional_config)
    if request is None or vllm_config.model_config is None:
        return
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    is_full = request.get("prefill") == "full"
    if is_full:
        longest = vllm_config.model_config.max_model_len
        given = {
            name: getattr(scheduler, name, None) for name in ("max_num_batched_tokens", "max_num_scheduled_tokens")
        }
        for name, tokens in given.items():
            if tokens is not None and tokens < longest:
                raise ValueError(
                    f"rlkv: prefill 'full' reads every prompt in one step, but a step has {tokens:,} tokens and a text "
                    f"up to {longest:,}: raise --{name.replace('_', '-')}, lower --max-model-len, or use prefill "
                    "'local'"
                )
        if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
            scheduler.enable_chunked_prefill, scheduler.long_prefill_token_threshold = False, 0
            logger.warning("rlkv: prefill 'full' reads every prompt in one step, so chunked prefill is switched off")
    if cache.enable_prefix_caching and (is_full or request.get("eviction")):
        cache.enable_prefix_caching = False
        why = "cached answers were not read in full" if is_full else "eviction keeps no prefixes"
        logger.warning("rlkv: %s, so prefix caching is switched off", why)


def check_engine(vllm_config: Any) -> None:
    """Raise ``ValueError`` for the first setting of the engine under which results would be wrong."""
    for wrong, what, instead in _findings(vllm_config):
        if wrong:
            raise ValueError(f"rlkv: head reallocation does not work with {what}: {instead}")


def _findings(vllm_config: Any) -> list[tuple[bool, str, str]]:
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    config = model.hf_text_config
    return [
        (
            config.model_type not in MODEL_TYPES,
            f"a model of type {config.model_type}",
            f"serve one of {', '.join(MODEL_TYPES)}",
        ),
        (
            parallel.tensor_parallel_size > 1,
            f"tensor parallelism (--tensor-parallel-size {parallel.tensor_parallel_size})",
            "full heads are not spread evenly over the GPUs; run one engine per GPU (--data-parallel-size)",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size})",
            "run one engine per GPU (--data-parallel-size)",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism",
            "leave out --decode-context-parallel-size and --prefill-context-parallel-size",
        ),
        (vllm_config.speculative_config is not None, "speculative decoding", "leave out --speculative-config"),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype})",
            "leave it at auto",
        ),
        (
            vllm_config.quant_config is not None,
            f"quantised weights ({model.quantization})",
            "heads are reordered while weights are loaded; serve a checkpoint in float32, bfloat16 or float16",
        ),
        (vllm_config.lora_config is not None, "LoRA adapters", "merge the adapter into the model"),
        (vllm_config.kv_transfer_config is not None, "KV connectors", "leave out --kv-transfer-config"),
        (
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            "--disable-hybrid-kv-cache-manager",
            "leave it out: blocks of several kinds are what saves memory",
        ),
        (
            bool(getattr(config, "dual_chunk_attention_config", None)),
            "dual chunk attention",
            "remove dual_chunk_attention_config from the model's config",
        ),
        (
            cache.sliding_window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ()),
            "sliding-window layers",
            "their heads have no full cache to reallocate",
        ),
        (cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill", "leave it out"),
        (cache.kv_offloading_size is not None, "offloading of the KV cache", "leave out --kv-offloading-size"),
    ]
