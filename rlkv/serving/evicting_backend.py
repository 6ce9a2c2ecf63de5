"""vLLM attention backends of compressible heads under an eviction policy: torch on a CPU, Triton kernels on a GPU.

A step is cut at the compactions of its requests (:mod:`rlkv.serving.buffers`). Those before the first tokens, all
there are while decoding, are done while the step's metadata are built, for every layer, so that a captured graph
never holds one; those in the middle of a prompt wait for the layer's own keys and are done in its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rlkv.serving.backend import LAYOUTS
from rlkv.serving.buffers import Round, plan_rounds
from rlkv.serving.evicting import Eviction, compact, entry_slots, query_halves, query_slots
from rlkv.serving.local_attention import paged_local_attention
from rlkv.serving.packing import BlockUse
from rlkv.serving.report import check_block_bytes
from rlkv.serving.torch_backend import NAME, PagedTorchBackend, PagedTorchCache


def evicting_backend() -> type[AttentionBackend]:
    """The backend of this platform."""
    return EvictingTorchBackend if current_platform.is_cpu() else EvictingTritonBackend


@dataclass
class PlacedRound:
    """A round with its places in the cache.

    Attributes:
        tokens: the step's tokens that take part; None: all of them.
        slots_T, queries_ET: where keys and values go, and the queries.
        table_RM: the blocks of the requests' entries; ``lengths``: how many entries each has.
        due_RM, positions_R: blocks and next positions of the requests to compact first; None: there are none.
        stock: what the engine's own kernel needs; None on a CPU.
    """

    tokens: Tensor | None
    slots_T: Tensor
    queries_ET: Tensor
    table_RM: Tensor
    starts: list[int]
    lengths: list[int]
    due_RM: Tensor | None
    positions_R: Tensor
    stock: TritonAttentionMetadata | None = None


@dataclass
class EvictingMetadata:
    """One step; ``num_actual_tokens`` as the engine wants it."""

    num_actual_tokens: int
    rounds: list[PlacedRound]


def place(plan: Round, eviction: Eviction, table_RM: Tensor) -> PlacedRound:
    """``plan`` on the device of the block table ``table_RM`` of the step's requests."""
    use, device = eviction.use, table_RM.device
    row_T, position_T = plan.row_T.to(device), plan.position_T.to(device)
    rows = torch.tensor(plan.rows, device=device)
    return PlacedRound(
        tokens=None if plan.tokens is None else plan.tokens.to(device),
        slots_T=entry_slots(use, table_RM, row_T, use.entries(position_T)),
        queries_ET=query_slots(use, table_RM, row_T, use.observed(position_T)),
        table_RM=(table_RM if len(rows) == len(table_RM) else table_RM[rows])[:, use.query_blocks :],
        starts=plan.starts,
        lengths=plan.lengths,
        due_RM=table_RM[torch.tensor(plan.due, device=device)] if plan.due else None,
        positions_R=torch.tensor(plan.due_positions, dtype=torch.int64, device=device),
    )


class _EvictingBuilder:
    """What both builders do; the engine's base class beside it gives ``vllm_config`` and ``layer_names``."""

    vllm_config: Any
    layer_names: list[str]

    @property
    def eviction(self) -> Eviction:
        return self._layers[0].eviction

    @property
    def _layers(self) -> list[Any]:
        known = self.vllm_config.compilation_config.static_forward_context
        return [known[name] for name in self.layer_names]

    def plan(self, common: Any, compacting: bool) -> list[tuple[Round, PlacedRound]]:
        """The rounds of a step; ``compacting``: what is due before it is done now."""
        check_block_bytes(self.vllm_config, self._layers[0])
        lengths = common.seq_lens_cpu_upper_bound  # exact without speculative decoding, which is refused
        rounds = plan_rounds(self.eviction.use, common.query_start_loc_cpu.tolist(), lengths.tolist())
        placed = [place(plan, self.eviction, common.block_table_tensor) for plan in rounds]
        if compacting and placed[0].due_RM is not None:
            for layer in self._layers:
                layer.impl.compact(layer.kv_cache, placed[0], self.eviction)
        return list(zip(rounds, placed, strict=True))


class _Evicting:
    """What both implementations do; subclasses attend."""

    scale: float
    num_kv_heads: int
    do_kv_cache_update: Any

    def compact(self, kv_cache: Tensor, part: PlacedRound, eviction: Eviction) -> None:
        assert part.due_RM is not None
        # the policies' logit is query . key / sqrt(D), whatever the model's scale
        factor = self.scale * (kv_cache.shape[-1] // 2) ** 0.5
        compact(kv_cache, part.due_RM, part.positions_R, eviction, factor)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: EvictingMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # the engine's profiling run
            return output.zero_()
        for number, part in enumerate(attn_metadata.rounds):
            if number > 0 and part.due_RM is not None:
                self.compact(kv_cache, part, layer.eviction)
            if part.tokens is None:
                self._store(layer, query, key, value, kv_cache, part)
                self.attend_round(layer, query, kv_cache, part, output)
                continue
            own = query[part.tokens]
            self._store(layer, own, key[part.tokens], value[part.tokens], kv_cache, part)
            found = torch.empty_like(own, dtype=output.dtype)
            self.attend_round(layer, own, kv_cache, part, found)
            output[part.tokens] = found
        return output

    def _store(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, part: PlacedRound
    ) -> None:
        self.do_kv_cache_update(layer, key, value, kv_cache, part.slots_T)
        halves = query_halves(query[: part.slots_T.shape[0]], self.num_kv_heads)
        for (first, second), slots_T in zip(halves, part.queries_ET, strict=True):
            self.do_kv_cache_update(layer, first, second, kv_cache, slots_T)

    def attend_round(self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor) -> None:
        """Write the attention of ``query`` to ``output``, both ``[tokens, query heads, size]``."""
        raise NotImplementedError


class EvictingTorchBuilder(_EvictingBuilder, AttentionMetadataBuilder[EvictingMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> EvictingMetadata:
        common = common_attn_metadata
        return EvictingMetadata(common.num_actual_tokens, [part for _, part in self.plan(common, compacting=True)])


class EvictingTorchImpl(_Evicting, PagedTorchCache):
    """Everything that is held, in plain torch."""

    def attend_round(self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor) -> None:
        everything = BlockUse(kv_cache.shape[2], 0, layer.eviction.use.capacity)
        paged_local_attention(query, kv_cache, part.table_RM, part.starts, part.lengths, everything, self.scale, output)


class EvictingTorchBackend(PagedTorchBackend):
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return EvictingTorchImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return EvictingTorchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS


class EvictingTritonBuilder(_EvictingBuilder, TritonAttentionMetadataBuilder):
    """The stock metadata over the entries' blocks; in decoding, at the same places in every step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        # buffers for good: a captured graph keeps their addresses
        self.lengths_R = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        places = (1 + self.eviction.use.entries_per_query, scheduler.max_num_batched_tokens)
        self.slots = torch.full(places, -1, dtype=torch.int64, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return self._build(common_attn_metadata, compacting=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        step = self._build(common_attn_metadata, compacting=False)
        self.lengths_R.fill_(1)  # as the stock builder does: a longer request makes the capture slow
        return step

    def _build(self, common: Any, compacting: bool) -> EvictingMetadata:
        parts = list(self._placed(common, compacting))
        return EvictingMetadata(common.num_actual_tokens, parts)

    def _placed(self, common: Any, compacting: bool) -> Iterator[PlacedRound]:
        for number, (plan, part) in enumerate(self.plan(common, compacting)):
            lengths = torch.tensor(plan.lengths, dtype=torch.int32)
            starts = torch.tensor(plan.starts, dtype=torch.int32)
            if number == 0:
                tokens = part.slots_T.shape[0]
                self.slots[0, :tokens], self.slots[1:, :tokens] = part.slots_T, part.queries_ET
                # the engine may have padded the step: those tokens are written nowhere
                self.slots[:, tokens : common.num_actual_tokens] = -1
                self.lengths_R[: len(lengths)].copy_(lengths, non_blocking=True)
                on_device = self.lengths_R[: len(lengths)]
                if part.tokens is None:
                    part.slots_T = self.slots[0, : common.num_actual_tokens]
                    part.queries_ET = self.slots[1:, : common.num_actual_tokens]
            else:
                on_device = lengths.to(self.device)
            whole = part.tokens is None
            own = common.replace(
                block_table_tensor=part.table_RM,
                seq_lens=on_device,
                max_seq_len=max(1, *plan.lengths),
                slot_mapping=part.slots_T,
                query_start_loc=common.query_start_loc if whole else starts.to(self.device),
                query_start_loc_cpu=common.query_start_loc_cpu if whole else starts,
                max_query_len=common.max_query_len if whole else int((starts[1:] - starts[:-1]).max()),
                num_reqs=len(plan.rows),
                num_actual_tokens=part.slots_T.shape[0],
            )
            part.stock = TritonAttentionMetadataBuilder.build(self, 0, own)
            yield part


class EvictingTritonImpl(_Evicting, TritonAttentionImpl):
    """Everything that is held, by the engine's Triton kernel."""

    def attend_round(self, layer: Any, query: Tensor, kv_cache: Tensor, part: PlacedRound, output: Tensor) -> None:
        # keys and values are in the cache
        TritonAttentionImpl.forward(self, layer, query, None, None, kv_cache, part.stock, output)


class EvictingTritonBackend(TritonAttentionBackend):
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return EvictingTritonImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return EvictingTritonBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS
