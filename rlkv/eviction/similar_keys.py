"""Search for the latest similar keys of every key, without the matrix of all similarities.

Shapes: L heads, N entries of each, D head size. Keys are of length 1, or 0: padding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlkv.eviction.attention import items_at_once
from rlkv.utils.cpu import cpu_has_any

FIRST = 64  # last entries that the search begins with: where many keys are alike it ends there
TILE = 512  # most entries whose similarities to as many others are computed at once: 1 MB a head fits a core's cache
WIDE = 4  # tiles that are looked through at once, head by head
FIXED = 2.0**40  # units of 1 in which similarities are added up
FEW = 1 / 16  # share of a tile's rows whose pairs are looked at one by one; if more may be similar, all pairs are
EPSILON = 1e-6  # least step of codes: a head may have only padding
ROUNDING = 1e-5  # more than float32 changes the similarity of two keys


def latest_similar(unit: Tensor, valid: Tensor, threshold: float, count: int) -> tuple[Tensor, Tensor]:
    """Similarities of every token to its ``count`` latest similar ones, added up at those, and how many it has.

    Both ``[L, N]``, of keys ``unit`` ``[L, N, D]``.  Searched in square tiles from the last entries backwards, each
    tile for its rows and for its columns; one that nothing in it needs is not computed.  A CPU that multiplies integers
    of 8 bits looks some tiles through in them first, unless the one before had many similar keys.
    """
    search = _Search(unit.new_zeros(unit.shape[:2], dtype=torch.int64), torch.where(valid, count, 0), threshold, count)
    side, width, end = min(TILE, math.isqrt(items_at_once(len(unit)))), FIRST, unit.shape[1]
    has_codes = unit.device.type == "cpu" and cpu_has_any("avx512_vnni", "avx_vnni", "amx_int8")
    codes = _Codes.of(unit, threshold) if has_codes and end > FIRST else None
    look_first, wide = True, side if codes is None else min(WIDE * side, items_at_once(side))
    while end > 0 and bool(search.missing.any()):
        begin = max(0, end - min(width, side))
        late = slice(begin, end)
        own = unit[:, late] @ unit[:, late].mT
        own.diagonal(dim1=1, dim2=2).fill_(-1)
        search.take_all(own, begin, begin)
        for last in range(begin, 0, -wide):
            early = slice(max(0, last - wide), last)
            look = look_first and search.needs(late, early)
            if look and codes and (pairs := codes.close(late, early, side)):
                search.take_pairs(unit, *pairs)
                continue
            for stop in range(early.stop, early.start, -side):
                tile = slice(max(early.start, stop - side), stop)
                if search.needs(late, tile):
                    similarity = unit[:, late] @ unit[:, tile].mT
                    look_first = search.take_all(similarity, begin, tile.start) <= FEW
                    search.take_all(similarity.mT, tile.start, begin)
        width, end = 2 * width, begin
    found = torch.where(valid, count - search.missing, 0)
    return (search.sums.double() / FIXED).float(), found


class _Codes(NamedTuple):
    """Keys as multiples of each head's step, int8 ``[L, N, D]``.

    ``limits``: no pair of keys of a head whose codes have at most this product is similar.
    """

    codes: Tensor
    limits: list[float]

    @classmethod
    def of(cls, unit: Tensor, threshold: float) -> _Codes:
        codes, limits = torch.empty(unit.shape, dtype=torch.int8), []
        for own, into in zip(unit, codes, strict=True):  # by head: copies in float32 are large
            step = max(own.abs().max().item(), EPSILON) / 127
            into.copy_((own / step).round())
            off = (own - into * step).norm(dim=-1).max().item()
            # |x . y - x' . y'| <= |x| |y - y'| + |x - x'| |y'|
            limits.append((threshold - ROUNDING - off * (2 + off)) / step**2)
        return cls(codes, limits)

    def close(self, late: slice, early: slice, side: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Heads and entries ``[n]`` of the pairs of two slices that may be similar; None: :data:`FEW` exceeded."""
        left, found = FEW * len(self.codes) * (late.stop - late.start) * (early.stop - early.start) / side, []
        for head, (codes, limit) in enumerate(zip(self.codes, self.limits, strict=True)):
            product = torch._int_mm(codes[late], codes[early].t())
            near = (product.amax(dim=1) > limit).nonzero()[:, 0]
            left -= len(near)
            if left < 0:
                return None
            if len(near):
                row, column = (product[near] > limit).nonzero(as_tuple=True)
                found.append(torch.stack([torch.full_like(row, head), near[row] + late.start, column + early.start]))
        head_n, late_n, early_n = torch.cat(found, dim=1) if found else torch.zeros(3, 0, dtype=torch.int64)
        return head_n, late_n, early_n


class _Search(NamedTuple):
    """What :func:`latest_similar` has found.

    ``sums`` are in fixed point, so that the order of the additions, which a GPU does not fix, changes nothing;
    ``missing``: how many similar tokens each still lacks; both int64 ``[L, N]``.
    """

    sums: Tensor
    missing: Tensor
    threshold: float
    wanted: int

    def needs(self, late: slice, early: slice) -> bool:
        """Whether an entry of either slice lacks similar ones."""
        return bool(self.missing[:, early].any() | self.missing[:, late].any())

    def take_all(self, similarity: Tensor, first: int, begin: int) -> float:
        """Take from ``similarity`` ``[L, R, C]`` of the entries from ``first`` on to those from ``begin`` on.

        Returns: the share of the rows that have a similar column.
        """
        near = similarity.amax(dim=-1) > self.threshold
        head, row = (near & (self.missing[:, first : first + similarity.shape[1]] > 0)).nonzero(as_tuple=True)
        if len(head):
            chosen, found = similarity[head, row], []
            order = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device)
            for _ in range(self.wanted):
                place = torch.where(chosen > self.threshold, order, -1).amax(dim=-1).long()
                value = chosen.gather(1, place.clamp(min=0)[:, None])[:, 0]
                is_found = place >= 0
                found.append([part[is_found] for part in (head, row + first, place + begin, value)])
                if self.wanted > 1:
                    chosen.scatter_(1, place.clamp(min=0)[:, None], -1)
            self._take(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        return near.float().mean().item()

    def take_pairs(self, unit: Tensor, head: Tensor, entry: Tensor, other: Tensor) -> None:
        """Take pairs ``[n]`` of entries that may be similar, for both."""
        value = (unit[head, entry] * unit[head, other]).sum(dim=-1)
        similar = value > self.threshold
        if bool(similar.any()):
            head, entry, other, value = (part[similar] for part in (head, entry, other, value))
            self._take(head, entry, other, value)
            self._take(head, other, entry, value)

    def _take(self, head: Tensor, entry: Tensor, place: Tensor, value: Tensor) -> None:
        """Of pairs ``[n]`` of similar entries the latest places for each entry, as many as it lacks."""
        entries = self.missing.shape[1]
        key = head * entries + entry
        order = (key * entries + place).argsort(descending=True)
        key, place, value = key[order], (head * entries + place)[order], value[order]
        counts = key.unique_consecutive(return_counts=True)[1]
        rank = torch.arange(len(key), device=key.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        takes = rank < self.missing.view(-1)[key]
        fixed = (value[takes].double() * FIXED).round().long()
        self.sums.view(-1).index_add_(0, place[takes], fixed)
        self.missing.view(-1).index_add_(0, key[takes], torch.full_like(fixed, -1))
