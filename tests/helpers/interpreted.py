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
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

# some kernels choose their number of warps by it
torch.cuda.get_device_capability = lambda device=None: (9, 0)

# of the layer that all paths are compared on
KV_HEADS, GROUPS, SIZE, IN_BLOCK = 2, 3, 32, 16
QUERY_HEADS = KV_HEADS * GROUPS


def make_implementation(kind: Any, scale: float) -> Any:
    return kind(QUERY_HEADS, SIZE, scale, KV_HEADS, None, None, "auto")


def make_layer(implementation: Any, **others: Any) -> SimpleNamespace:
    one = torch.ones(())
    return SimpleNamespace(impl=implementation, _q_scale=one, _k_scale=one, _v_scale=one, **others)


def make_builder(kind: Any, layer: Any, tokens: int, rswa_window: int | None = None) -> Any:
    """Make a builder of metadata, with what it reads of an engine's configuration."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: QUERY_HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: SIZE,
        rswa_window=rswa_window,
        model_arch_config=SimpleNamespace(rswa_window=rswa_window),
        max_model_len=tokens,
    )
    config = SimpleNamespace(
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
    sizes = {"block_size": IN_BLOCK, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    spec = FullAttentionSpec(**sizes, dtype=torch.float32)
    return kind(spec, ["layer"], config, torch.device("cpu"))


def step_metadata(
    table: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, tokens: int, **others: Any
) -> CommonAttentionMetadata:
    """Make what the engine says about a step of so many tokens, none of which is stored."""
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64),
        **others,
    )
