"""Attention backends for vLLM: on a CPU plain torch, on a GPU the engine's Triton kernels.

What they share, sinks and window with the full heads next to them, and mixed attention.  Shapes: T
tokens of a step, H KV heads, G query heads per KV head, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

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
from rlkv.attention.softmax import Softmax
from rlkv.utils.devices import moved
from rlkv.vllm.aligned import AlignedBuilder, bin_of
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import (
    QUERIES_AT_ONCE,
    GapRules,
    MixedReads,
    Reads,
    Writes,
    attend_prompts,
    cut_step,
    mix_tokens,
    paged_local_attention,
    paged_mixed_attention,
    plan_mixed_reads,
    plan_reads,
    whole_prompts,
)


def exchanged(stock: Attention, backend: type[AttentionBackend], vllm_config: Any) -> Attention:
    """Return a layer with another backend, which the engine knows by the stock layer's name."""
    del vllm_config.compilation_config.static_forward_context[stock.layer_name]
    return Attention(
        stock.num_heads,
        stock.head_size,
        stock.impl.scale,
        num_kv_heads=stock.num_kv_heads,
        cache_config=vllm_config.cache_config,
        quant_config=stock.quant_config,
        prefix=stock.layer_name,
        attn_backend=backend,
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


class States(NamedTuple):
    """Queries ``[T, H * G, D]``, keys and values ``[T, H, D]`` of a step."""

    query: Tensor
    key: Tensor
    value: Tensor


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
        self.attend(layer, States(query, key, value), kv_cache, attn_metadata, output)
        return output

    @abstractmethod
    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        """Write the attention of the queries to ``out``; ``step``: the metadata.

        Keys and values are in the cache ``kv``, unless ``forward_includes_kv_cache_update``.
        """


class TorchBackend(BackendParts):
    """A backend for any head size and any block size."""

    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (as in the base class)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class TorchBuilder(AttentionMetadataBuilder[Any]):
    """Plans of steps; subclasses write :meth:`plan`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        return self.plan(common_attn_metadata)

    @abstractmethod
    def plan(self, common: Any) -> Any:
        """Plan a step by its metadata, vLLM's."""


class TorchImpl(AttendingImpl):
    """One layer in plain torch."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kw: Any
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sinks = kw.get("sinks")
        self.softmax = Softmax(self.scale, sinks_N=self.sinks)
        self.num_kv_heads = num_kv_heads


class GaplessTritonBuilder(TritonAttentionMetadataBuilder):
    """Metadata of the stock kernel with its mask "the first S or the last W", without gaps.

    It reads S + W tokens per row, not the whole past. Graphs are captured of steps with one token
    per request: their tables are short, and in permanent buffers, whose addresses a graph keeps.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self.vllm_config.scheduler_config.max_num_seqs
        self.gap_rules = self.rules()
        # each builder has its own: the engine builds the metadata of all before it uses one
        columns = self.gap_rules.width(1)
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        sink = self.gap_rules.demand.sink
        self.prefix_R = torch.full((rows,), sink, dtype=torch.int32, device=self.device)

    def rules(self) -> GapRules:
        """Return what the builder's layers keep."""
        return bin_of(self.vllm_config, self.layer_names).kept

    def build_local(
        self, common: Any, fast_build: bool = False, prompts: list[int] | None = None
    ) -> TritonAttentionMetadata:
        """Build the metadata of a step (vLLM's) over tables without gaps.

        Requests with many queries, and prompts, are cut into pieces.  The ``prompts`` of the result
        are of :func:`whole_prompts`: the stock kernel writes zeros there.  Nothing waits for the
        GPU.

        Args:
            prompts: as of :func:`cut_step`.
        """
        rules = self.gap_rules
        decoding = common.max_query_len == 1  # a prompt of one token sees itself only
        own_R = rules.prefixes(common, self.vllm_config)
        if own_R is not None:  # rows of padding may have none
            self.prefix_R[: len(own_R)].copy_(moved(own_R, self.device))
        own = common
        prefix_R = self.prefix_R[: common.num_reqs]
        queries = common.max_query_len
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
            rswa_prefix_lens=None,  # stated only for rlkv: the stock builder has no use for them
        )
        metadata = super().build(0, own, fast_build)
        metadata.rswa_prefix_lens = prefix_R
        metadata.rswa_window = rules.demand.window
        metadata.prompts = []
        if prompts:
            metadata.prompts = whole_prompts(common.query_start_loc_cpu.tolist(), prompts)
        return metadata

    def _without_gaps(
        self, common: Any, prefix_R: Tensor, width: int, decoding: bool
    ) -> tuple[Tensor, Tensor]:
        """Cut the gaps out of the step's table and lengths; of decoding into permanent buffers."""
        from rlkv.kernels.gaps import cut_gaps  # a build for CPUs has no Triton

        table = common.block_table_tensor
        lengths = common.seq_lens
        demand = self.gap_rules.demand
        rows = len(table)
        columns = min(width, table.shape[1])
        if decoding:
            out = self.table[:rows, :columns], self.lengths[:rows]
        else:
            out = table.new_empty(rows, columns), lengths.new_empty(rows)
        starts = common.query_start_loc
        cut_gaps(table, lengths, starts, prefix_R, demand.block_size, demand.window, out)
        return out

    def _in_pieces(
        self, common: Any, prefix_R: Tensor, prompts: list[int] | None
    ) -> tuple[Any, Tensor]:
        """Make each piece a request of its own over the same blocks, with the prefix it sees."""
        pieces = cut_step(common.query_start_loc_cpu.tolist(), prompts)
        rows = [(*piece, piece.reads_cache) for piece in pieces]
        numbers = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        ends_P = numbers[1]
        cuts = torch.cat([ends_P.new_zeros(1), ends_P])
        row_P, end_P, prompt_P, reads_P = moved(numbers, self.device).unbind()
        row_P = row_P.long()
        # queries of the same request that come after
        behind_P = common.query_start_loc[1:][row_P] - end_P
        split = common.replace(
            block_table_tensor=common.block_table_tensor[row_P],
            # without entries the kernel reads none
            seq_lens=(common.seq_lens[row_P] - behind_P) * reads_P,
            query_start_loc=moved(cuts, self.device),
            query_start_loc_cpu=cuts,
            num_reqs=len(pieces),
        )
        return split, torch.maximum(prefix_R[row_P], prompt_P)


# --- mixed attention, of rollouts


def mixed_backend() -> type[AttentionBackend]:
    """Return the backend of mixed attention on this platform."""
    return MixedTorchBackend if current_platform.is_cpu() else MixedTritonBackend


class _LiveGates:
    """A view ``alpha_H`` of the model's gates: every step, captured or not, sees updates."""

    alpha_H: Tensor
    sizes: LocalSizes

    def attach(self, alpha_H: Tensor, sizes: LocalSizes) -> None:
        self.alpha_H = alpha_H
        self.sizes = sizes


def _local_demand(builder: Any) -> SinkWindowDemand:
    """Return what the local branch of a builder's layers keeps."""
    context = builder.vllm_config.compilation_config.static_forward_context
    sizes: LocalSizes = context[builder.layer_names[0]].impl.sizes
    return SinkWindowDemand(builder.kv_cache_spec.block_size, sizes.sink, sizes.window)


class MixedTorchBuilder(TorchBuilder):
    def plan(self, common: Any) -> tuple[Writes, MixedReads]:
        reads = plan_mixed_reads(
            common.block_table_tensor,
            common.query_start_loc_cpu,
            common.seq_lens,
            _local_demand(self),
        )
        return Writes.of(common.slot_mapping), reads


class MixedTorchImpl(_LiveGates, TorchImpl):
    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        writes, reads = step
        writes.store(states.key, states.value, kv)
        paged_mixed_attention(states.query, kv, reads, self.alpha_H, self.softmax, out)


class MixedTorchBackend(TorchBackend):
    impl = MixedTorchImpl
    builder = MixedTorchBuilder
    layouts = (KVCacheLayout.LBHNC,)


class MixedTritonBuilder(GaplessTritonBuilder):
    """The stock metadata for the full branch, with those without gaps for the local one."""

    def rules(self) -> GapRules:
        return GapRules(_local_demand(self), self.vllm_config.model_config.max_model_len)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TritonAttentionMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.local.seq_lens.fill_(1)  # as the stock builder does for the full branch
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        local = self.build_local(common_attn_metadata, fast_build)
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        stock.local = local
        return stock


class MixedTritonImpl(_LiveGates, AttendingImpl, TritonAttentionImpl):
    """Both branches by the engine's Triton kernel, mixed in float32."""

    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        full = torch.empty_like(out)
        local = torch.empty_like(out)
        TritonAttentionImpl.forward(self, layer, *states, kv, step, full)
        TritonAttentionImpl.forward(self, layer, *states, kv, step.local, local)
        tokens = step.num_actual_tokens
        out[:tokens] = mix_tokens(full[:tokens], local[:tokens], self.alpha_H)


class MixedTritonBackend(BackendParts, TritonAttentionBackend):
    """Stock blocks, layouts and head sizes."""

    impl = MixedTritonImpl
    builder = MixedTritonBuilder


# --- bins: full heads, and sinks and a window


LAYOUTS = (KVCacheLayout.BLHNC,)
# parts of a bin share metadata, and differ in their number of heads
ANY_HEADS = ("FLASH_ATTN", "TRITON_ATTN")


def full_backend(stock: Attention, aligned: bool = False) -> type[AttentionBackend]:
    """Return the backend of full heads, or of compressible ones with aligned windows.

    It is the engine's for the ``stock`` layer, if its metadata suit any number of heads.
    """
    if current_platform.is_cpu():
        return AlignedCPUBackend if aligned else FullCPUBackend
    chosen: Any = stock.attn_backend
    if chosen.get_name() not in ANY_HEADS:
        chosen = TritonAttentionBackend
    builder: Any = chosen.get_builder_cls()

    class FullBuilder(builder):
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            # a schedule of FlashAttention is for one number of heads; without it the kernel makes
            # its own
            return super().build(common_prefix_len, common_attn_metadata, fast_build=True)

    class AlignedStockBuilder(AlignedBuilder, FullBuilder):
        pass

    class FullBackend(chosen):
        @staticmethod
        def get_builder_cls() -> Any:
            return AlignedStockBuilder if aligned else FullBuilder

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return LAYOUTS  # in others the engine may lengthen the blocks of a bin

    return FullBackend


CPU_KERNELS = CPUAttentionBackend.get_name()


class FullCPUBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a schedule suits any number of heads in such groups, but has scratch for so many
        self.num_kv_heads = bin_of(self.vllm_config, self.layer_names).num_kv_heads


class FullCPUImpl(CPUAttentionBackendImpl):
    """The stock CPU kernel, whose rows are written one after the other whatever the strides are."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        *others, output = args
        if output.is_contiguous():
            return super().forward(*args, **kwargs)
        rows = torch.empty(output.shape, dtype=output.dtype)
        return output.copy_(super().forward(*others, rows, **kwargs))


class PooledCPUBackend(BackendParts, CPUAttentionBackend):
    """The stock CPU kernels, which read any distance between blocks: their backend hides that.

    Layers without gates use it unchanged: their cache lies in the pool of the bins too.
    """

    impl = CPUAttentionBackendImpl
    builder = CPUAttentionMetadataBuilder
    layouts = LAYOUTS
    name = CPU_KERNELS


class FullCPUBackend(PooledCPUBackend):
    impl = FullCPUImpl
    builder = FullCPUBuilder


class AlignedCPUBuilder(AlignedBuilder, FullCPUBuilder):
    pass


class AlignedCPUBackend(FullCPUBackend):
    """The same kernels over tables that are cut to the blocks of sinks and window."""

    builder = AlignedCPUBuilder


def pooled_backend(stock: Attention) -> type[AttentionBackend]:
    """Return the backend of a stock layer whose cache is in the bins' pool."""
    return PooledCPUBackend if current_platform.is_cpu() else stock.attn_backend


def local_backend(stock: Attention, rules: GapRules) -> type[AttentionBackend]:
    """Return the backend of sinks and a window on this platform."""
    if rules.aligned:
        return full_backend(stock, aligned=True)
    return LocalTorchBackend if current_platform.is_cpu() else LocalTritonBackend


class LocalTorchBuilder(TorchBuilder):
    def plan(self, common: Any) -> tuple[Writes, list[Reads], list[slice]]:
        """Plan what is stored, what reads the cache, and prompts, which do not."""
        rules = bin_of(self.vllm_config, self.layer_names).kept
        starts = common.query_start_loc_cpu.tolist()
        prompts = rules.full_prompts(common, self.vllm_config)
        prefix_R = rules.prefixes(common, self.vllm_config)
        reads = plan_reads(
            common.block_table_tensor,
            starts,
            common.seq_lens.tolist(),
            rules.demand,
            prompts=prompts,
            prefixes=None if prefix_R is None else prefix_R.tolist(),
        )
        return Writes.of(common.slot_mapping), reads, whole_prompts(starts, prompts)


class LocalTorchImpl(TorchImpl):
    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        writes, reads, prompts = step
        writes.store(states.key, states.value, kv)
        paged_local_attention(states.query, kv, reads, self.softmax, out)
        attend_prompts(*states, prompts, self.softmax, out)


class LocalTorchBackend(TorchBackend):
    impl = LocalTorchImpl
    builder = LocalTorchBuilder
    layouts = LAYOUTS


class LocalTritonBuilder(GaplessTritonBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        prompts = self.gap_rules.full_prompts(common_attn_metadata, self.vllm_config)
        return self.build_local(common_attn_metadata, fast_build, prompts)


class LocalTritonImpl(AttendingImpl, TritonAttentionImpl):
    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        TritonAttentionImpl.forward(self, layer, *states, kv, step, out)
        attend_prompts(*states, step.prompts, Softmax(self.scale, sinks_N=self.sinks), out)


class LocalTritonBackend(BackendParts, TritonAttentionBackend):
    impl = LocalTritonImpl
    builder = LocalTritonBuilder
    layouts = LAYOUTS
    name = TritonAttentionBackend.get_name()
