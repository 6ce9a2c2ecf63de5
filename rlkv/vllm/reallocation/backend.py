"""vLLM attention backends of head reallocation.

Full heads: the engine's own. Compressible heads: the engine's Triton kernels on a GPU, plain torch on a CPU. All need
the layout ``BLHNC``, in which a block lies in one place, because bins differ in their number of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.vllm.blocks.pieces import whole_prompts
from rlkv.vllm.paged.attention import Reads, Writes, attend_prompts, paged_local_attention, plan_reads
from rlkv.vllm.paged.backend import (
    BackendParts,
    GaplessTritonBuilder,
    TorchBackend,
    TorchBuilder,
    TorchImpl,
)

LAYOUTS = (KVCacheLayout.BLHNC,)
ANY_HEADS = ("FLASH_ATTN", "TRITON_ATTN")  # parts of a bin share metadata, and differ in their number of heads


def full_backend(stock: Attention) -> type[AttentionBackend]:
    """The backend of full heads: the engine's for the ``stock`` layer, if its metadata suit any number of heads."""
    if current_platform.is_cpu():
        return FullCPUBackend
    chosen = stock.attn_backend if stock.attn_backend.get_name() in ANY_HEADS else TritonAttentionBackend
    builder: Any = chosen.get_builder_cls()

    class FullBuilder(builder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            # a schedule of FlashAttention is for one number of heads; without it the kernel makes its own
            return super().build(common_prefix_len, common_attn_metadata, fast_build=True)

    class FullBackend(chosen):  # type: ignore[valid-type, misc]
        @staticmethod
        def get_builder_cls() -> Any:
            return FullBuilder

    return FullBackend


def local_backend() -> type[AttentionBackend]:
    """The backend of compressible heads."""
    return LocalTorchBackend if current_platform.is_cpu() else LocalTritonBackend


def bin_of(vllm_config: Any, layer_names: list[str]) -> Any:
    """The bin of a builder; its only layer."""
    (name,) = layer_names
    return vllm_config.compilation_config.static_forward_context[name]


class FullCPUBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # a schedule suits any number of heads in such groups, but has scratch for so many
        self.num_kv_heads = bin_of(vllm_config, layer_names).num_kv_heads


class FullCPUImpl(CPUAttentionBackendImpl):
    """The stock CPU kernel writes rows one after the other, whatever the output's strides are."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        *others, output = args
        if output.is_contiguous():
            return super().forward(*args, **kwargs)
        return output.copy_(super().forward(*others, torch.empty(output.shape, dtype=output.dtype), **kwargs))


class FullCPUBackend(BackendParts, CPUAttentionBackend):
    """The stock CPU kernels: they read any distance between blocks, but the stock backend does not say so."""

    impl, builder, layouts = FullCPUImpl, FullCPUBuilder, LAYOUTS
    name = CPUAttentionBackend.get_name()


LocalStep = tuple[Writes, list[Reads], list[slice]]  # what is stored, what reads the cache, and prompts, which do not


class LocalTorchBuilder(TorchBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LocalStep:
        common, rules = common_attn_metadata, bin_of(self.vllm_config, self.layer_names).gap_rules
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        prompts, prefix_R = rules.full_prompts(common, self.vllm_config), rules.prefixes(common, self.vllm_config)
        prefixes = None if prefix_R is None else prefix_R.tolist()
        reads = plan_reads(common.block_table_tensor, starts, lengths, rules.demand, prompts, prefixes)
        return Writes.of(common.slot_mapping), reads, whole_prompts(starts, prompts)


class LocalTorchImpl(TorchImpl):
    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Any, out: Tensor) -> None:
        writes, reads, prompts = step
        writes.store(key, value, kv)
        paged_local_attention(query, kv, reads, self.scale, out)
        attend_prompts(query, key, value, prompts, self.scale, out)


class LocalTorchBackend(TorchBackend):
    impl, builder, layouts = LocalTorchImpl, LocalTorchBuilder, LAYOUTS


class LocalTritonBuilder(GaplessTritonBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        gap_rules = bin_of(vllm_config, layer_names).gap_rules
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, gap_rules)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        prompts = self.gap_rules.full_prompts(common_attn_metadata, self.vllm_config)
        return self.build_local(common_attn_metadata, fast_build, prompts)


class LocalTritonImpl(TritonAttentionImpl):
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata is not None:  # the engine's profiling run has none
            attend_prompts(query, key, value, attn_metadata.prompts, self.scale, output)
        return output


class LocalTritonBackend(BackendParts, TritonAttentionBackend):
    impl, builder, layouts = LocalTritonImpl, LocalTritonBuilder, LAYOUTS
    name = TritonAttentionBackend.get_name()
