"""Decoding with full and compressible heads side by side: one launch per layer stores the new token and attends.

All splits have the same number of entries, a fraction of the longest head's (:mod:`rlkv.kernels.splits`).

Shapes: B rows, H KV heads (F full, C compressible), G query heads per KV head, D size of a key, E of a value, R ring
slots.  Which token is in which slot, and which slots are in use: :mod:`rlkv.cache.plan`.
"""

from __future__ import annotations

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
from rlkv.kernels.step import DecodeStep

Buffers = tuple[Tensor, Tensor]  # keys and values


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    full: Buffers | None,
    ring: Buffers | None,
    places: Tensor,
    step: DecodeStep,
    scale: float,
) -> Tensor:
    """Store one new token per row in the buffers, and attend with its queries: ``[B, H, G, E]``.

    Args:
        query, key, value: ``[B, H, G, D]``, ``[B, H, D]``, ``[B, H, E]``, of the buffers' dtype.
        full: buffers ``[B, F, capacity, D]`` and ``[..., E]``, with room for the new token; None: no full heads.
        ring: buffers ``[B, C, R, D]`` and ``[..., E]``; None: no compressible heads.
        places: int32 ``[H]``: index i of a full head in its buffers, -1 - i of a compressible head.
        scale: of the logits.
    """
    b, h, g, d = query.shape
    e = value.shape[2]
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    keys, values = full or ring or (None, None)
    assert keys is not None
    assert values is not None
    full_keys, full_values = full or (keys, values)  # what no head uses is not read
    ring_keys, ring_values = ring or (keys, values)
    assert all(buffer.is_contiguous() for buffer in (full_keys, full_values, ring_keys, ring_values))
    capacity, slots = full_keys.shape[2], ring_keys.shape[2]
    splits = splits_of(b * keys.shape[1], keys.shape[2], query.device)
    partials, arrivals = step.scratch(b * h * splits * g * (e + 1) if splits > 1 else 0, b * h)
    out = query.new_empty(b, h, g, e)
    with torch.cuda.device_of(query):
        _decode[(b, h, splits)](
            *(out, query, key, value, full_keys, full_values, ring_keys, ring_values),
            *(places, step.start, step.padding, step.sinks, partials, arrivals, scale * LOG2E),
            *(capacity, slots, full_keys.shape[1] if full else 0, ring_keys.shape[1] if ring else 0, step.window),
            *(int(step.padding.numel() > 1), int(step.sinks.numel() > 1)),
            *(query.stride(0), query.stride(1), query.stride(2)),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            **tiles(g, d, e, query.dtype.itemsize),
        )
    return out


# none of these may cause another compilation: they differ between layers, or change as a text grows
_CHANGING = ["capacity", "slots", "full_heads", "ring_heads", "window", "padding_step", "sinks_step"]


@triton.jit(do_not_specialize=_CHANGING)
def _decode(
    out,
    query,
    key,
    value,
    full_keys,
    full_values,
    ring_keys,
    ring_values,
    places,
    start,
    padding,
    sinks,
    partials,
    arrivals,
    scale,
    capacity,
    slots,
    full_heads,
    ring_heads,
    window,
    padding_step,
    sinks_step,
    query_row,
    query_head,
    query_own,
    key_row,
    key_head,
    value_row,
    value_head,
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
    """One program: split ``z`` of KV head ``y`` of row ``x``; entries of a head are numbered from 0."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    column = tl.load(start).to(tl.int32)
    # a padding token sees itself, as if it were the first of its row
    first = tl.minimum(tl.load(padding + row * padding_step).to(tl.int32), column)
    sink = tl.load(sinks + row * sinks_step).to(tl.int32)
    place = tl.load(places + head)
    position = column - first
    if place >= 0:
        base = (row * full_heads + place) * capacity + first
        keys, values = full_keys + base * KEY, full_values + base * VALUE
        entries, fresh = position + 1, position
    else:
        base = (row * ring_heads - 1 - place) * slots
        keys, values = ring_keys + base * KEY, ring_values + base * VALUE
        entries = tl.minimum(position + 1, sink + window)
        fresh = tl.where(position < sink, position, sink + (position - sink) % window)
    longest = tl.where(full_heads > 0, column + 1, tl.minimum(column + 1, slots))
    length = tl.maximum((longest + splits - 1) // splits, LEAST_SPLIT)
    length = (length + BLOCK - 1) // BLOCK * BLOCK
    active = (entries + length - 1) // length
    if split >= active:
        return
    size = tl.arange(0, TILE)
    mine = query + row * query_row + head * query_head
    query_GD = load_queries(mine, query_own, KEY, TILE, GROUP, QUERIES)
    peak_G, total_G, sum_GE = attend_nothing(QUERIES, TILE)
    begin, end = split * length, tl.minimum(split * length + length, entries)
    if (fresh >= begin) & (fresh < end):
        # stored by this program alone
        key_D = tl.load(key + row * key_row + head * key_head + size, mask=size < KEY, other=0.0)
        value_E = tl.load(value + row * value_row + head * value_head + size, mask=size < VALUE, other=0.0)
        tl.store(keys + fresh * KEY + size, key_D, mask=size < KEY)
        tl.store(values + fresh * VALUE + size, value_E, mask=size < VALUE)
        peak_G, total_G, sum_GE = attend_first(query_GD, key_D, value_E, total_G, sum_GE, scale)
    for at in tl.range(begin, end, BLOCK, num_stages=3):
        entry = at + tl.arange(0, BLOCK)
        seen = (entry < end) & (entry != fresh)
        # 0 where masked, since 0 * NaN of unused memory would be NaN
        key_ND = tl.load(
            keys + entry[:, None] * KEY + size[None, :], mask=seen[:, None] & (size[None, :] < KEY), other=0.0
        )
        value_NE = tl.load(
            values + entry[:, None] * VALUE + size[None, :], mask=seen[:, None] & (size[None, :] < VALUE), other=0.0
        )
        peak_G, total_G, sum_GE = attend(query_GD, key_ND, value_NE, seen, peak_G, total_G, sum_GE, scale)
    hand_on(
        *(out, partials, arrivals, row, head, split, active, peak_G, total_G, sum_GE),
        *(VALUE, TILE, GROUP, QUERIES, GROUP_TILE, AT_ONCE),
    )
