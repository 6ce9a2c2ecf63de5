"""vLLM attention backends of mixed attention: plain torch on a CPU, the engine's Triton kernels on a GPU.

A mixed layer has one ordinary paged cache of all its KV heads, so the engine's block management, chunked prefill,
prefix caching and preemption are the stock ones.  Two numbers more per layer (sink, window) and one vector of gates,
which is read anew in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.attention.mixed import mix
from rlkv.attention.sizes import SinkWindow
from rlkv.vllm.blocks.block_tables import GapRemover, SteadyTables, without_gap
from rlkv.vllm.blocks.demand import SinkWindowDemand
from rlkv.vllm.mixed.attention import PagedBatch, paged_mixed_attention
from rlkv.vllm.paged.torch_backend import NAME, PagedTorchBackend, PagedTorchImpl


def mixed_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return MixedTorchBackend if current_platform.is_cpu() else MixedTritonBackend


class _LiveGates:
    """What a mixed layer adds to an attention implementation.

    ``alpha_H`` is a view of the model's buffer of gates, so that an update in place is seen by the next step, also by
    a CUDA graph that was captured before it.
    """

    alpha_H: Tensor
    sizes: SinkWindow

    def attach(self, alpha_H: Tensor, sizes: SinkWindow) -> None:
        self.alpha_H, self.sizes = alpha_H, sizes


@dataclass
class TorchMetadata:
    """One step of the torch backend; ``num_actual_tokens`` is without padding."""

    num_actual_tokens: int
    batch: PagedBatch


class TorchBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Lists instead of tensors: the torch path loops over requests with several queries."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TorchMetadata:
        common = common_attn_metadata
        batch = PagedBatch(common.query_start_loc_cpu.tolist(), common.seq_lens.tolist(), common.block_table_tensor)
        return TorchMetadata(common.num_actual_tokens, batch)


class MixedTorchImpl(_LiveGates, PagedTorchImpl):
    """Attention of one layer in plain torch."""

    def attend(self, query: Tensor, kv_cache: Tensor, step: TorchMetadata, output: Tensor) -> None:
        paged_mixed_attention(query, kv_cache, step.batch, self.alpha_H, self.sizes, self.scale, output)


class MixedTorchBackend(PagedTorchBackend):
    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return MixedTorchImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TorchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


@dataclass
class MixedTritonMetadata(TritonAttentionMetadata):
    """The stock metadata, and beside it that of the local branch (made once per step, not per layer)."""

    local: TritonAttentionMetadata | None = None


class MixedTritonBuilder(TritonAttentionMetadataBuilder):
    """The local branch is the engine's attention with a visible prefix (the sinks) and a window, over block tables
    without the gap between them: it reads S + W tokens per row, not the whole past.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sizes: SinkWindow = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl.sizes
        demand = SinkWindowDemand(self.block_size, sizes.sink, sizes.window)
        rows = vllm_config.scheduler_config.max_num_seqs
        # buffers for good: a captured graph keeps their addresses
        self.gap_remover, self.tables = GapRemover(demand), SteadyTables(rows)
        self.sinks_R = torch.full((rows,), sizes.sink, dtype=torch.int32, device=device)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MixedTritonMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.local.seq_lens.fill_(1)  # as the stock builder does for the full branch
        return metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MixedTritonMetadata:
        common = common_attn_metadata
        table, lengths = self.gap_remover(
            common.block_table_tensor, common.seq_lens, common.query_start_loc, common.max_query_len
        )
        table, lengths = self.tables(table, lengths, common.block_table_tensor.shape[1])
        local = super().build(0, without_gap(common, self.gap_remover, table, lengths), fast_build)
        local.rswa_prefix_lens = self.sinks_R[: common.num_reqs]
        local.rswa_window = self.gap_remover.demand.window
        stock = super().build(common_prefix_len, common, fast_build)
        return MixedTritonMetadata(**vars(stock), local=local)


class MixedTritonImpl(_LiveGates, TritonAttentionImpl):
    """Both branches by the engine's Triton kernel, mixed in float32."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MixedTritonMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output.zero_()
        full, local = torch.empty_like(output), torch.empty_like(output)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, full)
        super().forward(layer, query, key, value, kv_cache, attn_metadata.local, local)
        tokens = attn_metadata.num_actual_tokens
        # mix() wants [rows, query heads, tokens, size]
        mixed = mix(full[:tokens].transpose(0, 1)[None], local[:tokens].transpose(0, 1)[None], self.alpha_H)
        output[:tokens] = mixed[0].transpose(0, 1)
        return output


class MixedTritonBackend(TritonAttentionBackend):
    """Stock blocks, layouts and head sizes."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return MixedTritonImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return MixedTritonBuilder
