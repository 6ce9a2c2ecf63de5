"""vLLM attention backends of head reallocation.

Full heads: the engine's own. Compressible heads: the engine's Triton kernels on a GPU, plain torch on a CPU. All need
the layout ``BLHNC``, in which a block holds its layers side by side, because parts differ in their number of heads.
"""

from __future__ import annotations

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
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.vllm.paged.attention import Reads, paged_local_attention, plan_reads
from rlkv.vllm.paged.backend import (
    BackendParts,
    GaplessTritonBuilder,
    TorchBackend,
    TorchBuilder,
    TorchImpl,
    moved,
)
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


def layers_of(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """The layers of a builder."""
    return [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]


def check_block_bytes(layer: Any) -> None:
    """Raise ``RuntimeError`` if the engine made blocks of another size than :func:`engine_groups` foresees.

    The text would still be right, but memory would be wasted unnoticed.
    """
    cache = layer.kv_cache
    if cache.dim() != 4 or len(cache) < 2:
        return  # not allocated yet
    found = cache.stride(0) * cache.element_size()
    if found != layer.block_bytes:
        raise RuntimeError(
            f"rlkv: the engine's blocks have {found:,} bytes, planned were {layer.block_bytes:,}: "
            "please report this with the gates file and the sparsity"
        )


class LocalTorchBuilder(TorchBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> list[Reads]:
        common, layer = common_attn_metadata, layers_of(self.vllm_config, self.layer_names)[0]
        check_block_bytes(layer)
        remover = layer.gap_remover
        table, lengths = remover.of_step(common)
        prompts, starts = remover.full_prompts(common, self.vllm_config), common.query_start_loc_cpu.tolist()
        return plan_reads(table, starts, lengths.tolist(), remover.demand, prompts)


class LocalTorchImpl(TorchImpl):
    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Any, out: Tensor) -> None:
        paged_local_attention(query, kv, step, self.scale, out)


class LocalTorchBackend(TorchBackend):
    impl, builder, layouts = LocalTorchImpl, LocalTorchBuilder, LAYOUTS


class LocalTritonBuilder(GaplessTritonBuilder):
    """Prompts that are read in full have themselves as a visible prefix; what a request wrote itself and reads again in
    the same step is a request of its own in the metadata, over the same blocks.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.layer = layers_of(vllm_config, layer_names)[0]
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, self.layer.gap_remover)

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
        check_block_bytes(self.layer)
        own, prefix_R = self.without_gaps(common), self.sinks_R[: common.num_reqs]
        prompts = self.gap_remover.full_prompts(common, self.vllm_config)
        if prompts is not None and common.max_query_len > 1:  # a prompt of one token sees itself only
            own, prefix_R = self._with_prompts(own, common, prompts, self.gap_remover.demand.sink)
        return self.build_local(own, prefix_R, fast_build)

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


class LocalTritonBackend(BackendParts, TritonAttentionBackend):
    impl, builder, layouts = TritonAttentionImpl, LocalTritonBuilder, LAYOUTS
    name = TritonAttentionBackend.get_name()
