"""What decode kernels share: how the entries of a head are split, attended to block by block, and added up again.

One program for each row, KV head and split of the head's entries.  All queries of a group are one tile, so that keys
and values are read once.  Short heads get one split, and programs beyond a head's last split return at once.  The split
that arrives last combines them all.

Shapes: G query heads per KV head, N entries of a block, D size of a key, E of a value, S splits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

LEAST = 128  # entries of a split, at least: below that, combining costs more than it saves
MOST_SPLITS = 128
PROGRAMS = 2  # per multiprocessor, so that one computes while the other waits for memory
TILE_BYTES = 8192  # of keys, and of values, that a program reads at a time
COMBINED = 8192  # numbers that are combined at a time
LOG2E = 1.4426950408889634


def splits_of(heads: int, entries: int, device: torch.device) -> int:
    """Into how many splits the longest heads, ``heads`` in all rows, go; short heads take hardly any time."""
    return max(1, min(triton.cdiv(PROGRAMS * _processors(device), heads), triton.cdiv(entries, LEAST), MOST_SPLITS))


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
def load_queries(query, own_stride, KEY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr):
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
        logit_GN = tl.sum(query_GD.to(tl.float32)[:, None, :] * key_ND.to(tl.float32)[None, :, :], axis=2)
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
    """Write the output of an only split; else keep this one's, and combine all ``active`` ones if it is the last."""
    one, size = tl.arange(0, QUERIES), tl.arange(0, TILE)
    splits = tl.num_programs(2)
    sum_GE = sum_GE / total_G[:, None]
    to = out + (row * tl.num_programs(1) + head) * GROUP * VALUE
    stored = (one[:, None] < GROUP) & (size[None, :] < VALUE)
    if active == 1:
        tl.store(to + one[:, None] * VALUE + size[None, :], sum_GE.to(out.dtype.element_ty), mask=stored)
    else:
        count = row * tl.num_programs(1) + head
        rows = tl.num_programs(0).to(tl.int64)
        sums = partials + count * splits * (GROUP * VALUE)
        norms = partials + (rows * tl.num_programs(1) * VALUE + count) * splits * GROUP
        tl.store(norms + split * GROUP + one, peak_G + tl.log2(total_G), mask=one < GROUP)
        tl.store(sums + (split * GROUP + one[:, None]) * VALUE + size[None, :], sum_GE, mask=stored)
        # all threads have stored before one of them says so; acquire: the last to come sees what all have stored
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
    """The output of a head from those of its splits, in their order, so that it is the same every time."""
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
            norms + place_SG, mask=(split[:, None] < active) & (one[None, :] < GROUP), other=0.0, cache_modifier=".cg"
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
