"""Decoding at the 8B shape with transformers' own cache and at two sparsities: tokens per second
and memory.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers import DynamicCache

from rlkv.benchmarks.check import llama8b
from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.common import KERNEL, TimingConfig
from rlkv.benchmarks.decode import STOCK, Variant, realloc_variant, take_turn
from rlkv.rollout.footprint import GIB

BATCHES, CONTEXT, CONTEXT_ON_CPU = (1, 8), 4096, 256
SPARSITY, SINK, WINDOW = 0.5, 16, 64


def run(setting: Setting, found: Findings) -> None:
    context = CONTEXT if setting.on_gpu else CONTEXT_ON_CPU
    model, sizes = llama8b.build(setting, found, context + 64)
    config = TimingConfig(**asdict(sizes), max_steps=16)
    # heads that keep all, and all heads
    heads, total = sizes.layers * sizes.kv_heads // 2, sizes.layers * sizes.kv_heads
    share = (heads * context + (total - heads) * (SINK + WINDOW)) / (total * context)
    for rows in BATCHES:
        variants = [Variant(STOCK, "sdpa", DynamicCache, context)]
        for kernel in (False, True) if setting.on_gpu else (False,):
            for sparsity in (0.0, SPARSITY):
                name = f"sparsity {sparsity:g}{KERNEL * kernel}"
                variants.append(
                    realloc_variant(config, name, context, sparsity, SINK, WINDOW, kernel)
                )
        for variant in variants:
            found.new_peak(setting)
            row = _measure(model, variant, rows, config)
            found.details.append(row)
            shown = {"tokens/s": row["tokens_per_s"], "GiB": row.get("peak_gib")}
            name = f"{variant.name}, batch {rows}"
            found.figures |= {
                f"{name}: {unit}": value for unit, value in shown.items() if value is not None
            }
        held = variants[-1].kv_bytes / variants[0].kv_bytes
        found.require(
            abs(held - share) < 1e-9,
            f"sparsity {SPARSITY:g} holds {held:.2%} of the KV bytes, not {share:.2%}",
        )


def _measure(model: Any, variant: Variant, rows: int, config: TimingConfig) -> dict[str, Any]:
    take_turn(model, variant, rows, config)
    row = {
        "cache": variant.name,
        "batch": rows,
        "context": variant.context,
        "ms_per_step": variant.milliseconds(),
    }
    row |= {"tokens_per_s": 1000 * rows / variant.milliseconds(), "kv_bytes": variant.kv_bytes}
    device = model.device
    return row | (
        {"peak_gib": torch.cuda.max_memory_allocated(device) / GIB} if device.type == "cuda" else {}
    )


CHECK = Check(
    "decode",
    "A decode step at the 8B shape: tokens per second, and the bytes that sparsity 0.5 leaves.",
    run,
)
