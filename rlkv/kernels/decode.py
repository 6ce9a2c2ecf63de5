"""Decoding with full and compressible heads together: one launch per layer stores and attends.

Long heads are read in splits of equal length by several programs, the last of which combines them;
the length is a fraction of the longest head's entries.

Shapes: B rows, H KV heads (F full, C compressible), G query heads per KV head, D size of a head, R
ring slots.  Which token is in which slot: :mod:`rlkv.cache.plan`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkv.kernels.step import DecodeStep

LEAST = 128  # entries of a split, at least: below that, combining costs more than it saves
MOST_SPLITS = 128
PROGRAMS = 2  # per multiprocessor, so that one computes while the other waits for memory
TILE_BYTES = 8192  # of keys, and of values, that a program reads at a time
COMBINED = 8192  # numbers that are combined at a time
LOG2E = 1.4426950408889634

Buffers = tuple[Tensor, Tensor]  # keys and values


def splits_of(heads: int, entries: int, device: torch.device) -> int:
    """Return into how many splits each of the longest heads goes.

    heads: their number in all rows; short heads take hardly any time.
    """
    wanted = triton.cdiv(PROGRAMS * _processors(device), heads)
    return max(1, min(wanted, triton.cdiv(entries, LEAST), MOST_SPLITS))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def tiles(group: int, size: int, itemsize: int) -> dict[str, int]:
    """Return what the kernel is compiled for, and how."""
    tile = max(16, triton.next_power_of_2(size))
    group_tile = triton.next_power_of_2(group)
    return {
        "SIZE": size,
        "TILE": tile,
        "GROUP": group,
        # matrix units take 16 rows; a single query is faster without them
        "QUERIES": max(16, group_tile) if group > 1 else 1,
        "GROUP_TILE": group_tile,
        "BLOCK": max(16, min(64, TILE_BYTES // (tile * itemsize))),
        "AT_ONCE": max(1, min(16, COMBINED // (group_tile * tile))),
        "LEAST_SPLIT": LEAST,
        "num_warps": 4,
    }


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
    """Store one new token per row in the buffers, and attend with its queries: ``[B, H, G, D]``.

    Args:
        query: ``[B, H, G, D]``; key, value ``[B, H, D]``; of the buffers' dtype.
        full: keys and values ``[B, F, capacity, D]``, with room for the new token; None: no full
            heads.
        ring: keys and values ``[B, C, R, D]``; None: no compressible heads.
        places: int32 ``[H]``: index i of a full head in its buffers, -1 - i of a compressible head.
        scale: of the logits.
    """
    b, h, g, d = query.shape
    longest = full or ring
    assert longest is not None
    full_keys, full_values = full or longest  # what no head uses is not read
    ring_keys, ring_values = ring or longest
    for buffer in (full_keys, full_values, ring_keys, ring_values):
        assert buffer.is_contiguous()
    splits = splits_of(b * longest[0].shape[1], longest[0].shape[2], query.device)
    numbers = b * h * splits * g * (d + 1) if splits > 1 else 0
    partials, arrivals = step.scratch(numbers, b * h)
    out = query.new_empty(b, h, g, d)
    with torch.cuda.device_of(query):
        _decode[(b, h, splits)](
            out,
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            full_keys,
            full_values,
            ring_keys,
            ring_values,
            places,
            step.start,
            step.padding,
            step.sinks,
            partials,
            arrivals,
            scale * LOG2E,
            capacity=full_keys.shape[2],
            slots=ring_keys.shape[2],
            full_heads=full_keys.shape[1] if full else 0,
            ring_heads=ring_keys.shape[1] if ring else 0,
            window=step.window,
            padding_step=int(step.padding.numel() > 1),
            sinks_step=int(step.sinks.numel() > 1),
            **tiles(g, d, query.dtype.itemsize),
        )
    return out


# none of these may cause another compilation: they differ between layers, or change as a text grows
CHANGING = [
    "capacity",
    "slots",
    "full_heads",
    "ring_heads",
    "window",
    "padding_step",
    "sinks_step",
]


@triton.jit(do_not_specialize=CHANGING)
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
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
):
    """Run split ``z`` of KV head ``y`` of row ``x``; entries of a head are numbered from 0."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    column = tl.load(start).to(tl.int32)
    # a padding token sees itself, as if it were the first of its row
    first = tl.minimum(tl.load(padding + row * padding_step).to(tl.int32), column)
    sink = tl.load(sinks + row * sinks_step).to(tl.int32)
    place = tl.load(places + head)
    position = column - first
    if place >= 0:
        base = (row * full_heads + place) * capacity + first
        keys, values = full_keys + base * SIZE, full_values + base * SIZE
        entries, fresh = position + 1, position
    else:
        base = (row * ring_heads - 1 - place) * slots
        keys, values = ring_keys + base * SIZE, ring_values + base * SIZE
        entries = tl.minimum(position + 1, sink + window)
        fresh = tl.where(position < sink, position, sink + (position - sink) % window)
    longest = tl.where(full_heads > 0, column + 1, tl.minimum(column + 1, slots))
    splits = tl.num_programs(2)
    length = tl.maximum((longest + splits - 1) // splits, LEAST_SPLIT)
    length = (length + BLOCK - 1) // BLOCK * BLOCK
    active = (entries + length - 1) // length
    if split >= active:
        return
    place_BH = row * tl.num_programs(1) + head
    one = tl.arange(0, QUERIES)
    query_GD = _load_rows(query + place_BH * GROUP * SIZE, one, one < GROUP, SIZE, TILE)
    peak_G, total_G, sum_GD = _attend_range(
        query_GD,
        key + place_BH * SIZE,
        value + place_BH * SIZE,
        keys,
        values,
        split * length,
        tl.minimum(split * length + length, entries),
        fresh,
        scale,
        SIZE,
        TILE,
        QUERIES,
        BLOCK,
    )
    _hand_on(
        out,
        partials,
        arrivals,
        place_BH,
        split,
        active,
        peak_G,
        total_G,
        sum_GD,
        SIZE,
        TILE,
        GROUP,
        QUERIES,
        GROUP_TILE,
        AT_ONCE,
    )


@triton.jit
def _load_rows(states, index, wanted, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Load the ``wanted`` rows of states ``[n, SIZE]``, and 0 for the others."""
    size = tl.arange(0, TILE)
    mask = wanted[:, None] & (size[None, :] < SIZE)
    return tl.load(states + index[:, None] * SIZE + size[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_range(
    query_GD,
    key,
    value,
    keys,
    values,
    begin,
    end,
    fresh,
    scale,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend to the entries from ``begin`` to ``end``; store the new token if it is one of them.

    Returns the maximum of the logits (base 2), the norm, and the sum of values.
    """
    size = tl.arange(0, TILE)
    peak_G = tl.full([QUERIES], float("-inf"), tl.float32)
    total_G = tl.full([QUERIES], 0.0, tl.float32)
    sum_GD = tl.full([QUERIES, TILE], 0.0, tl.float32)
    if (fresh >= begin) & (fresh < end):
        # stored only by this program, and never read back from memory
        key_D = tl.load(key + size, mask=size < SIZE, other=0.0)
        value_D = tl.load(value + size, mask=size < SIZE, other=0.0)
        tl.store(keys + fresh * SIZE + size, key_D, mask=size < SIZE)
        tl.store(values + fresh * SIZE + size, value_D, mask=size < SIZE)
        product_GD = query_GD.to(tl.float32) * key_D.to(tl.float32)[None, :]
        peak_G = tl.sum(product_GD, axis=1) * scale
        total_G += 1.0
        sum_GD += value_D.to(tl.float32)[None, :]
    for at in tl.range(begin, end, BLOCK, num_stages=3):
        entry = at + tl.arange(0, BLOCK)
        seen = (entry < end) & (entry != fresh)
        # 0 where masked, since 0 * NaN of unused memory would be NaN
        key_ND = _load_rows(keys, entry, seen, SIZE, TILE)
        value_ND = _load_rows(values, entry, seen, SIZE, TILE)
        if QUERIES == 1:
            product_GND = query_GD.to(tl.float32)[:, None, :] * key_ND.to(tl.float32)[None, :, :]
            logit_GN = tl.sum(product_GND, axis=2)
        else:
            logit_GN = tl.dot(query_GD, tl.trans(key_ND), input_precision="ieee")
        logit_GN = tl.where(seen[None, :], logit_GN * scale, float("-inf"))
        # finite: a block has an entry, or it held the new token, which is in the maximum already
        peak_new = tl.maximum(peak_G, tl.max(logit_GN, axis=1))
        shrink_G = tl.exp2(peak_G - peak_new)
        weight_GN = tl.exp2(logit_GN - peak_new[:, None])
        if QUERIES == 1:
            part_GD = tl.sum(weight_GN[:, :, None] * value_ND.to(tl.float32)[None, :, :], axis=1)
        else:
            part_GD = tl.dot(weight_GN.to(value_ND.dtype), value_ND, input_precision="ieee")
        total_G = total_G * shrink_G + tl.sum(weight_GN, axis=1)
        sum_GD = sum_GD * shrink_G[:, None] + part_GD
        peak_G = peak_new
    return peak_G, total_G, sum_GD


@triton.jit
def _hand_on(
    out,
    partials,
    arrivals,
    place_BH,
    split,
    active,
    peak_G,
    total_G,
    sum_GD,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the output of an only split; else keep this one's.

    The last of the ``active`` splits combines all.
    """
    one, size = tl.arange(0, QUERIES), tl.arange(0, TILE)
    sum_GD = sum_GD / total_G[:, None]
    to = out + place_BH * GROUP * SIZE
    offset = one[:, None] * SIZE + size[None, :]
    stored = (one[:, None] < GROUP) & (size[None, :] < SIZE)
    if active == 1:
        tl.store(to + offset, sum_GD.to(out.dtype.element_ty), mask=stored)
    else:
        splits = tl.num_programs(2)
        heads = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        sums = partials + place_BH * splits * (GROUP * SIZE)
        norms = partials + (heads * SIZE + place_BH) * splits * GROUP
        tl.store(norms + split * GROUP + one, peak_G + tl.log2(total_G), mask=one < GROUP)
        tl.store(sums + split * GROUP * SIZE + offset, sum_GD, mask=stored)
        # all threads have stored before one of them says so; acquire: the last to come sees what
        # all have stored
        tl.debug_barrier()
        if tl.atomic_add(arrivals + place_BH, 1, sem="acq_rel", scope="gpu") == active - 1:
            _combine(to, norms, sums, active, SIZE, TILE, GROUP, GROUP_TILE, AT_ONCE)
            tl.store(arrivals + place_BH, 0)


@triton.jit
def _combine(
    to,
    norms,
    sums,
    active,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Combine the splits of a head in their order, so that the output is the same every time."""
    one, size = tl.arange(0, GROUP_TILE), tl.arange(0, TILE)
    peak_G = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total_G = tl.full([GROUP_TILE], 0.0, tl.float32)
    sum_GD = tl.full([GROUP_TILE, TILE], 0.0, tl.float32)
    stored = (one[:, None] < GROUP) & (size[None, :] < SIZE)
    for at in range(0, active, AT_ONCE):
        split = at + tl.arange(0, AT_ONCE)
        place_SG = split[:, None] * GROUP + one[None, :]
        # .cg: from the level of cache that all multiprocessors share
        norm_SG = tl.load(
            norms + place_SG,
            mask=(split[:, None] < active) & (one[None, :] < GROUP),
            other=0.0,
            cache_modifier=".cg",
        )
        norm_SG = tl.where(split[:, None] < active, norm_SG, float("-inf"))
        sum_SGD = tl.load(
            sums + place_SG[:, :, None] * SIZE + size[None, None, :],
            mask=(split[:, None, None] < active) & stored[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak_new = tl.maximum(peak_G, tl.max(norm_SG, axis=0))
        shrink_G = tl.exp2(peak_G - peak_new)
        weight_SG = tl.exp2(norm_SG - peak_new[None, :])
        total_G = total_G * shrink_G + tl.sum(weight_SG, axis=0)
        sum_GD = sum_GD * shrink_G[:, None] + tl.sum(weight_SG[:, :, None] * sum_SGD, axis=0)
        peak_G = peak_new
    sum_GD = sum_GD / total_G[:, None]
    tl.store(to + one[:, None] * SIZE + size[None, :], sum_GD.to(to.dtype.element_ty), mask=stored)
