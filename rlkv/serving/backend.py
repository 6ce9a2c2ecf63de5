"""vLLM attention backends of head reallocation.

Full heads: the engine's own backend. Compressible heads: the engine's Triton kernels on a GPU, plain torch on a CPU,
both over compacted block tables. All need the layout in which a block holds all its layers side by side
(``BLHNC``), because parts differ in their number of heads.
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
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.serving.compaction import Compactor, without_gap
from rlkv.serving.local_attention import Reads, paged_local_attention, plan_reads
from rlkv.serving.report import check_block_bytes
from rlkv.serving.torch_backend import PagedTorchBackend, PagedTorchImpl

LAYOUTS = (KVCacheLayout.BLHNC,)


def full_backend() -> type[AttentionBackend] | None:
    """The backend of full heads; None leaves the choice to the engine."""
    return PackedCPUBackend if current_platform.is_cpu() else None


def local_backend() -> type[AttentionBackend]:
    """The backend of compressible heads."""
    return LocalTorchBackend if current_platform.is_cpu() else LocalTritonBackend


class PackedCPUBackend(CPUAttentionBackend):
    """The stock CPU kernels: they read any distance between blocks, but the stock backend does not say so."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return PackedCPUImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS


class PackedCPUImpl(CPUAttentionBackendImpl):
    """The stock CPU kernel writes rows one after the other, whatever the output's strides are."""

    def forward(self, *args: Any, output: Tensor, **kwargs: Any) -> Tensor:
        if output.is_contiguous():
            return super().forward(*args, output=output, **kwargs)
        return output.copy_(super().forward(*args, output=torch.empty(output.shape, dtype=output.dtype), **kwargs))


def _compactor(vllm_config: Any, layer_names: list[str]) -> Compactor:
    """The one that all layers of the bin share; the model put it there (:mod:`rlkv.serving.reallocation`)."""
    layers = vllm_config.compilation_config.static_forward_context
    check_block_bytes(vllm_config, layers[layer_names[0]])
    return layers[layer_names[0]].compactor


@dataclass
class LocalMetadata:
    """One step; ``num_actual_tokens`` is without padding."""

    num_actual_tokens: int
    reads: list[Reads]


class LocalTorchBuilder(AttentionMetadataBuilder[LocalMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LocalMetadata:
        common = common_attn_metadata
        compactor = _compactor(self.vllm_config, self.layer_names)
        table, lengths = compactor.of_step(common)
        reads = plan_reads(table, common.query_start_loc_cpu.tolist(), lengths.tolist(), compactor.use)
        return LocalMetadata(common.num_actual_tokens, reads)


class LocalTorchImpl(PagedTorchImpl):
    """Sinks and window in plain torch."""

    def attend(self, query: Tensor, kv_cache: Tensor, step: LocalMetadata, output: Tensor) -> None:
        paged_local_attention(query, kv_cache, step.reads, self.scale, output)


class LocalTorchBackend(PagedTorchBackend):
    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return LocalTorchImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return LocalTorchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS


class LocalTritonBuilder(TritonAttentionMetadataBuilder):
    """The stock metadata with compacted tables, and the stock kernel's "prefix or window" mask switched on."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    sinks_R: Tensor | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        common = common_attn_metadata
        compactor = _compactor(self.vllm_config, self.layer_names)
        table, lengths = compactor.of_step(common)
        metadata = super().build(0, without_gap(common, compactor, table, lengths), fast_build)
        metadata.rswa_prefix_lens = self._sinks(compactor, common.num_reqs)
        metadata.rswa_window = compactor.use.window
        return metadata

    def _sinks(self, compactor: Compactor, requests: int) -> Tensor:
        """S for every request, always at the same place."""
        if self.sinks_R is None:
            self.sinks_R = torch.full((compactor.rows,), compactor.use.sink, dtype=torch.int32, device=self.device)
        return self.sinks_R[:requests]


class LocalTritonBackend(TritonAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return LocalTritonBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS
