"""vLLM attention backends of head reallocation.

Full heads: the engine's own backend. Compressible heads: the engine's Triton kernels on a GPU, plain torch on a CPU,
both over block tables without gaps. All need the layout in which a block holds all its layers side by side
(``BLHNC``), because parts differ in their number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.vllm.blocks.block_tables import GapRemover, SteadyTables, without_gap
from rlkv.vllm.blocks.report import check_block_bytes
from rlkv.vllm.paged.backend import BackendParts, TorchBackend, TorchBuilder, TorchImpl, moved
from rlkv.vllm.paged.local_attention import Reads, paged_local_attention, plan_reads
from rlkv.vllm.settings import read_request

LAYOUTS = (KVCacheLayout.BLHNC,)


def full_backend() -> type[AttentionBackend] | None:
    """The backend of full heads; None leaves the choice to the engine."""
    return PackedCPUBackend if current_platform.is_cpu() else None


def local_backend() -> type[AttentionBackend]:
    """The backend of compressible heads."""
    return LocalTorchBackend if current_platform.is_cpu() else LocalTritonBackend


class PackedCPUImpl(CPUAttentionBackendImpl):
    """The stock CPU kernel writes rows one after the other, whatever the output's strides are."""

    def forward(self, *args: Any, output: Tensor, **kwargs: Any) -> Tensor:
        if output.is_contiguous():
            return super().forward(*args, output=output, **kwargs)
        return output.copy_(super().forward(*args, output=torch.empty(output.shape, dtype=output.dtype), **kwargs))


class PackedCPUBackend(BackendParts, CPUAttentionBackend):
    """The stock CPU kernels: they read any distance between blocks, but the stock backend does not say so."""

    impl, builder, layouts = PackedCPUImpl, CPUAttentionBackend.get_builder_cls(), LAYOUTS
    name = CPUAttentionBackend.get_name()


def _gap_remover(vllm_config: Any, layer_names: list[str]) -> GapRemover:
    """The one that all layers of the bin share (:mod:`rlkv.vllm.reallocation.reallocation`)."""
    layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
    check_block_bytes(vllm_config, layer)
    return layer.gap_remover


def _prompts(gap_remover: GapRemover, common: Any, vllm_config: Any) -> list[int] | None:
    """Lengths of the prompts that this step reads in full; None if there are none."""
    return None if gap_remover.full_prefill is None else gap_remover.full_prefill.prompts(common, vllm_config)


@dataclass
class LocalMetadata:
    """What one step reads."""

    reads: list[Reads]


class LocalTorchBuilder(TorchBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LocalMetadata:
        common = common_attn_metadata
        gap_remover = _gap_remover(self.vllm_config, self.layer_names)
        table, lengths = gap_remover.of_step(common)
        starts = common.query_start_loc_cpu.tolist()
        prompts = _prompts(gap_remover, common, self.vllm_config)
        return LocalMetadata(plan_reads(table, starts, lengths.tolist(), gap_remover.demand, prompts))


class LocalTorchImpl(TorchImpl):
    """Sinks and window in plain torch."""

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        step: LocalMetadata,
        output: Tensor,
    ) -> None:
        paged_local_attention(query, kv_cache, step.reads, self.scale, output)


class LocalTorchBackend(TorchBackend):
    impl, builder, layouts = LocalTorchImpl, LocalTorchBuilder, LAYOUTS


class LocalTritonBuilder(TritonAttentionMetadataBuilder):
    """The stock metadata over tables without gaps, and the stock kernel's "prefix or window" mask switched on.

    Prompts that are read in full have themselves as a visible prefix; what a request wrote itself and reads again in
    the same step is a request of its own in the metadata, over the same blocks.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    sinks_R: Tensor | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.tables = SteadyTables(vllm_config.scheduler_config.max_num_seqs)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        request = read_request(vllm_config.additional_config) or {}
        if request.get("prefill") == "full":  # the number of requests in the metadata may be another one
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        common = common_attn_metadata
        gap_remover = _gap_remover(self.vllm_config, self.layer_names)
        table, lengths = self.tables(*gap_remover.of_step(common), common.block_table_tensor.shape[1])
        # the engine states prompt lengths for us alone: the stock builder has no use for them
        own = without_gap(common, gap_remover, table, lengths).replace(rswa_prefix_lens=None)
        prefix_R = self._sinks(gap_remover.demand.sink, common.num_reqs)
        prompts = _prompts(gap_remover, common, self.vllm_config)
        if prompts is not None and common.max_query_len > 1:  # a prompt of one token sees itself only
            own, prefix_R = self._with_prompts(own, common, prompts, gap_remover.demand.sink)
        metadata = super().build(0, own, fast_build)
        metadata.rswa_prefix_lens = prefix_R
        metadata.rswa_window = gap_remover.demand.window
        return metadata

    def _with_prompts(self, own: Any, common: Any, prompts: list[int], sink: int) -> tuple[Any, Tensor]:
        """``own`` (without gaps) with prompts and what follows them apart, and the visible prefix of each."""
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        pieces: list[tuple[int, int, int]] = []  # request, end of its last query in the step, visible prefix
        for row, prompt in enumerate(prompts):
            if prompt:
                pieces.append((row, starts[row] + prompt, prompt))
            if prompt < lengths[row]:
                pieces.append((row, starts[row + 1], sink))
        row_P, end_P, prefix_P = (torch.tensor(numbers, dtype=torch.int32) for numbers in zip(*pieces, strict=True))
        cuts = torch.cat([end_P.new_zeros(1), end_P])
        row_P, on_device, prefix_P = (moved(tensor, self.device) for tensor in (row_P.long(), cuts, prefix_P))
        behind_P = common.query_start_loc[1:][row_P] - on_device[1:]  # queries of the same request that come after
        split = own.replace(
            block_table_tensor=own.block_table_tensor[row_P],
            seq_lens=own.seq_lens[row_P] - behind_P,
            query_start_loc=on_device,
            query_start_loc_cpu=cuts,
            num_reqs=len(pieces),
        )
        return split, prefix_P

    def _sinks(self, sink: int, requests: int) -> Tensor:
        """S for every request, always at the same place."""
        if self.sinks_R is None:
            self.sinks_R = torch.full((self.tables.rows,), sink, dtype=torch.int32, device=self.device)
        return self.sinks_R[:requests]


class LocalTritonBackend(BackendParts, TritonAttentionBackend):
    impl, builder, layouts = TritonAttentionImpl, LocalTritonBuilder, LAYOUTS
    name = TritonAttentionBackend.get_name()
