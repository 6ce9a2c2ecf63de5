"""What the engine's memory management must know about full and compressible heads.

Importing this module registers the specs, in every process that reads one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from rlkv.vllm.blocks.demand import BufferDemand, SinkWindowDemand
from rlkv.vllm.blocks.manager import EvictingManager, SinkWindowManager


class _OfBin:
    """Layers of one kind and bin (:mod:`rlkv.vllm.blocks.packing`) share a block table, others never do."""

    pack_tag: int

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        specs: list[Any] = list(kv_cache_specs.values())
        return all(type(spec) is type(self) and spec.pack_tag == self.pack_tag for spec in specs)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The engine asks whether layers may share a block table by trying this; AssertionError means no."""
        assert all(spec == specs[0] for spec in specs[1:]), "layers of different bins"
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class PackedFullSpec(_OfBin, FullAttentionSpec):
    """Full heads of one layer and bin: blocks for every token."""

    pack_tag: int


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(_OfBin, AttentionSpec):
    """Compressible heads of one layer and bin: blocks of the first ``sink`` and the last ``window`` tokens."""

    pack_tag: int
    sink: int
    window: int
    max_in_flight_tokens: int
    max_model_len: int

    @property
    def demand(self) -> SinkWindowDemand:
        return SinkWindowDemand(self.block_size, self.sink, self.window)

    def most_blocks(self, max_model_len: int | None = None) -> int:
        """Blocks that one request may hold at once: the sinks', and window and unsettled tokens, whose first one may
        lie anywhere in its block."""
        longest = self.max_model_len if max_model_len is None else max_model_len
        moving = min(self.window - 1 + self.max_in_flight_tokens, longest)
        return min(self.demand.full(self.sink) + self.demand.full(moving) + 1, self.demand.full(longest))

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.page_size_bytes * self.most_blocks(vllm_config.model_config.max_model_len)


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(_OfBin, AttentionSpec):
    """Compressible heads of one layer and bin under an eviction policy; fields as of :class:`BufferDemand`."""

    pack_tag: int
    budget: int
    buffer: int
    observation: int
    group_size: int

    @property
    def demand(self) -> BufferDemand:
        return BufferDemand(self.block_size, self.budget, self.buffer, self.observation, self.group_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.page_size_bytes * self.demand.compressible(vllm_config.model_config.max_model_len)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """The engine computes slots by position, and looks them up even though they are not used here."""
        return max(super().max_num_blocks_per_req(vllm_config, max_len), self.demand.compressible(max_len))


# the registry fills itself with the stock specs only as long as it is empty
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(PackedFullSpec, FullAttentionManager, FullAttentionSpec)
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager, SinkWindowSpec)
KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, EvictingSpec)
