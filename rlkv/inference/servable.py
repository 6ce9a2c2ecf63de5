"""Which models and calls ``compress`` serves, and what differs for models with sliding windows or without RoPE."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from rlkv.cache import IMPLEMENTATION, CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.dry_run import refuse_latent_attention

ATTENTION = frozenset({"full_attention", "sliding_attention"})
KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def check_servable(model: Any) -> list[int]:
    """The layers with sliding attention; ``ValueError`` if the model is compressed already or cannot be served."""
    config = model.config
    if config._attn_implementation == IMPLEMENTATION:
        raise ValueError("this model is compressed already: leave the first compress(...) before entering another")
    if any("rlkv_gate" in name for name, _ in model.named_parameters()):
        raise ValueError("this model has trainable gates attached, which compress(...) would bypass: unload them first")
    if not hasattr(model, "_prepare_cache_for_generation"):
        raise ValueError(
            f"a {type(model).__name__} cannot generate: load the model with AutoModelForCausalLM for compress(...)"
        )
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder: compress(...) serves decoders only")
    refuse_latent_attention(model)
    layers = _own_layers(config)
    kinds = sorted(set(getattr(config.get_text_config(decoder=True), "layer_types", None) or []) - ATTENTION)
    other = sorted({type(layer).__name__ for layer in layers if type(layer) not in KNOWN_LAYERS})
    if other or kinds:
        found = f"layers of kind {', '.join(kinds)}" if kinds else f"layers that are cached as {', '.join(other)}"
        raise ValueError(
            f"{config.model_type} has {found}: compress(...) serves models in which every layer has full or sliding "
            "attention over plain keys and values, such as Llama, Qwen3 or Gemma 3"
        )
    sliding = [number for number, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    if len(sliding) == len(layers):
        raise ValueError(
            f"every layer of this {config.model_type} that attends has a sliding window: there is no full KV cache to "
            "compress, so use a model with full attention in some layers"
        )
    return sliding


def default_layers(config: Any, numbers: list[int]) -> dict[int, DynamicSlidingWindowLayer]:
    """New layers of transformers' own cache for the layers ``numbers`` of the model of ``config``."""
    layers = _own_layers(config)
    return {number: layers[number] for number in numbers}


def exclude_sliding_layers(allocation: HeadAllocation, sliding: list[int], ranked: bool) -> HeadAllocation:
    """``allocation`` with the heads of the layers ``sliding`` excluded, announced by a warning.

    Raises:
        ValueError: if it was ``ranked`` from gates, whose sparsity counts heads that have no full cache.
    """
    if ranked:
        raise ValueError(
            f"{len(sliding)} layers of this model have sliding windows, whose heads have no full cache to reallocate: "
            "gates and a sparsity cannot be applied to it; pass an eviction policy alone, or a HeadAllocation"
        )
    warnings.warn(
        f"layers {', '.join(map(str, sliding))} have sliding windows and are not changed: the eviction policy serves "
        "the other layers",
        stacklevel=4,
    )
    full = allocation.full.clone()
    full[sliding] = True
    return HeadAllocation(full)


def warn_without_rope(model: Any) -> None:
    """Warn if cached keys carry no rotary position, which scores that compare keys rely on."""
    if not any("rotary" in name for name, _ in model.named_modules()):
        warnings.warn(
            f"{model.config.model_type} has no rotary position embedding: eviction works, but keys then carry position "
            "only as far as the hidden states do, so policies that compare keys (R-KV) see more tokens as repetitions",
            stacklevel=4,
        )


def refuse_attentions(asked: bool | None) -> None:
    """Raise ``ValueError`` if attention weights are asked for, which would be None."""
    if asked:
        raise ValueError("output_attentions=True: compress(...) computes no attention weights to return: leave it out")


def refuse_packed(position_ids: Tensor | None, attention_mask: Any) -> None:
    """Raise ``ValueError`` for several texts in one row, which transformers keeps apart only without a cache."""
    if position_ids is None or attention_mask is not None or position_ids.ndim != 2:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids start again within a row: compress(...) takes one text per row, so give each packed text a "
            "row of its own, or an attention_mask if the row is padded"
        )


def check_generation(config: Any, mode: GenerationMode, settings: CacheSettings) -> None:
    """Raise ``ValueError`` for a generation that would bypass the cache or break it."""
    protects, in_chunks = (settings.eviction or settings).protect_prompt, config.prefill_chunk_size is not None
    refuse_attentions(config.output_attentions)
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} would replace the compressed cache: leave it out "
            "under compress(...)"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False leaves nothing to compress: generate with the cache under compress(...)")
    if mode == GenerationMode.ASSISTED_GENERATION or config.is_assistant:
        raise ValueError("assisted generation takes tokens back, which a compressed cache cannot: leave it out")
    if in_chunks and settings.prefill != "local":
        raise ValueError(
            "prefill_chunk_size would compress the prompt between its chunks: leave it out, or use prefill='local'"
        )
    if in_chunks and protects:
        raise ValueError("prefill_chunk_size would protect the first chunk only: leave it out, or protect_prompt=False")


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> None:
    """Replaces a model's methods for continuous batching."""
    raise ValueError("continuous batching brings its own paged cache: use model.generate under compress(...)")


def _own_layers(config: Any) -> list[Any]:
    # what transformers' own cache makes of each layer is the one description that all models share
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)
