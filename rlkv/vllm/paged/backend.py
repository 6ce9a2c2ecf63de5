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

from rlkv.utils.gpu import moved
from rlkv.vllm.blocks.block_tables import GapRules, SteadyTables
from rlkv.vllm.blocks.pieces import QUERIES_AT_ONCE, cut_step, whole_prompts
from rlkv.vllm.paged.gapless_tables import cut_gaps


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

    forward_includes_kv_cache_update = True
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
        gap_rules: GapRules,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        self.gap_rules, self.steady = gap_rules, SteadyTables(rows, gap_rules.width(1), device)
        self.prefix_R = torch.full((rows,), gap_rules.demand.sink, dtype=torch.int32, device=device)

    def build_local(
        self, common: Any, fast_build: bool = False, prompts: list[int] | None = None
    ) -> TritonAttentionMetadata:
        """For a step's metadata (vLLM's) over tables without gaps; ``prompts``: as of :func:`cut_step`.

        Requests with many queries, and prompts, are cut into pieces. The metadata's ``prompts`` are of
        :func:`whole_prompts`: the stock kernel writes zeros there. Nothing waits for the GPU.
        """
        rules, decoding = self.gap_rules, common.max_query_len == 1  # a prompt of one token sees itself only
        if (own_R := rules.prefixes(common, self.vllm_config)) is not None:  # rows of padding may have none
            self.prefix_R[: len(own_R)].copy_(moved(own_R, self.device))
        own, prefix_R, queries = common, self.prefix_R[: common.num_reqs], common.max_query_len
        if not decoding and (prompts or queries > QUERIES_AT_ONCE):
            queries = min(queries, QUERIES_AT_ONCE)
            own, prefix_R = self._in_pieces(common, prefix_R, prompts)
        width = rules.width(queries, min(max(prompts or (0,)), QUERIES_AT_ONCE))
        table, lengths = self._without_gaps(own, prefix_R, width, decoding)
        own = own.replace(
            block_table_tensor=table,
            seq_lens=lengths,
            max_query_len=queries,
            max_seq_len=min(common.max_seq_len, table.shape[1] * rules.demand.block_size),
            rswa_prefix_lens=None,  # stated for rlkv alone: the stock builder has no use for them
        )
        metadata = super().build(0, own, fast_build)
        metadata.rswa_prefix_lens, metadata.rswa_window = prefix_R, rules.demand.window
        metadata.prompts = whole_prompts(common.query_start_loc_cpu.tolist(), prompts) if prompts else []
        return metadata

    def _without_gaps(self, common: Any, prefix_R: Tensor, width: int, decoding: bool) -> tuple[Tensor, Tensor]:
        """The step's table and lengths; while decoding in the permanent buffers."""
        table, lengths, demand = common.block_table_tensor, common.seq_lens, self.gap_rules.demand
        sizes = len(table), min(width, table.shape[1])
        out = self.steady(*sizes) if decoding else (table.new_empty(sizes), lengths.new_empty(sizes[0]))
        cut_gaps(table, lengths, common.query_start_loc, prefix_R, demand.block_size, demand.window, out)
        return out

    def _in_pieces(self, common: Any, prefix_R: Tensor, prompts: list[int] | None) -> tuple[Any, Tensor]:
        """The step with each piece as a request of its own over the same blocks, and the prefix that each sees."""
        pieces = cut_step(common.query_start_loc_cpu.tolist(), prompts)
        reading = [(*piece, piece.reads_cache) for piece in pieces]
        row_P, end_P, prompt_P, reads_P = torch.tensor(reading, dtype=torch.int32).unbind(1)
        cuts = torch.cat([end_P.new_zeros(1), end_P])
        row_P, on_device, prompt_P, reads_P = (
            moved(tensor, self.device) for tensor in (row_P.long(), cuts, prompt_P, reads_P)
        )
        behind_P = common.query_start_loc[1:][row_P] - on_device[1:]  # queries of the same request that come after
        split = common.replace(
            block_table_tensor=common.block_table_tensor[row_P],
            seq_lens=(common.seq_lens[row_P] - behind_P) * reads_P,  # without entries the kernel reads none
            query_start_loc=on_device,
            query_start_loc_cpu=cuts,
            num_reqs=len(pieces),
        )
        return split, torch.maximum(prefix_R[row_P], prompt_P)
