"""Bins that are read together: a launch for each layer, where blocks of its bins are equally long.

All bins are in one pool, and a block has the same number in all of them: their heads are pages of
one cache (:mod:`rlkv.vllm.head_rows`), so a layer's parts are sequences of one call of the stock
CPU kernel, and one call stores their keys and values.

Shapes: K bins, L layers, H KV heads of a layer, G query heads for each, D head size, T tokens of a
step, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention.attention import get_attention_context

from rlkv.vllm.head_rows import HeadLayers, HeadPlace, Kernel, Places, StepRows, split_pages


class JoinedBins:
    """The bins of layers that are read together, with what is made once in a step for all of them.

    Attributes:
        bins: layers of the engine (``BinAttention``) whose blocks have equally many tokens.
        layers: the parts (``PartAttention``) of each layer that has several of these bins.
        places: where the heads of each of these layers are, part by part.
    """

    def __init__(self, bins: Sequence[Any], dtype: torch.dtype) -> None:
        self.bins = bins
        self.dtype = dtype
        self.layers: list[list[Any]] = []
        self.places: list[Places] = []
        self._rows: StepRows | None = None
        self._cache = torch.empty(0), torch.empty(0)  # keys and values of all bins
        self._slots_KT = torch.empty(0)  # of the bins' own blocks
        self._slots_LN = torch.empty(0)  # of pages, for the states of all heads

    def add_layer(self, parts: list[Any]) -> int | None:
        """Return the number under which a layer's parts are read together; None: they are not."""
        names = [own.layer_name for own in self.bins]
        if len(parts) == 1 or not all(part.bin_name in names for part in parts):
            return None
        places = []
        for part in parts:
            for head in range(part.num_kv_heads):
                places.append(HeadPlace(names.index(part.bin_name), part.first + head))
        self.layers.append(parts)
        self.places.append(tuple(places))
        return len(self.layers) - 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store and attend, with states ``[T, heads, D]`` of all parts."""
        own = self.bins[0]
        step = get_attention_context(own.layer_name)[0]
        if step is None:  # the engine's profiling run
            return
        if self._rows is None or self._rows.kinds[0] is not step:
            self._begin()
        assert self._rows is not None
        kernel = self._rows.of.kernel
        tokens = step.num_actual_tokens
        ops.cpu_attn_reshape_and_cache(
            key[:tokens].reshape(-1, 1, kernel.head_size),
            value[:tokens].reshape(-1, 1, kernel.head_size),
            *self._cache,
            self._slots_LN[layer],
            kernel.isa,
            k_scale=own._k_scale_float,
            v_scale=own._v_scale_float,
            kv_cache_dtype=kernel.kv_cache_dtype,
        )
        self._rows.attend(own, self.places[layer], query, self._cache, own.impl.scale, output)
        if own.check is not None:
            self._check(layer, (query, key, value), output)

    def _begin(self) -> None:
        """Make what all layers share in a step."""
        found = [get_attention_context(own.layer_name) for own in self.bins]
        kinds = [metadata for metadata, *_ in found]
        tokens = kinds[0].num_actual_tokens
        self._slots_KT = torch.stack([slots[:tokens] for *_, slots in found])
        cache = self.bins[0].kv_cache
        blocks, _, size, twice = cache.shape
        page = size * twice
        pages = cache.stride(0) // page
        for own in self.bins:
            assert own.kv_cache.data_ptr() == cache.data_ptr(), "bins in several pools"
            assert own.kv_cache.stride(0) == pages * page, "pages that begin within another one"
        if self._rows is None or self._rows.of.pages != pages:
            own = self.bins[0]
            kernel = Kernel(own.head_size, self.dtype, own.isa, own.kv_cache_dtype, size)
            group_size = own.impl.num_heads // own.impl.num_kv_heads
            of = HeadLayers(self.places, pages, kernel, group_size)
        else:
            of = self._rows.of
        most = max(own.kv_cache.shape[1] for own in self.bins)
        shape = ((blocks - 1) * pages + most, 1, 2 * size, twice // 2)
        self._cache = split_pages(cache.as_strided(shape, (page, page, twice // 2, 1)))
        self._rows = StepRows(of, kinds)
        # a slot of a page is its number times N plus the place in it; -1: nothing is stored
        slot_KT = self._slots_KT
        first_KT = slot_KT + slot_KT // size * ((pages - 1) * size)
        kind_LH, page_LH = of.numbers.unbind(-1)
        slot_LTH = first_KT[kind_LH].transpose(1, 2) + page_LH[:, None] * size
        if bool((slot_KT < 0).any()):
            slot_LTH = slot_LTH.where(slot_KT[kind_LH].transpose(1, 2) >= 0, -1)
        self._slots_LN = slot_LTH.flatten(1)

    def _check(self, layer: int, states: Sequence[Tensor], output: Tensor) -> None:
        assert self._rows is not None
        places = self.places[layer]
        first = 0
        for part in self.layers[layer]:
            end = first + part.num_kv_heads
            group = part.num_heads // part.num_kv_heads
            query, key, value = states
            mine = slice(first * group, end * group)
            own = (query[:, mine], key[:, first:end], value[:, first:end])
            kind = places[first].kind
            for head in range(first, end):
                rows = [*self._rows.handed(places, head)]
                part.check(
                    self.bins[kind], rows, self._slots_KT[kind], own, output[:, mine], (layer, head)
                )
            first = end
