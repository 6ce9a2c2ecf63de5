"""vLLM attention backends of mixed attention: the blocks are the stock ones, of all KV heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.attention import LocalSizes
from rlkv.vllm.blocks.block_tables import GapRules
from rlkv.vllm.blocks.demand import SinkWindowDemand
from rlkv.vllm.paged.attention import MixedReads, Writes, mix_tokens, paged_mixed_attention, plan_mixed_reads
from rlkv.vllm.paged.backend import (
    AttendingImpl,
    BackendParts,
    GaplessTritonBuilder,
    TorchBackend,
    TorchBuilder,
    TorchImpl,
)


def mixed_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return MixedTorchBackend if current_platform.is_cpu() else MixedTritonBackend


class _LiveGates:
    """``alpha_H`` is a view of the model's buffer of gates: every step, also a captured one, sees updates in place."""

    alpha_H: Tensor
    sizes: LocalSizes

    def attach(self, alpha_H: Tensor, sizes: LocalSizes) -> None:
        self.alpha_H, self.sizes = alpha_H, sizes


def _demand(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> SinkWindowDemand:
    """Of the local branch of a builder's layers."""
    sizes: LocalSizes = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl.sizes
    return SinkWindowDemand(kv_cache_spec.block_size, sizes.sink, sizes.window)


MixedStep = tuple[Writes, MixedReads]


class MixedTorchBuilder(TorchBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MixedStep:
        common = common_attn_metadata
        demand = _demand(self.kv_cache_spec, self.layer_names, self.vllm_config)
        reads = plan_mixed_reads(common.block_table_tensor, common.query_start_loc_cpu, common.seq_lens, demand)
        return Writes.of(common.slot_mapping), reads


class MixedTorchImpl(_LiveGates, TorchImpl):
    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Any, out: Tensor) -> None:
        writes, reads = step
        writes.store(key, value, kv)
        paged_mixed_attention(query, kv, reads, self.alpha_H, self.scale, out)


class MixedTorchBackend(TorchBackend):
    impl, builder, layouts = MixedTorchImpl, MixedTorchBuilder, (KVCacheLayout.LBHNC,)


@dataclass
class MixedTritonMetadata(TritonAttentionMetadata):
    """The stock metadata, and that of the local branch (made once per step, not per layer)."""

    local: TritonAttentionMetadata | None = None


class MixedTritonBuilder(GaplessTritonBuilder):
    """The stock metadata for the full branch, and those without gaps for the local one."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        demand = _demand(kv_cache_spec, layer_names, vllm_config)
        gap_rules = GapRules(demand, vllm_config.model_config.max_model_len)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, gap_rules)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MixedTritonMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.local.seq_lens.fill_(1)  # as the stock builder does for the full branch
        return metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MixedTritonMetadata:
        common = common_attn_metadata
        local = self.build_local(common, fast_build)
        stock = super().build(common_prefix_len, common, fast_build)
        return MixedTritonMetadata(**vars(stock), local=local)


class MixedTritonImpl(_LiveGates, AttendingImpl, TritonAttentionImpl):
    """Both branches by the engine's Triton kernel, mixed in float32."""

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Any, out: Tensor) -> None:
        full, local = torch.empty_like(out), torch.empty_like(out)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv, step, full)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv, step.local, local)
        tokens = step.num_actual_tokens
        out[:tokens] = mix_tokens(full[:tokens], local[:tokens], self.alpha_H)


class MixedTritonBackend(BackendParts, TritonAttentionBackend):
    """Stock blocks, layouts and head sizes."""

    impl, builder = MixedTritonImpl, MixedTritonBuilder
