"""Kernels of the CUDA path on a CPU, through the Triton interpreter.

Import this before anything of vLLM, which switches Triton off where there is no GPU: it is switched
on before anything imports the kernels.
"""

# ruff: noqa: E402  (the switch has to come between the imports)
from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl
import vllm.triton_utils as switch
from triton.language.core import _aggregate
from triton.language.extra import libdevice

switch.triton, switch.tl, switch.HAS_TRITON = triton, tl, True
switch.tldevice, switch.aggregate = libdevice, _aggregate

for name in [
    name for name in sys.modules if "triton_" in name and name.startswith("vllm.v1.attention")
]:
    del sys.modules[name]

import torch
from vllm.config import CUDAGraphMode

torch.cuda.get_device_capability = lambda device=None: (
    9,
    0,
)  # some kernels choose their number of warps by it


def fake_config(
    layer: object,
    query_heads: int,
    kv_heads: int,
    size: int,
    tokens: int,
    rswa_window: int | None = None,
) -> Any:
    """Make what builders of metadata read of an engine's configuration, for one layer."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: query_heads,
        get_num_kv_heads=lambda parallel: kv_heads,
        get_head_size=lambda: size,
        rswa_window=rswa_window,
        model_arch_config=SimpleNamespace(rswa_window=rswa_window),
        max_model_len=tokens,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=None,
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=tokens),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.NONE,
            static_forward_context={"layer": layer},
            cudagraph_capture_sizes=None,
        ),
    )
