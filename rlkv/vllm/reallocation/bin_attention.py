"""The heads of one bin, of all layers, as one attention layer of the engine: one KV tensor, spec and block table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context

from rlkv.vllm.blocks.block_tables import GapRules
from rlkv.vllm.blocks.packing import Bin, Part
from rlkv.vllm.blocks.specs import EvictingSpec, PackedFullSpec, SinkWindowSpec
from rlkv.vllm.reallocation.backend import full_backend, local_backend
from rlkv.vllm.reallocation.evicting import Eviction
from rlkv.vllm.reallocation.evicting_backend import evicting_backend


class BinAttention(Attention):
    """What the engine sees of a bin. It never runs: its parts do, each on its slice of the cache.

    Its number of heads is that of the largest part, by which builders of metadata size what kernels share.
    """

    parts: tuple[PartAttention, ...] = ()
    on_pool: Callable[[int], None] | None = None  # called with the number of blocks when the engine has its pool
    _kv_cache: Tensor

    def __init__(
        self, stock: Attention, number: int, own: Bin, kept: Eviction | GapRules | None, vllm_config: Any
    ) -> None:
        """``stock``: any of the attention layers that are replaced; ``kept``: what compressible heads keep."""
        group_size = stock.num_heads // stock.num_kv_heads
        if own.full:
            backend = full_backend(stock)
        else:
            backend = evicting_backend() if isinstance(kept, Eviction) else local_backend()
        super().__init__(
            own.largest_part * group_size,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=own.largest_part,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=f"rlkv_bins.{number}",
            attn_backend=backend,
        )
        self.number, self.bin, self.planned = number, own, vllm_config.cache_config.block_size
        self.kept = None if own.full else kept

    @property
    def eviction(self) -> Eviction:
        assert isinstance(self.kept, Eviction)
        return self.kept

    @property
    def gap_rules(self) -> GapRules:
        assert isinstance(self.kept, GapRules)
        return self.kept

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        """The engine binds a cache ``[blocks, heads of the bin, tokens, 2 * size]``, or an empty tensor to free it."""
        self._kv_cache = cache
        if self.on_pool is not None and cache.dim() == 4:
            self.on_pool(len(cache))
        for part in self.parts:
            part.kv_cache = cache[:, part.first : part.first + part.num_kv_heads] if cache.dim() == 4 else cache

    def add_part(self, part: Part) -> PartAttention:
        """The heads ``part`` of the bin, for the layer that has them."""
        made = PartAttention(self, part)
        self.parts = (*self.parts, made)
        return made

    def get_kv_cache_spec(self, vllm_config: Any) -> PackedFullSpec | EvictingSpec | SinkWindowSpec:
        if vllm_config.cache_config.block_size != self.planned:  # a few backends ask for another size after loading
            chosen = vllm_config.cache_config.block_size
            raise ValueError(f"rlkv: the engine chose blocks of {chosen} tokens too late: pass --block-size {chosen}")
        common: dict[str, Any] = {
            "block_size": self.bin.demand.block_size,
            "num_kv_heads": len(self.bin.heads),
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": self.kv_cache_torch_dtype,
            "bin": self.number,
        }
        if self.bin.full:
            return PackedFullSpec(**common, protect_prompt=getattr(self.bin.demand, "protect_prompt", False))
        if isinstance(self.kept, Eviction):
            return EvictingSpec(**{**asdict(self.kept.demand), **common})
        return SinkWindowSpec(
            **common,
            sink=self.gap_rules.demand.sink,
            window=self.gap_rules.demand.window,
            protect_prompt=self.gap_rules.demand.protect_prompt,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )


class PartAttention:
    """The heads of one layer in one bin: what runs."""

    def __init__(self, own: BinAttention, part: Part) -> None:
        self.bin_name, self.first, self.num_kv_heads = own.layer_name, part.first, len(part.heads)
        self.num_heads = self.num_kv_heads * own.impl.num_heads // own.impl.num_kv_heads
        self.kv_cache = torch.tensor([])
        self.writes_first = not own.attn_backend.forward_includes_kv_cache_update
        self.impl: Any = own.attn_backend.get_impl_cls()(
            self.num_heads, own.head_size, own.impl.scale, self.num_kv_heads, None, None, own.kv_cache_dtype
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """What the engine's two attention operators do, with states ``[tokens, heads, size]``."""
        metadata, own, _, slots = get_attention_context(self.bin_name)
        if self.writes_first and slots is not None:
            self.impl.do_kv_cache_update(own, key, value, self.kv_cache, slots)
        self.impl.forward(own, query, key, value, self.kv_cache, metadata, output)
