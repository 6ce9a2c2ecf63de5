"""What rlkv's attention backends for vLLM share: on a CPU plain torch, on a GPU the engine's Triton
kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.attention import LocalSizes
from rlkv.utils.devices import moved
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import (
    QUERIES_AT_ONCE,
    GapRules,
    MixedReads,
    Reads,
    SteadyTables,
    Writes,
    attend_prompts,
    cut_gaps,
    cut_step,
    mix_tokens,
    paged_local_attention,
    paged_mixed_attention,
    plan_mixed_reads,
    plan_reads,
    whole_prompts,
)


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
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
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
    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        step: Any,
        out: Tensor,
    ) -> None:
        """Write the attention of ``query`` ``[tokens, query heads, size]`` to ``out``; ``step``:
        the metadata.

        Keys and values are in the cache ``kv``, unless ``forward_includes_kv_cache_update``.
        """


class TorchImpl(AttendingImpl):
    """One layer in plain torch."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kw: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = (
            num_heads,
            head_size,
            float(scale),
            num_kv_heads,
        )


class GaplessTritonBuilder(TritonAttentionMetadataBuilder):
    """Metadata of the stock kernel with its mask "the first S or the last W", over block tables
    without gaps.

    It reads S + W tokens per row, not the whole past. Graphs are captured of steps with one token
    per request: their tables are short, and in permanent buffers, whose addresses a graph keeps.
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
        """For a step's metadata (vLLM's) over tables without gaps; ``prompts``: as of
        :func:`cut_step`.

        Requests with many queries, and prompts, are cut into pieces. The metadata's ``prompts`` are
        of :func:`whole_prompts`: the stock kernel writes zeros there. Nothing waits for the GPU.
        """
        rules, decoding = (
            self.gap_rules,
            common.max_query_len == 1,
        )  # a prompt of one token sees itself only
        if (
            own_R := rules.prefixes(common, self.vllm_config)
        ) is not None:  # rows of padding may have none
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
        metadata.prompts = (
            whole_prompts(common.query_start_loc_cpu.tolist(), prompts) if prompts else []
        )
        return metadata

    def _without_gaps(
        self, common: Any, prefix_R: Tensor, width: int, decoding: bool
    ) -> tuple[Tensor, Tensor]:
        """The step's table and lengths; while decoding in the permanent buffers."""
        table, lengths, demand = common.block_table_tensor, common.seq_lens, self.gap_rules.demand
        sizes = len(table), min(width, table.shape[1])
        out = (
            self.steady(*sizes)
            if decoding
            else (table.new_empty(sizes), lengths.new_empty(sizes[0]))
        )
        cut_gaps(
            table, lengths, common.query_start_loc, prefix_R, demand.block_size, demand.window, out
        )
        return out

    def _in_pieces(
        self, common: Any, prefix_R: Tensor, prompts: list[int] | None
    ) -> tuple[Any, Tensor]:
        """The step with each piece as a request of its own over the same blocks, and the prefix
        that each sees.
        """
        pieces = cut_step(common.query_start_loc_cpu.tolist(), prompts)
        reading = [(*piece, piece.reads_cache) for piece in pieces]
        row_P, end_P, prompt_P, reads_P = torch.tensor(reading, dtype=torch.int32).unbind(1)
        cuts = torch.cat([end_P.new_zeros(1), end_P])
        row_P, on_device, prompt_P, reads_P = (
            moved(tensor, self.device) for tensor in (row_P.long(), cuts, prompt_P, reads_P)
        )
        behind_P = (
            common.query_start_loc[1:][row_P] - on_device[1:]
        )  # queries of the same request that come after
        split = common.replace(
            block_table_tensor=common.block_table_tensor[row_P],
            seq_lens=(common.seq_lens[row_P] - behind_P)
            * reads_P,  # without entries the kernel reads none
            query_start_loc=on_device,
            query_start_loc_cpu=cuts,
            num_reqs=len(pieces),
        )
        return split, torch.maximum(prefix_R[row_P], prompt_P)


def mixed_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return MixedTorchBackend if current_platform.is_cpu() else MixedTritonBackend


class _LiveGates:
    """``alpha_H`` is a view of the model's buffer of gates: every step, also a captured one, sees
    updates in place.
    """

    alpha_H: Tensor
    sizes: LocalSizes

    def attach(self, alpha_H: Tensor, sizes: LocalSizes) -> None:
        self.alpha_H, self.sizes = alpha_H, sizes


def _demand(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> SinkWindowDemand:
    """Of the local branch of a builder's layers."""
    sizes: LocalSizes = vllm_config.compilation_config.static_forward_context[
        layer_names[0]
    ].impl.sizes
    return SinkWindowDemand(kv_cache_spec.block_size, sizes.sink, sizes.window)


MixedStep = tuple[Writes, MixedReads]


class MixedTorchBuilder(TorchBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MixedStep:
        common = common_attn_metadata
        demand = _demand(self.kv_cache_spec, self.layer_names, self.vllm_config)
        reads = plan_mixed_reads(
            common.block_table_tensor, common.query_start_loc_cpu, common.seq_lens, demand
        )
        return Writes.of(common.slot_mapping), reads


class MixedTorchImpl(_LiveGates, TorchImpl):
    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        step: Any,
        out: Tensor,
    ) -> None:
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

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        demand = _demand(kv_cache_spec, layer_names, vllm_config)
        gap_rules = GapRules(demand, vllm_config.model_config.max_model_len)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, gap_rules)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MixedTritonMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.local.seq_lens.fill_(1)  # as the stock builder does for the full branch
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MixedTritonMetadata:
        common = common_attn_metadata
        local = self.build_local(common, fast_build)
        stock = super().build(common_prefix_len, common, fast_build)
        return MixedTritonMetadata(**vars(stock), local=local)


class MixedTritonImpl(_LiveGates, AttendingImpl, TritonAttentionImpl):
    """Both branches by the engine's Triton kernel, mixed in float32."""

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        step: Any,
        out: Tensor,
    ) -> None:
        full, local = torch.empty_like(out), torch.empty_like(out)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv, step, full)
        TritonAttentionImpl.forward(self, layer, query, key, value, kv, step.local, local)
        tokens = step.num_actual_tokens
        out[:tokens] = mix_tokens(full[:tokens], local[:tokens], self.alpha_H)


class MixedTritonBackend(BackendParts, TritonAttentionBackend):
    """Stock blocks, layouts and head sizes."""

    impl, builder = MixedTritonImpl, MixedTritonBuilder


LAYOUTS = (KVCacheLayout.BLHNC,)
ANY_HEADS = (
    "FLASH_ATTN",
    "TRITON_ATTN",
)  # parts of a bin share metadata, and differ in their number of heads


def full_backend(stock: Attention) -> type[AttentionBackend]:
    """The backend of full heads: the engine's for the ``stock`` layer, if its metadata suit any
    number of heads.
    """
    if current_platform.is_cpu():
        return FullCPUBackend
    chosen = (
        stock.attn_backend if stock.attn_backend.get_name() in ANY_HEADS else TritonAttentionBackend
    )
    builder: Any = chosen.get_builder_cls()

    class FullBuilder(builder):
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            # a schedule of FlashAttention is for one number of heads; without it the kernel makes
            # its own
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
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # a schedule suits any number of heads in such groups, but has scratch for so many
        self.num_kv_heads = bin_of(vllm_config, layer_names).num_kv_heads


class FullCPUImpl(CPUAttentionBackendImpl):
    """The stock CPU kernel writes rows one after the other, whatever the output's strides are."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        *others, output = args
        if output.is_contiguous():
            return super().forward(*args, **kwargs)
        return output.copy_(
            super().forward(*others, torch.empty(output.shape, dtype=output.dtype), **kwargs)
        )


class FullCPUBackend(BackendParts, CPUAttentionBackend):
    """The stock CPU kernels: they read any distance between blocks, but the stock backend does not
    say so.
    """

    impl, builder, layouts = FullCPUImpl, FullCPUBuilder, LAYOUTS
    name = CPUAttentionBackend.get_name()


LocalStep = tuple[
    Writes, list[Reads], list[slice]
]  # what is stored, what reads the cache, and prompts, which do not


class LocalTorchBuilder(TorchBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> LocalStep:
        common, rules = common_attn_metadata, bin_of(self.vllm_config, self.layer_names).gap_rules
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        prompts, prefix_R = (
            rules.full_prompts(common, self.vllm_config),
            rules.prefixes(common, self.vllm_config),
        )
        prefixes = None if prefix_R is None else prefix_R.tolist()
        reads = plan_reads(
            common.block_table_tensor, starts, lengths, rules.demand, prompts, prefixes
        )
        return Writes.of(common.slot_mapping), reads, whole_prompts(starts, prompts)


class LocalTorchImpl(TorchImpl):
    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        step: Any,
        out: Tensor,
    ) -> None:
        writes, reads, prompts = step
        writes.store(key, value, kv)
        paged_local_attention(query, kv, reads, self.scale, out)
        attend_prompts(query, key, value, prompts, self.scale, out)


class LocalTorchBackend(TorchBackend):
    impl, builder, layouts = LocalTorchImpl, LocalTorchBuilder, LAYOUTS


class LocalTritonBuilder(GaplessTritonBuilder):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
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
