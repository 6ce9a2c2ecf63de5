"""Decoding on a GPU by one launch per layer for the heads of all bins, instead of the engine's kernels for each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.platforms import current_platform

from rlkv.kernels.paged_decode import PagedBin, decode_paged, scratch_sizes
from rlkv.kernels.step import CAPABILITY, DTYPES, LARGEST_GROUP, LARGEST_HEAD
from rlkv.vllm.reallocation.bin_attention import BinAttention


def check_one_launch(stock: Attention, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` where the kernel cannot decode for attention layers like ``stock``."""
    group_size = stock.num_heads // stock.num_kv_heads
    reasons = {
        "needs a GPU of compute capability 8.0": not current_platform.has_device_capability(CAPABILITY),
        f"needs a KV cache of the model's dtype, {dtype}": stock.kv_cache_torch_dtype != dtype,
        f"is not for {dtype}": dtype not in DTYPES,
        f"is for heads up to {LARGEST_HEAD}, not {stock.head_size}": stock.head_size > LARGEST_HEAD,
        f"is for up to {LARGEST_GROUP} query heads per KV head, not {group_size}": group_size > LARGEST_GROUP,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"rlkv: one_launch {reason}: leave it out")


class OneLaunch(nn.Module):
    """The kernel's memory and what all layers share of a step. Buffers, so that the engine can put them to sleep."""

    partials: Tensor
    arrivals: Tensor

    def __init__(self, bins: list[BinAttention], layers: int, rows: int, longest: int) -> None:
        """For the heads of ``bins`` in ``layers`` layers, up to ``rows`` requests and texts of ``longest`` tokens."""
        super().__init__()
        first = bins[0]
        self.bins, self.rows, self.longest, self.scale = bins, rows, longest, first.impl.scale
        group, size, sizes = first.impl.num_heads // first.impl.num_kv_heads, first.head_size, (0, 0)
        for layer in range(layers):
            found = scratch_sizes(rows, *self._heads(layer), group, size, _device())
            sizes = (max(sizes[0], found[0]), max(sizes[1], found[1]))
        self.register_buffer("partials", torch.empty(sizes[0], dtype=torch.float32), persistent=False)
        self.register_buffer("arrivals", torch.zeros(sizes[1], dtype=torch.int32), persistent=False)

    def _heads(self, layer: int) -> tuple[int, tuple[int, int]]:
        """KV heads of a layer, how many of them have the longest tables, and entries of those."""
        counts = [(own.bin.full, len(own.bin.layers.get(layer, ()))) for own in self.bins]
        full = sum(count for is_full, count in counts if is_full)
        return sum(count for _, count in counts), (max(full, 1), self.longest)

    def of_layer(self, layer: int) -> LayerLaunch:
        """What decodes in a layer."""
        places = [(own.number, place) for own in self.bins for place in own.bin.layers.get(layer, ())]
        return LayerLaunch(self, places, self._heads(layer)[1])

    def pages(self) -> list[PagedBin] | None:
        """The bins in this step; None unless each of its requests has one token."""
        found = []
        for own in self.bins:
            step, _, cache, _ = get_attention_context(own.layer_name)
            if step is None or step.max_query_len != 1 or len(step.seq_lens) > self.rows:
                return None
            seen = {} if own.bin.full else {"prefix": step.rswa_prefix_lens, "window": step.rswa_window}
            found.append(PagedBin(cache, step.block_table, step.seq_lens, **seen))
        return found


class LayerLaunch(nn.Module):
    """One layer's decoding."""

    places: Tensor

    def __init__(self, shared: OneLaunch, places: Iterable[tuple[int, int]], longest: tuple[int, int]) -> None:
        """``places``: of the layer's heads in their order, number of the bin and index in its cache."""
        super().__init__()
        self.shared, self.longest = [shared], longest  # in a list: a module of the model, not of every layer
        self.register_buffer("places", torch.tensor(list(places), dtype=torch.int32).T.contiguous(), persistent=False)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> bool:
        """Whether it stored and attended: for tokens ``[T, heads, size]``, one of each request."""
        (shared,) = self.shared
        pages = shared.pages()
        if pages is None:
            return False
        rows, kv_heads = len(pages[0].lengths), key.shape[1]
        own = query[:rows].unflatten(1, (kv_heads, -1))
        out = output[:rows].unflatten(1, (kv_heads, -1))
        scratch = (shared.partials, shared.arrivals)
        decode_paged(own, key[:rows], value[:rows], pages, self.places, self.longest, scratch, shared.scale, out)
        return True


def _device() -> torch.device:
    """Where the model is made: the engine loads it with the default device set."""
    return torch.empty(0).device
