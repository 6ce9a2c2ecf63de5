"""Decoding over block tables: one launch per layer stores the new token of every request and attends, for all bins.

A *bin* is a set of heads with a block table of their own (:mod:`rlkv.vllm.blocks.packing`).  A head sees the first
``prefix`` and the last ``window`` entries of its table, and reads nothing between.  A request's splits have the same
number of entries in all heads, a fraction of its longest table's (:mod:`rlkv.kernels.splits`).

Shapes: B rows, H KV heads, G query heads per KV head, D size of a head, N entries of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkv.kernels.splits import (
    LOG2E,
    attend,
    attend_first,
    attend_nothing,
    hand_on,
    load_queries,
    splits_of,
    tiles,
)

EVERYTHING = 1 << 30  # a window that no text is longer than


@dataclass(frozen=True)
class PagedBin:
    """The cache of the heads of a bin in a layer's step.

    Attributes:
        cache: ``[blocks, heads, N, 2 * D]``, keys then values, of any strides but the last.
        table: int32 ``[rows, blocks of a row]``.
        lengths: int32 ``[rows]``, entries with the new token; 0: a row of padding.
        prefix: int32 ``[rows]``, first entries that are seen; None: all are.
        window: last entries that are seen, the new one among them.
    """

    cache: Tensor
    table: Tensor
    lengths: Tensor
    prefix: Tensor | None = None
    window: int = EVERYTHING


def decode_paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bins: list[PagedBin],
    places: Tensor,
    longest: tuple[int, int],
    scratch: tuple[Tensor, Tensor],
    scale: float,
    out: Tensor,
) -> None:
    """Store one new token per row behind the last entry of its table, and attend with its queries.

    Args:
        query, key, value: ``[B, H, G, D]``, ``[B, H, D]`` twice, of the caches' dtype; the last dimension side by side.
        places: int32 ``[2, H]``: the bin of a head, and its index in the bin's cache.
        longest: how many heads have the longest tables, and entries of the longest text; the number of splits
            follows from them, so that it is the same in all replays of a captured graph.
        scratch: float32, and int32 that are 0, of :func:`scratch_sizes`; a launch leaves the second at 0.
        scale: of the logits.
        out: contiguous ``[B, H, G, D]``; 0 in rows of padding.
    """
    b, h, g, d = query.shape
    splits = splits_of(b * longest[0], longest[1], query.device)
    caches = [own.cache for own in bins]
    with torch.cuda.device_of(query):
        _decode_paged[(b, h, splits)](
            *(out, query, key, value, places, tuple(caches), tuple(own.table for own in bins)),
            tuple(own.lengths for own in bins),
            tuple(own.lengths if own.prefix is None else own.prefix for own in bins),
            tuple(own.window for own in bins),
            tuple(own.table.stride(0) for own in bins),
            *(tuple(cache.stride(at) for cache in caches) for at in (0, 1, 2)),
            tuple(cache.shape[2] for cache in caches),
            *(*scratch, scale * LOG2E, query.stride(0), query.stride(1), query.stride(2)),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            BINS=len(bins),
            **tiles(g, d, d, query.dtype.itemsize),
        )


def scratch_sizes(
    rows: int, heads: int, longest: tuple[int, int], group: int, size: int, device: torch.device
) -> tuple[int, int]:
    """Numbers that the splits of up to ``rows`` rows hand on, and counters."""
    programs = max(n * splits_of(n * longest[0], longest[1], device) for n in range(1, rows + 1))
    return programs * heads * group * (size + 1), rows * heads


@triton.jit
def _decode_paged(
    out,
    query,
    key,
    value,
    places,
    caches,
    tables,
    lengths,
    prefixes,
    windows,
    table_strides,
    block_strides,
    head_strides,
    entry_strides,
    in_block,
    partials,
    arrivals,
    scale,
    query_row,
    query_head,
    query_own,
    key_row,
    key_head,
    value_row,
    value_head,
    BINS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
):
    """One program: split ``z`` of KV head ``y`` of row ``x``; entries that a head sees are numbered from 0."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own = tl.load(places + head)
    cache, table = caches[0], tables[0] + row * table_strides[0]
    length, prefix = tl.load(lengths[0] + row), tl.load(prefixes[0] + row)
    window, block_stride, head_stride = windows[0], block_strides[0], head_strides[0]
    entry_stride, entries_in = entry_strides[0], in_block[0]
    longest = length
    for number in tl.static_range(1, BINS):
        is_own = own == number
        own_length = tl.load(lengths[number] + row)
        longest = tl.maximum(longest, own_length)
        length = tl.where(is_own, own_length, length)
        prefix = tl.where(is_own, tl.load(prefixes[number] + row), prefix)
        cache = tl.where(is_own, caches[number], cache)
        table = tl.where(is_own, tables[number] + row * table_strides[number], table)
        window = tl.where(is_own, windows[number], window)
        block_stride = tl.where(is_own, block_strides[number], block_stride)
        head_stride = tl.where(is_own, head_strides[number], head_stride)
        entry_stride = tl.where(is_own, entry_strides[number], entry_stride)
        entries_in = tl.where(is_own, in_block[number], entries_in)
    skipped = tl.maximum(length - prefix - window, 0)
    entries = length - skipped
    size = tl.arange(0, TILE)
    if entries <= 0:
        one = tl.arange(0, QUERIES)
        to = out + (row * tl.num_programs(1) + head) * GROUP * VALUE + one[:, None] * VALUE + size[None, :]
        inside = (one[:, None] < GROUP) & (size[None, :] < VALUE) & (split == 0)
        tl.store(to, tl.full([QUERIES, TILE], 0.0, out.dtype.element_ty), mask=inside)
        return
    share = tl.maximum((longest + tl.num_programs(2) - 1) // tl.num_programs(2), LEAST_SPLIT)
    share = (share + BLOCK - 1) // BLOCK * BLOCK
    active = (entries + share - 1) // share
    if split >= active:
        return
    keys = cache + tl.load(places + tl.num_programs(1) + head).to(tl.int64) * head_stride
    values = keys + KEY
    query_GD = load_queries(query + row * query_row + head * query_head, query_own, KEY, TILE, GROUP, QUERIES)
    peak_G, total_G, sum_GE = attend_nothing(QUERIES, TILE)
    begin, end = split * share, tl.minimum(split * share + share, entries)
    if end == entries:
        # stored by this program alone
        key_D = tl.load(key + row * key_row + head * key_head + size, mask=size < KEY, other=0.0)
        value_E = tl.load(value + row * value_row + head * value_head + size, mask=size < VALUE, other=0.0)
        block = tl.load(table + (length - 1) // entries_in).to(tl.int64)
        fresh = block * block_stride + (length - 1) % entries_in * entry_stride
        tl.store(keys + fresh + size, key_D, mask=size < KEY)
        tl.store(values + fresh + size, value_E, mask=size < VALUE)
        peak_G, total_G, sum_GE = attend_first(query_GD, key_D, value_E, total_G, sum_GE, scale)
        end -= 1
    # block numbers are loaded first: with fewer stages the loads of keys and values are waited for at once
    for at in tl.range(begin, end, BLOCK, num_stages=5 if QUERIES > 1 else 3):
        entry = at + tl.arange(0, BLOCK)
        seen = entry < end
        index = entry + tl.where(entry < prefix, 0, skipped)
        block_N = tl.load(table + index // entries_in, mask=seen, other=0).to(tl.int64)
        place_N = block_N * block_stride + index % entries_in * entry_stride
        # 0 where masked, since 0 * NaN of unused memory would be NaN
        key_ND = tl.load(keys + place_N[:, None] + size[None, :], mask=seen[:, None] & (size[None, :] < KEY), other=0.0)
        value_NE = tl.load(
            values + place_N[:, None] + size[None, :], mask=seen[:, None] & (size[None, :] < VALUE), other=0.0
        )
        peak_G, total_G, sum_GE = attend(query_GD, key_ND, value_NE, seen, peak_G, total_G, sum_GE, scale)
    hand_on(
        *(out, partials, arrivals, row, head, split, active, peak_G, total_G, sum_GE),
        *(VALUE, TILE, GROUP, QUERIES, GROUP_TILE, AT_ONCE),
    )
