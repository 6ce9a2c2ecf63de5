"""vLLM attention backends of mixed attention: plain torch on a CPU, the engine's Triton kernels on a GPU.

A mixed layer has one ordinary paged cache of all its KV heads, so the engine's block management, chunked prefill,
prefix caching and preemption are the stock ones.  A layer has in addition two numbers (sink, window) and a vector of
gates, which is read again in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.attention import LocalSizes
from rlkv.attention.mixed import mix
from rlkv.vllm.blocks.block_tables import GapRemover, SteadyTables, without_gap
from rlkv.vllm.blocks.demand import SinkWindowDemand
from rlkv.vllm.mixed.attention import MixedReads, paged_mixed_attention, plan_mixed_reads
from rlkv.vllm.paged.backend import AttendingImpl, BackendParts, TorchBackend, TorchBuilder, TorchImpl


def mixed_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return MixedTorchBackend if current_platform.is_cpu() else MixedTritonBackend


class _LiveGates:
    """What a mixed layer adds to an attention implementation.

    ``alpha_H`` is a view of the model's buffer of gates, so that an update in place is seen by the next step, also by
    a CUDA graph that was captured before it.
    """

    alpha_H: Tensor
    sizes: LocalSizes

    def attach(self, alpha_H: Tensor, sizes: LocalSizes) -> None:
        self.alpha_H, self.sizes = alpha_H, sizes


def _gap_remover(builder: Any) -> GapRemover:
    """For the local branch of a builder's layers."""
    layers = builder.vllm_config.compilation_config.static_forward_context
    sizes: LocalSizes = layers[builder.layer_names[0]].impl.sizes
    return GapRemover(SinkWindowDemand(builder.kv_cache_spec.block_size, sizes.sink, sizes.window))


class MixedTorchBuilder(TorchBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MixedReads:
        common, gap_remover = common_attn_metadata, _gap_remover(self)
        return plan_mixed_reads(common.block_table_tensor, common.query_start_loc_cpu, common.seq_lens, gap_remover)


class MixedTorchImpl(_LiveGates, TorchImpl):
    """Attention of one layer in plain torch."""

    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: MixedReads, output: Tensor
    ) -> None:
        paged_mixed_attention(query, kv_cache, step, self.alpha_H, self.scale, output)


class MixedTorchBackend(TorchBackend):
    impl, builder, layouts = MixedTorchImpl, MixedTorchBuilder, (KVCacheLayout.LBHNC,)


@dataclass
class MixedTritonMetadata(TritonAttentionMetadata):
    """The stock metadata, and that of the local branch (made once per step, not per layer)."""

    local: TritonAttentionMetadata | None = None


class MixedTritonBuilder(TritonAttentionMetadataBuilder):
    """The local branch is the engine's attention with a visible prefix (the sinks) and a window, over block tables
    without the gap between them: it reads S + W tokens per row, not the whole past.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        # permanent buffers: a captured graph keeps their addresses
        self.gap_remover, self.tables = _gap_remover(self), SteadyTables(rows)
        self.sinks_R = torch.full((rows,), self.gap_remover.demand.sink, dtype=torch.int32, device=device)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MixedTritonMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.local.seq_lens.fill_(1)  # as the stock builder does for the full branch
        return metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MixedTritonMetadata:
        common = common_attn_metadata
        table, lengths = self.tables(*self.gap_remover.of_step(common), common.block_table_tensor.shape[1])
        local = super().build(0, without_gap(common, self.gap_remover, table, lengths), fast_build)
        local.rswa_prefix_lens = self.sinks_R[: common.num_reqs]
        local.rswa_window = self.gap_remover.demand.window
        stock = super().build(common_prefix_len, common, fast_build)
        return MixedTritonMetadata(**vars(stock), local=local)


class MixedTritonImpl(_LiveGates, AttendingImpl, TritonAttentionImpl):
    """Both branches by the engine's Triton kernel, mixed in float32."""

    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: Any, output: Tensor
    ) -> None:
        full, local = torch.empty_like(output), torch.empty_like(output)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv_cache, step, full)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv_cache, step.local, local)
        tokens = step.num_actual_tokens
        # mix() wants [rows, query heads, tokens, size]
        mixed = mix(full[:tokens].transpose(0, 1)[None], local[:tokens].transpose(0, 1)[None], self.alpha_H)
        output[:tokens] = mixed[0].transpose(0, 1)


class MixedTritonBackend(BackendParts, TritonAttentionBackend):
    """Stock blocks, layouts and head sizes."""

    impl, builder = MixedTritonImpl, MixedTritonBuilder
