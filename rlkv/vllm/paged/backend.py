"""What rlkv's attention backends for vLLM share: on a CPU plain torch, on a GPU the engine's Triton kernels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata, TritonAttentionMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.vllm.blocks.block_tables import GapRemover, SteadyTables
from rlkv.vllm.paged.attention import write_cache


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On ``device``, and to a GPU without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class BackendParts(AttentionBackend):
    """A backend whose parts are attributes; ``layouts`` None: those of the next base class."""

    impl: type[AttentionImpl]
    builder: type[AttentionMetadataBuilder]
    layouts: tuple[KVCacheLayout, ...] | None = None
    name = "CUSTOM"  # the engine looks the name up in its own enumeration of backends

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return cls.builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return super().supported_kv_cache_layouts() if cls.layouts is None else cls.layouts


class TorchBackend(BackendParts):
    """Any head size, any block size."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (as in the base class)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class TorchBuilder(AttentionMetadataBuilder[Any]):
    # abstract in the base class
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class AttendingImpl(AttentionImpl):
    """One layer; subclasses write its attention."""

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
        if attn_metadata is None:  # the engine's profiling run
            return output.zero_()
        self.attend(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    @abstractmethod
    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Any, out: Tensor) -> None:
        """Write the attention of ``query`` ``[tokens, query heads, size]`` to ``out``; ``step``: the metadata.

        Keys and values are in the cache ``kv``, unless ``forward_includes_kv_cache_update``.
        """


class TorchImpl(AttendingImpl):
    """One layer in plain torch."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kw: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        write_cache(key, value, kv_cache, slot_mapping)


class GaplessTritonBuilder(TritonAttentionMetadataBuilder):
    """Metadata of the stock kernel with its mask "the first S or the last W", over block tables without gaps.

    It reads S + W tokens per row, not the whole past. Graphs are captured of steps with one token per request: their
    tables are short, and in permanent buffers, whose addresses a graph keeps.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        gap_remover: GapRemover,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        self.gap_remover, self.steady = gap_remover, SteadyTables(rows, gap_remover.width(1), device)
        self.sinks_R = torch.full((rows,), gap_remover.demand.sink, dtype=torch.int32, device=device)

    def without_gaps(self, common: Any) -> Any:
        """A step's metadata (vLLM's) over tables without gaps."""
        remover, queries = self.gap_remover, common.max_query_len
        table, lengths = remover(common.block_table_tensor, common.seq_lens, common.query_start_loc, queries)
        if queries == 1:
            table, lengths = self.steady(table, lengths)
        return common.replace(
            block_table_tensor=table,
            seq_lens=lengths,
            max_seq_len=min(common.max_seq_len, table.shape[1] * remover.demand.block_size),
            rswa_prefix_lens=None,  # stated for rlkv alone: the stock builder has no use for them
        )

    def build_local(self, own: Any, prefix_R: Tensor, fast_build: bool) -> TritonAttentionMetadata:
        """For the step ``own`` without gaps; ``prefix_R``: first tokens that each request sees."""
        metadata = super().build(0, own, fast_build)
        metadata.rswa_prefix_lens, metadata.rswa_window = prefix_R, self.gap_remover.demand.window
        return metadata
