"""A Llama of the 8B shape with random weights, made on the device, with as many layers as fit its
memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlkv.attention import LocalSizes
from rlkv.benchmarks.check.one import CannotRun, Findings, Setting
from rlkv.benchmarks.common import LlamaSizes
from rlkv.rollout.footprint import GIB, free_memory

FULL = LlamaSizes(
    layers=32,
    hidden=4096,
    intermediate=14336,
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
)
ON_CPU = LlamaSizes(
    layers=2, hidden=64, intermediate=96, query_heads=8, kv_heads=2, head_dim=16, vocabulary=128
)
RESERVE_GIB = 10.0  # for what runs on it: an update of 8k tokens, the KV of 16 rows
GATES, GATES_ON_CPU = LocalSizes(128, 256), LocalSizes(16, 32)  # those of training


def layers_that_fit(sizes: LlamaSizes, free: int) -> int:
    """Layers whose 16-bit weights leave ``RESERVE_GIB`` of ``free`` bytes, at most all; 0 or less:
    too small.
    """
    attention = 2 * sizes.hidden * sizes.head_dim * (sizes.query_heads + sizes.kv_heads)
    layer = attention + 3 * sizes.hidden * sizes.intermediate
    outside = 2 * sizes.vocabulary * sizes.hidden
    return min(sizes.layers, int((free - RESERVE_GIB * GIB) / 2 - outside) // layer)


def build(setting: Setting, found: Findings, positions: int) -> tuple[Any, LlamaSizes]:
    """The model in eval mode for texts of up to ``positions`` tokens, and its sizes.

    Notes its layers.
    """
    sizes, free = ON_CPU, free_memory(setting.device)
    if free is not None:
        sizes = replace(FULL, layers=layers_that_fit(FULL, free))
        if sizes.layers < 1:
            raise CannotRun(
                f"{free / GIB:.0f} GiB of GPU memory are free, less than a layer of the 8B shape "
                "needs"
            )
    torch.manual_seed(0)
    with setting.device:
        model: Any = AutoModelForCausalLM.from_config(sizes.llama(positions), dtype=setting.dtype)
    found.figures["layers"] = sizes.layers
    return model.eval(), sizes
