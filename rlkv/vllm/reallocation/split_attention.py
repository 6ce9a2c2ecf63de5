"""The attention of one layer in parts, each a slice of a bin of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import direct_register_custom_op

from rlkv.vllm.compat import LayerNameType, encode_layer_name, resolve_layer_name
from rlkv.vllm.reallocation.bin_attention import PartAttention


class SplitAttention(nn.Module):
    """In the place of a layer's attention, with the same call.

    The projections' weights were reordered when they were loaded: each part reads and writes a slice.
    """

    def __init__(self, stock: Attention, parts: list[PartAttention], vllm_config: Any) -> None:
        super().__init__()
        self.layer_name, self.head_size, self.parts = stock.layer_name, stock.head_size, parts
        self.heads, self.kv_heads = [part.num_heads for part in parts], [part.num_kv_heads for part in parts]
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
        states = [tensor.view(len(tensor), -1, self.head_size) for tensor in (query, key, value, output)]
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        slices = (tensor.split_with_sizes(heads, 1) for tensor, heads in zip(states, counts, strict=True))
        for part, *own in zip(self.parts, *slices, strict=True):
            part.attend(*own)


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
