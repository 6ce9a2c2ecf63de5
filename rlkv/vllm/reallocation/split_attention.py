"""The attention of one layer as several engine layers, one for each part of its heads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_attention_with_output, unified_kv_cache_update
from vllm.utils.torch_utils import direct_register_custom_op

from rlkv.vllm.blocks.block_tables import GapRemover
from rlkv.vllm.blocks.packing import Part
from rlkv.vllm.blocks.specs import EvictingSpec, PackedFullSpec, SinkWindowSpec
from rlkv.vllm.compat import LayerNameType, encode_layer_name, resolve_layer_name
from rlkv.vllm.reallocation.backend import full_backend, local_backend
from rlkv.vllm.reallocation.evicting import Eviction
from rlkv.vllm.reallocation.evicting_backend import evicting_backend


class PartAttention(Attention):
    """Heads of one part; compressible ones have either ``eviction`` or ``gap_remover``, full ones neither."""

    pack_tag: int
    block_bytes: int  # of the pool, as planned
    eviction: Eviction | None = None
    gap_remover: GapRemover | None = None

    def get_kv_cache_spec(self, vllm_config: Any) -> PackedFullSpec | EvictingSpec | SinkWindowSpec:
        common: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": self.kv_cache_torch_dtype,
            "pack_tag": self.pack_tag,
        }
        if self.eviction is not None:
            return EvictingSpec(**{**asdict(self.eviction.demand), **common})
        if self.gap_remover is not None:
            return SinkWindowSpec(
                **common,
                sink=self.gap_remover.demand.sink,
                window=self.gap_remover.demand.window,
                max_in_flight_tokens=vllm_config.max_in_flight_tokens,
                max_model_len=vllm_config.model_config.max_model_len,
            )
        return PackedFullSpec(**common)


class SplitAttention(nn.Module):
    """In the place of a layer's attention, with the same call.

    The projections' weights were reordered when they were loaded: each part reads and writes a slice.
    """

    def __init__(
        self, stock: Attention, parts: list[Part], kept: Eviction | dict[int, GapRemover], vllm_config: Any
    ) -> None:
        """``kept``: what compressible heads keep, by an eviction policy, or sinks and a window by bin."""
        super().__init__()
        compressible = evicting_backend() if isinstance(kept, Eviction) else local_backend()
        self.layer_name = stock.layer_name
        self.head_size, self.group_size = stock.head_size, stock.num_heads // stock.num_kv_heads
        layers: list[Any] = []
        for number, part in enumerate(parts):
            layer = PartAttention(
                part.size * self.group_size,
                stock.head_size,
                stock.impl.scale,
                num_kv_heads=part.size,
                cache_config=vllm_config.cache_config,
                quant_config=stock.quant_config,
                prefix=f"{stock.layer_name}.{'full' if part.full else 'local'}_{number}",
                attn_backend=full_backend() if part.full else compressible,
            )
            layer.pack_tag = part.bin
            if not part.full:
                if isinstance(kept, Eviction):
                    layer.eviction = kept
                else:
                    layer.gap_remover = kept[part.bin]
            layers.append(layer)
        self.parts = nn.ModuleList(layers)
        compilation = vllm_config.compilation_config
        compilation.static_forward_context[self.layer_name] = self  # where the operator below finds it
        if compilation.splitting_ops and OPERATOR not in compilation.splitting_ops:
            compilation.splitting_ops.append(OPERATOR)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[T, H * G * D]``, ``[T, H * D]`` twice, to ``[T, H * G * D]``."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        torch.ops.vllm.rlkv_split_attention(query, key, value, output, encode_layer_name(self.layer_name))
        return output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Part by part: what ``Attention.forward`` of the engine does, on slices."""
        first = 0
        layers: Any = self.parts
        for layer in layers:
            end = first + layer.num_kv_heads * self.head_size
            own = slice(first * self.group_size, end * self.group_size)
            keys, values = (states[:, first:end].unflatten(-1, (-1, self.head_size)) for states in (key, value))
            queries, outputs = (states[:, own].unflatten(-1, (-1, self.head_size)) for states in (query, output))
            name = encode_layer_name(layer.layer_name)
            if not layer.attn_backend.forward_includes_kv_cache_update:
                unified_kv_cache_update(keys, values, name)
            unified_attention_with_output(queries, keys, values, outputs, name)
            first = end


def _split_attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: LayerNameType) -> None:
    layers = get_forward_context().no_compile_layers
    layers[resolve_layer_name(layer_name)].attend(query, key, value, output)


def _split_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: LayerNameType
) -> None: ...


# one operator for all parts of a layer: compiled graphs must not see slices that are written to
OPERATOR = "vllm::rlkv_split_attention"
# the engine reads types off the function, and here they are only names
_split_attention.__annotations__ = {
    **dict.fromkeys(("query", "key", "value", "output"), Tensor),
    "layer_name": LayerNameType,
    "return": None,
}
direct_register_custom_op(
    op_name="rlkv_split_attention",
    op_func=_split_attention,
    mutates_args=["output"],
    fake_impl=_split_attention_fake,
)
