"""Which models and calls ``compress`` serves, and what differs for models with sliding windows or without RoPE."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from rlkv.cache import IMPLEMENTATION, CacheSettings
from rlkv.gates.allocation import HeadAllocation


def check_servable(model: Any) -> list[int]:
    """The layers with sliding attention; ``ValueError`` if the model is compressed already or cannot be served."""
    config = model.config
    if config._attn_implementation == IMPLEMENTATION:
        raise ValueError("this model is compressed already: leave the first compress(...) before entering another")
    if any("rlkv_gate" in name for name, _ in model.named_parameters()):
        raise ValueError("this model has trainable gates attached, which compress(...) would bypass: unload them first")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder: compress(...) serves decoders only")
    layers = _own_layers(model)
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    other = sorted({type(layer).__name__ for layer in layers if type(layer) not in known})
    if other:
        raise ValueError(
            f"{config.model_type} has layers without attention to cached tokens (cached as {', '.join(other)}): "
            "compress(...) serves models in which every layer has full or sliding attention"
        )
    sliding = [number for number, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    if len(sliding) == len(layers):
        raise ValueError(
            f"every layer of this {config.model_type} has a sliding window: there is no full KV cache to compress"
        )
    return sliding


def default_layers(model: Any, numbers: list[int]) -> dict[int, DynamicSlidingWindowLayer]:
    """New layers of transformers' own cache for the layers ``numbers`` of the model."""
    layers = _own_layers(model)
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


def check_generation(config: Any, mode: GenerationMode, settings: CacheSettings) -> None:
    """Raise ``ValueError`` for a generation that would bypass the cache or break it."""
    protects, in_chunks = (settings.eviction or settings).protect_prompt, config.prefill_chunk_size is not None
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


def _own_layers(model: Any) -> list[Any]:
    # what transformers' own cache makes of each layer is the one description that all models share
    return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)
