"""The attention of one layer as several engine layers, one for each part of its heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from rlkv.serving.backend import full_backend, local_backend
from rlkv.serving.compaction import Compactor
from rlkv.serving.packing import Part
from rlkv.serving.specs import PackedFullSpec, SinkWindowSpec


class PackedAttention(Attention):
    """Full heads of one part."""

    pack_tag: int
    block_bytes: int  # of the pool, as planned

    def get_kv_cache_spec(self, vllm_config: Any) -> PackedFullSpec:
        return PackedFullSpec(**self.common(vllm_config))

    def common(self, vllm_config: Any) -> dict[str, Any]:
        return {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": self.kv_cache_torch_dtype,
            "pack_tag": self.pack_tag,
        }


class SinkWindowAttention(PackedAttention):
    """Compressible heads of one part."""

    compactor: Compactor

    def get_kv_cache_spec(self, vllm_config: Any) -> SinkWindowSpec:
        return SinkWindowSpec(
            **self.common(vllm_config),
            sink=self.compactor.use.sink,
            window=self.compactor.use.window,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )


class SplitAttention(nn.Module):
    """In the place of a layer's attention, with the same call.

    Queries, keys and values come in the order of the parts, because the projections' weights were reordered when they
    were loaded: each part reads and writes a slice, nothing is gathered or concatenated.
    """

    def __init__(self, stock: Attention, parts: list[Part], compactors: dict[int, Compactor], vllm_config: Any) -> None:
        super().__init__()
        self.head_size, self.group_size = stock.head_size, stock.num_heads // stock.num_kv_heads
        layers: list[PackedAttention] = []
        for number, part in enumerate(parts):
            kind, backend = (PackedAttention, full_backend()) if part.full else (SinkWindowAttention, local_backend())
            layer = kind(
                part.size * self.group_size,
                stock.head_size,
                stock.impl.scale,
                num_kv_heads=part.size,
                cache_config=vllm_config.cache_config,
                quant_config=stock.quant_config,
                prefix=f"{stock.layer_name}.{'full' if part.full else 'local'}_{number}",
                attn_backend=backend,
            )
            layer.pack_tag = part.bin
            if isinstance(layer, SinkWindowAttention):
                layer.compactor = compactors[part.bin]
            layers.append(layer)
        self.parts = nn.ModuleList(layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[T, H * G * D]``, ``[T, H * D]`` twice, to ``[T, H * G * D]``."""
        output = torch.empty_like(query)
        first = 0
        for layer in self.parts:
            end = first + layer.num_kv_heads * self.head_size
            own = slice(first * self.group_size, end * self.group_size)
            _attend(layer, query[:, own], key[:, first:end], value[:, first:end], output[:, own])
            first = end
        return output


def _attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """``Attention.forward`` of the engine, which would make an output of its own."""
    assert current_platform.opaque_attention_op()
    name = _encode_layer_name(layer.layer_name)
    key, value = (states.unflatten(-1, (layer.num_kv_heads, layer.head_size)) for states in (key, value))
    written = None
    if not layer.attn_backend.forward_includes_kv_cache_update:
        written = torch.ops.vllm.unified_kv_cache_update(key, value, name)
    torch.ops.vllm.unified_attention_with_output(
        query.unflatten(-1, (layer.num_heads, layer.head_size)),
        key,
        value,
        output.unflatten(-1, (layer.num_heads, layer.head_size)),
        name,
        kv_cache_dummy_dep=written,
    )
