"""Writing keys and values into a paged KV cache."""

from __future__ import annotations

from torch import Tensor


def write_cache(key_THD: Tensor, value_THD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Put token t into slot ``slots_T[t]`` of the cache; slot = block * N + place in the block, below 0: padding."""
    tokens = len(slots_T)
    size = key_THD.shape[-1]
    block, place = slots_T // cache.shape[2], slots_T % cache.shape[2]
    if bool((slots_T < 0).any()):
        kept = slots_T >= 0
        key_THD, value_THD = key_THD[:tokens][kept], value_THD[:tokens][kept]
        block, place, tokens = block[kept], place[kept], int(kept.sum())
    cache[block, :, place, :size] = key_THD[:tokens].to(cache.dtype)
    cache[block, :, place, size:] = value_THD[:tokens].to(cache.dtype)
