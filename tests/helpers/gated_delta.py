"""The engine's gated delta rule in float32: its kernels for CPUs take bfloat16 alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType
from vllm.utils.torch_utils import _resolve_layer_name as resolve_layer_name


def gated_delta_core(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """Fill ``core_attn_out`` as the engine's own operator, token by token."""
    context = get_forward_context()
    layer = context.no_compile_layers[resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # the engine's profiling run
        return
    step: Any = context.attn_metadata[layer.prefix]
    starts = step.non_spec_query_start_loc.tolist()
    slots = step.non_spec_state_indices_tensor.tolist()
    known = step.has_initial_state
    for row in range(step.num_decodes + step.num_prefills):
        own = slice(starts[row], starts[row + 1])
        begins = row >= step.num_decodes and not bool(known[row])
        for state in layer.kv_cache:
            if begins:
                state[slots[row]] = 0
        convolved = _convolve(layer, mixed_qkv[own], layer.kv_cache[0][slots[row]])
        query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(convolved))
        state = layer.kv_cache[1][slots[row]]
        core_attn_out[own] = _recur(layer, query, key, value, a[own], b[own], state)


def _convolve(layer: Any, states: Tensor, last: Tensor) -> Tensor:
    """Convolve ``[n, C]`` causally; ``last`` holds what came before and is overwritten."""
    seen = torch.cat([last, states])
    out = F.conv1d(seen.T[None], layer.conv1d.weight, layer.conv1d.bias, groups=seen.shape[1])
    last.copy_(seen[-len(last) :])
    return F.silu(out[0].T)


def _recur(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Tensor:
    """Read and write the state ``[H, value, key]`` for each token in turn."""
    heads = value.shape[1] // key.shape[1]
    size = key.shape[-1]
    query = _normalised(query).repeat_interleave(heads, 1) * size**-0.5
    key = _normalised(key).repeat_interleave(heads, 1)
    decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).exp()
    strength = b.sigmoid()
    out = torch.empty_like(value)
    for token in range(len(value)):
        state *= decay[token, :, None, None]
        missing = value[token] - (state @ key[token, :, :, None]).squeeze(-1)
        state += (missing * strength[token, :, None])[:, :, None] * key[token, :, None]
        out[token] = (state @ query[token, :, :, None]).squeeze(-1)
    return out


def _normalised(states: Tensor) -> Tensor:
    return states * (states.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def compute_in_float32() -> None:
    """Put it in the place of the engine's operator, in this process and before its first model."""
    gdn_attention.cpu_gdn_attention_core = gated_delta_core
