"""What vLLM attention backends in plain torch share: the engine's paged cache, any head size, any block size."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, MultipleOf

from rlkv.vllm.paged.write import write_cache

NAME = "CUSTOM"  # the engine looks the name up in its own enumeration of backends


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On ``device``, and to a GPU without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PagedTorchCache(AttentionImpl):
    """One layer and how its states are written."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kw: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        write_cache(key, value, kv_cache, slot_mapping)


class PagedTorchImpl(PagedTorchCache):
    """One layer; the engine has new keys and values written before it asks for their attention."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # the engine's profiling run
            return output.zero_()
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    @abstractmethod
    def attend(self, query: Tensor, kv_cache: Tensor, step: Any, output: Tensor) -> None:
        """Write the attention of ``query`` ``[tokens, query heads, size]`` to ``output``; ``step``: the metadata."""


class PagedTorchBackend(AttentionBackend):
    """What such a backend says of itself; subclasses name their implementation, builder and layouts."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (as in the base class)

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]
