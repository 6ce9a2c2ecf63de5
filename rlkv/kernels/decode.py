"""Decoding with full and compressible heads side by side: one launch per layer stores the new token
and attends.

All splits have the same number of entries, a fraction of the longest head's
(:mod:`rlkv.kernels.decode`).

Shapes: B rows, H KV heads (F full, C compressible), G query heads per KV head, D size of a key, E
of a value, R ring slots.  Which token is in which slot, and which slots are in use:
:mod:`rlkv.cache.plan`.
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


def splits_of(heads: int, entries: int, device: torch.device) -> int:
    """Into how many splits the longest heads, ``heads`` in all rows, go.

    Short heads take hardly any time.
    """
    return max(
        1,
        min(
            triton.cdiv(PROGRAMS * _processors(device), heads),
            triton.cdiv(entries, LEAST),
            MOST_SPLITS,
        ),
    )


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def tiles(group: int, key_size: int, value_size: int, itemsize: int) -> dict[str, int]:
    """What a kernel is compiled for, and how."""
    tile = max(16, triton.next_power_of_2(max(key_size, value_size)))
    group_tile = triton.next_power_of_2(group)
    return {
        "KEY": key_size,
        "VALUE": value_size,
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


@triton.jit
def load_queries(
    query,
    own_stride,
    KEY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The tile of a group's queries, which lie ``own_stride`` apart; 0 where it has none."""
    one, size = tl.arange(0, QUERIES), tl.arange(0, TILE)
    return tl.load(
        query + one[:, None] * own_stride + size[None, :],
        mask=(one[:, None] < GROUP) & (size[None, :] < KEY),
        other=0.0,
    )


@triton.jit
def attend_nothing(QUERIES: tl.constexpr, TILE: tl.constexpr):
    """Maximum of the logits (base 2), norm, and sum of values before the first entry."""
    return (
        tl.full([QUERIES], float("-inf"), tl.float32),
        tl.full([QUERIES], 0.0, tl.float32),
        tl.full([QUERIES, TILE], 0.0, tl.float32),
    )


@triton.jit
def attend_first(query_GD, key_D, value_E, total_G, sum_GE, scale):
    """The new token, before all others: it is never read back from memory."""
    peak_G = tl.sum(query_GD.to(tl.float32) * key_D.to(tl.float32)[None, :], axis=1) * scale
    return peak_G, total_G + 1.0, sum_GE + value_E.to(tl.float32)[None, :]


@triton.jit
def attend(query_GD, key_ND, value_NE, seen, peak_G, total_G, sum_GE, scale):
    """One more block of entries."""
    if query_GD.shape[0] == 1:
        logit_GN = tl.sum(
            query_GD.to(tl.float32)[:, None, :] * key_ND.to(tl.float32)[None, :, :], axis=2
        )
    else:
        logit_GN = tl.dot(query_GD, tl.trans(key_ND), input_precision="ieee")
    logit_GN = tl.where(seen[None, :], logit_GN * scale, float("-inf"))
    # finite: a block has an entry, or it held the new token, which is in the maximum already
    peak_new = tl.maximum(peak_G, tl.max(logit_GN, axis=1))
    shrink_G = tl.exp2(peak_G - peak_new)
    weight_GN = tl.exp2(logit_GN - peak_new[:, None])
    if query_GD.shape[0] == 1:
        part_GE = tl.sum(weight_GN[:, :, None] * value_NE.to(tl.float32)[None, :, :], axis=1)
    else:
        part_GE = tl.dot(weight_GN.to(value_NE.dtype), value_NE, input_precision="ieee")
    total_G = total_G * shrink_G + tl.sum(weight_GN, axis=1)
    return peak_new, total_G, sum_GE * shrink_G[:, None] + part_GE


@triton.jit
def hand_on(
    out,
    partials,
    arrivals,
    row,
    head,
    split,
    active,
    peak_G,
    total_G,
    sum_GE,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the output of an only split; else keep this one's, and combine all ``active`` ones if
    it is the last.
    """
    one, size = tl.arange(0, QUERIES), tl.arange(0, TILE)
    splits = tl.num_programs(2)
    sum_GE = sum_GE / total_G[:, None]
    to = out + (row * tl.num_programs(1) + head) * GROUP * VALUE
    stored = (one[:, None] < GROUP) & (size[None, :] < VALUE)
    if active == 1:
        tl.store(
            to + one[:, None] * VALUE + size[None, :], sum_GE.to(out.dtype.element_ty), mask=stored
        )
    else:
        count = row * tl.num_programs(1) + head
        rows = tl.num_programs(0).to(tl.int64)
        sums = partials + count * splits * (GROUP * VALUE)
        norms = partials + (rows * tl.num_programs(1) * VALUE + count) * splits * GROUP
        tl.store(norms + split * GROUP + one, peak_G + tl.log2(total_G), mask=one < GROUP)
        tl.store(sums + (split * GROUP + one[:, None]) * VALUE + size[None, :], sum_GE, mask=stored)
        # all threads have stored before one of them says so; acquire: the last to come sees what
        # all have stored
        tl.debug_barrier()
        if tl.atomic_add(arrivals + count, 1, sem="acq_rel", scope="gpu") == active - 1:
            _combine(to, norms, sums, active, VALUE, TILE, GROUP, GROUP_TILE, AT_ONCE)
            tl.store(arrivals + count, 0)


@triton.jit
def _combine(
    to,
    norms,
    sums,
    active,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The output of a head from those of its splits, in their order, so that it is the same every
    time.
    """
    one, size = tl.arange(0, GROUP_TILE), tl.arange(0, TILE)
    peak_G = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total_G = tl.full([GROUP_TILE], 0.0, tl.float32)
    sum_GE = tl.full([GROUP_TILE, TILE], 0.0, tl.float32)
    stored = (one[:, None] < GROUP) & (size[None, :] < VALUE)
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
        sum_SGE = tl.load(
            sums + place_SG[:, :, None] * VALUE + size[None, None, :],
            mask=(split[:, None, None] < active) & stored[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak_new = tl.maximum(peak_G, tl.max(norm_SG, axis=0))
        shrink_G = tl.exp2(peak_G - peak_new)
        weight_SG = tl.exp2(norm_SG - peak_new[None, :])
        total_G = total_G * shrink_G + tl.sum(weight_SG, axis=0)
        sum_GE = sum_GE * shrink_G[:, None] + tl.sum(weight_SG[:, :, None] * sum_SGE, axis=0)
        peak_G = peak_new
    sum_GE = sum_GE / total_G[:, None]
    tl.store(to + one[:, None] * VALUE + size[None, :], sum_GE.to(to.dtype.element_ty), mask=stored)


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
        full: buffers ``[B, F, capacity, D]`` and ``[..., E]``, with room for the new token; None:
            no full heads.
        ring: buffers ``[B, C, R, D]`` and ``[..., E]``; None: no compressible heads.
        places: int32 ``[H]``: index i of a full head in its buffers, -1 - i of a compressible head.
        scale: of the logits.
    """
    b, h, g, d = query.shape
    e = value.shape[2]
    query, key, value = (
        states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value)
    )
    keys, values = full or ring or (None, None)
    assert keys is not None
    assert values is not None
    full_keys, full_values = full or (keys, values)  # what no head uses is not read
    ring_keys, ring_values = ring or (keys, values)
    assert all(
        buffer.is_contiguous() for buffer in (full_keys, full_values, ring_keys, ring_values)
    )
    capacity, slots = full_keys.shape[2], ring_keys.shape[2]
    splits = splits_of(b * keys.shape[1], keys.shape[2], query.device)
    partials, arrivals = step.scratch(b * h * splits * g * (e + 1) if splits > 1 else 0, b * h)
    out = query.new_empty(b, h, g, e)
    with torch.cuda.device_of(query):
        _decode[(b, h, splits)](
            *(out, query, key, value, full_keys, full_values, ring_keys, ring_values),
            *(places, step.start, step.padding, step.sinks, partials, arrivals, scale * LOG2E),
            *(
                capacity,
                slots,
                full_keys.shape[1] if full else 0,
                ring_keys.shape[1] if ring else 0,
                step.window,
            ),
            *(int(step.padding.numel() > 1), int(step.sinks.numel() > 1)),
            *(query.stride(0), query.stride(1), query.stride(2)),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            **tiles(g, d, e, query.dtype.itemsize),
        )
    return out


# none of these may cause another compilation: they differ between layers, or change as a text grows
_CHANGING = [
    "capacity",
    "slots",
    "full_heads",
    "ring_heads",
    "window",
    "padding_step",
    "sinks_step",
]


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
    """One program: split ``z`` of KV head ``y`` of row ``x``.

    Entries of a head are numbered from 0.
    """
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
        value_E = tl.load(
            value + row * value_row + head * value_head + size, mask=size < VALUE, other=0.0
        )
        tl.store(keys + fresh * KEY + size, key_D, mask=size < KEY)
        tl.store(values + fresh * VALUE + size, value_E, mask=size < VALUE)
        peak_G, total_G, sum_GE = attend_first(query_GD, key_D, value_E, total_G, sum_GE, scale)
    for at in tl.range(begin, end, BLOCK, num_stages=3):
        entry = at + tl.arange(0, BLOCK)
        seen = (entry < end) & (entry != fresh)
        # 0 where masked, since 0 * NaN of unused memory would be NaN
        key_ND = tl.load(
            keys + entry[:, None] * KEY + size[None, :],
            mask=seen[:, None] & (size[None, :] < KEY),
            other=0.0,
        )
        value_NE = tl.load(
            values + entry[:, None] * VALUE + size[None, :],
            mask=seen[:, None] & (size[None, :] < VALUE),
            other=0.0,
        )
        peak_G, total_G, sum_GE = attend(
            query_GD, key_ND, value_NE, seen, peak_G, total_G, sum_GE, scale
        )
    hand_on(
        *(out, partials, arrivals, row, head, split, active, peak_G, total_G, sum_GE),
        *(VALUE, TILE, GROUP, QUERIES, GROUP_TILE, AT_ONCE),
    )
