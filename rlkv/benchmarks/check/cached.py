"""The cache of the deployed model on the device against float64 on the CPU, which reads the text at
once.
"""

from __future__ import annotations

import copy
from typing import Any

from rlkv.benchmarks.check.mixed import gated
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.check.twins import (
    SINK,
    WINDOW,
    Twins,
    compare,
    error_of,
    read_at_once,
    read_by_tokens,
    summarise,
)
from rlkv.benchmarks.common import KERNEL
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.gates.allocation import HeadAllocation

SPARSITIES = (0.0, 0.5, 1.0)


def run(setting: Setting, found: Findings) -> None:
    twins = Twins.make(setting)
    served: Any = copy.deepcopy(twins.own)
    served.set_attn_implementation(IMPLEMENTATION)
    for texts in twins.texts():
        everything = read_at_once(twins.exact, texts)
        stock = error_of(read_at_once(twins.own, texts), everything, texts)
        for sparsity in SPARSITIES:
            name = f"sparsity {sparsity:g}, {len(texts.ids)} rows"
            full = HeadAllocation.random(
                twins.sizes.layers, twins.sizes.kv_heads, sparsity, seed=0
            ).full
            # full heads are gates of 1, compressible ones gates of 0
            wanted = (
                read_at_once(gated(twins.exact, full.double()), texts) if sparsity else everything
            )
            for kernel in (False, True) if setting.on_gpu else (False,):
                cache = HeadReallocationCache(full, SINK, WINDOW, prefill="local")
                cache.state.decode_kernel = kernel
                error = error_of(read_by_tokens(served, texts, cache), wanted, texts)
                compare(found, name + KERNEL * kernel, error, stock)
                share = cache.used_nbytes() / cache.full_nbytes()
                held = f"{name}: holds {share:.0%} of the bytes of the full cache"
                found.require((share < 1) == (sparsity > 0), held)
    summarise(found)


CHECK = Check(
    "cache",
    "Decoding with the cache equals reading at once; at sparsity 0 it equals the full cache.",
    run,
)
