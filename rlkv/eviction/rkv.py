"""R-KV: attention received minus redundancy (arXiv 2505.24133)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.eviction.base import (
    EvictionPolicy,
    FlatHeads,
    attention_logits,
    items_at_once,
    masked_softmax,
    pieces,
    register,
    sum_rows,
    visible,
)
from rlkv.utils.devices import cpu_has_any

VARIANTS = ("paper", "published", "rlkv_tables")
EPSILON = 1e-8  # added to a key's norm: a key of zeros is not similar to any

# The search for similar keys.
FIRST = 64  # last entries that it begins with: where many keys are alike it ends there
TILE = 512  # most entries compared with as many others at once: 1 MB a head fits a core's cache
WIDE = 4  # tiles that are looked through at once, head by head
FIXED = 2.0**40  # units of 1 in which similarities are added up
# Share of a tile's rows whose pairs are looked at one by one; beyond it all pairs are computed.
FEW = 1 / 16
NORM_EPSILON = 1e-6  # least step of codes: a head may have only padding
ROUNDING = 1e-5  # more than float32 changes the similarity of two keys


def latest_similar(
    unit: Tensor, valid: Tensor, threshold: float, count: int
) -> tuple[Tensor, Tensor]:
    """Find the ``count`` latest similar tokens of every token.

    The keys are searched in square tiles from the last entries backwards, each tile for its rows
    and for its columns; one that nothing in it needs is not computed.  A CPU that multiplies
    integers of 8 bits looks some tiles through in them first, unless the one before had many
    similar keys.

    Args:
        unit: ``[L, N, D]``, keys of norm 1.
        valid: bool ``[L, N]``.

    Returns:
        The similarities, added up at the tokens that were found, and how many each token found:
        ``[L, N]`` each.
    """
    search = _Search(
        sums=unit.new_zeros(unit.shape[:2], dtype=torch.int64),
        missing=torch.where(valid, count, 0),
        threshold=threshold,
        wanted=count,
    )
    end = unit.shape[1]
    width = FIRST
    side = min(TILE, math.isqrt(items_at_once(len(unit))))
    has_codes = unit.device.type == "cpu" and cpu_has_any("avx512_vnni", "avx_vnni", "amx_int8")
    codes = _Codes.of(unit, threshold) if has_codes and end > FIRST else None
    wide = side if codes is None else min(WIDE * side, items_at_once(side))
    look_first = True
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
        width *= 2
        end = begin
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
        codes = torch.empty(unit.shape, dtype=torch.int8)
        limits = []
        for own, into in zip(unit, codes, strict=True):  # by head: copies in float32 are large
            step = max(own.abs().max().item(), NORM_EPSILON) / 127
            into.copy_((own / step).round())
            off = (own - into * step).norm(dim=-1).max().item()
            # |x . y - x' . y'| <= |x| |y - y'| + |x - x'| |y'|
            limits.append((threshold - ROUNDING - off * (2 + off)) / step**2)
        return cls(codes, limits)

    def close(self, late: slice, early: slice, side: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Find heads and entries ``[n]`` of pairs of two slices that may be similar.

        None where that are more than :data:`FEW`.
        """
        rows = late.stop - late.start
        left = FEW * len(self.codes) * rows * (early.stop - early.start) / side
        found = []
        for head, (codes, limit) in enumerate(zip(self.codes, self.limits, strict=True)):
            product = torch._int_mm(codes[late], codes[early].t())
            near = (product.amax(dim=1) > limit).nonzero()[:, 0]
            left -= len(near)
            if left < 0:
                return None
            if len(near):
                row, column = (product[near] > limit).nonzero(as_tuple=True)
                pairs = [torch.full_like(row, head), near[row] + late.start, column + early.start]
                found.append(torch.stack(pairs))
        everything = torch.cat(found, dim=1) if found else torch.zeros(3, 0, dtype=torch.int64)
        return everything[0], everything[1], everything[2]


class _Search(NamedTuple):
    """The state of :func:`latest_similar`.

    Attributes:
        sums: int64 ``[L, N]``, in fixed point, so that the order of the additions, which a GPU does
            not fix, changes nothing.
        missing: int64 ``[L, N]``, how many similar tokens each still lacks.
    """

    sums: Tensor
    missing: Tensor
    threshold: float
    wanted: int

    def needs(self, late: slice, early: slice) -> bool:
        """Return whether an entry of either slice lacks similar ones."""
        return bool(self.missing[:, early].any() | self.missing[:, late].any())

    def take_all(self, similarity: Tensor, first: int, begin: int) -> float:
        """Take from ``similarity`` ``[L, R, C]`` of R entries from ``first``, C from ``begin`` on.

        Returns:
            The share of the rows that have a similar column.
        """
        near = similarity.amax(dim=-1) > self.threshold
        lacking = self.missing[:, first : first + similarity.shape[1]] > 0
        head, row = (near & lacking).nonzero(as_tuple=True)
        if len(head):
            chosen = similarity[head, row]
            found = []
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
        """Take, of pairs ``[n]`` of similar entries, the latest places that each entry lacks."""
        entries = self.missing.shape[1]
        key = head * entries + entry
        order = (key * entries + place).argsort(descending=True)
        key, place, value = key[order], (head * entries + place)[order], value[order]
        counts = key.unique_consecutive(return_counts=True)[1]
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        rank = torch.arange(len(key), device=key.device) - first
        takes = rank < self.missing.view(-1)[key]
        fixed = (value[takes].double() * FIXED).round().long()
        self.sums.view(-1).index_add_(0, place[takes], fixed)
        self.missing.view(-1).index_add_(0, key[takes], torch.full_like(fixed, -1))


@register
@dataclass(frozen=True)
class RKV(EvictionPolicy):
    """R-KV (arXiv 2505.24133): keep what the last queries attend to and what is not redundant.

    ``score = lam * I - (1 - lam) * R``, of the importance I (:func:`importance`) and the redundancy
    R (:func:`redundancy`), both ``[B, H, N]``.

    Attributes:
        lam: the paper's lambda, 0.1; the released code runs with 0.07 unless it is told otherwise.
        threshold: T, the cosine similarity above which two keys are similar.
        recent_similar: beta, how many of its most recent similar tokens each token forgives.
        kernel: entries of the pooling window; with 2W of them (the paper's equation 4) from i - W
            to i + W - 1.
        variant: "paper"; "published" for the selection of the authors' code (in which only odd
            kernels run); "rlkv_tables" for what the tables of RLKV (arXiv 2510.08525) were measured
            with, see :meth:`capacity`.  docs/serve.md says what neither reproduces.
        compacted: of "rlkv_tables": how many of the last entries compete, the older ones stay.

    The budget of RLKV's tables is ``ratio`` of the tokens read and S + W - 4G entries, for the G
    query heads of a KV head, whose observed queries take the bytes of 4G entries: ``extra=64`` for
    16 + 64 and G = 4, 52 for G = 7.
    """

    lam: float = 0.1
    threshold: float = 0.5
    recent_similar: int = 1
    kernel: int = 7
    variant: str = "paper"
    compacted: int = 512

    name: ClassVar[str] = "rkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self, self.kernel, self.variant, VARIANTS)
        for field in ("lam", "threshold"):
            self.require(0 <= getattr(self, field) <= 1, field, "from 0 to 1")
        self.require(self.recent_similar >= 1, "recent_similar", "1 or more tokens")
        fits = self.variant == "paper" or self.recent_similar == 1
        self.require(fits, "recent_similar", f'1 with variant="{self.variant}"')
        if self._of_tables:
            self.require(self.ratio is not None, "ratio", 'given with variant="rlkv_tables"')
            least = self.buffer + self.sink + self.observation
            what = f"at least buffer + sink + observation, {least}"
            self.require(self.compacted >= least, "compacted", what)
        else:
            what = 'left out without variant="rlkv_tables"'
            self.require(self.compacted == RKV.compacted, "compacted", what)

    @property
    def takes_planned(self) -> bool:  # type: ignore[override]
        return not self._of_tables

    @property
    def _of_tables(self) -> bool:
        return self.variant == "rlkv_tables"

    def entries(self, seen: Tensor, evictions: Tensor) -> Tensor:
        """Return what the base class says; in RLKV's tables an eviction removes ``buffer``."""
        if self._of_tables:
            return seen - self.buffer * (evictions + 1)
        return super().entries(seen, evictions)

    def capacity(self, seen: Tensor, evictions: Tensor) -> Tensor:
        """Return what the base class says; in RLKV's tables above budget and ``compacted``."""
        if not self._of_tables:
            return super().capacity(seen, evictions)
        return super().entries(seen, evictions).clamp(min=self.compacted) + 1

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        if not self._of_tables:
            return self._scores(keys, queries, valid)
        last = slice(-self.compacted, None)
        scores = self._scores(keys[:, :, last], queries, valid[:, last])
        older = keys.shape[2] - scores.shape[2]
        return F.pad(scores, (older, 0), value=torch.finfo(torch.float32).max)

    def _scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        important = importance(keys, queries, valid, self.observation, self.kernel, self.variant)
        if self.lam == 1:
            return important
        redundant = redundancy(keys, valid, self.threshold, self.recent_similar, self.variant)
        return self.lam * important - (1 - self.lam) * redundant


def check_pooling(
    policy: EvictionPolicy, kernel: int, variant: str, variants: tuple[str, ...]
) -> None:
    """Raise ValueError unless the fields ``kernel`` and ``variant`` fit :func:`importance`."""
    policy.require(variant in variants, "variant", f"one of {', '.join(variants)}")
    policy.require(kernel >= 1, "kernel", "1 or more entries")
    fits = variant == "paper" or kernel % 2 == 1
    policy.require(fits, "kernel", f'an odd number of entries with variant="{variant}"')


def importance(
    keys: Tensor, queries: Tensor, valid: Tensor, observation: int, kernel: int, variant: str
) -> Tensor:
    """Compute I, what the last ``observation`` queries attend to before them: ``[B, H, N]``.

    Attention is a softmax over the candidates, the entries before the observation tokens (section
    3.1).

    "paper" (section 3.2): the softmax of each query head; the maximum over the heads of a group,
    divided by its sum over the candidates (equation 3; as printed, equation 2 has no softmax, which
    is what "published" computes); the maximum over a window of ``kernel`` candidates; the mean over
    the queries. "published": the maximum over the group's logits; their softmax; the mean over the
    queries; the maximum over a window.  "rlkv_tables": the softmax of each query head; the mean
    over the queries; the maximum over the group and then over a window.  Windows do not reach into
    the observation tokens.

    Args:
        keys: ``[B, H, N, D]``.
        queries: ``[B, Q, a, D]``, of the last a entries.
        valid: bool ``[B, N]``.
    """
    flat = FlatHeads.of(keys, queries[:, :, -observation:], valid)
    num_flat, n, d = flat.keys.shape
    g, a = flat.queries.shape[1:3]
    important = torch.empty(num_flat, n, dtype=torch.float32, device=keys.device)
    for heads in pieces(num_flat, n * max(d, g * a)):
        logits = attention_logits(flat.keys[heads], flat.queries[heads])
        mask = visible(flat.valid[heads], slice(n - a, n), hidden=observation)
        # attention is never negative: a 0 (padding, observation tokens) changes no maximum
        if variant == "paper":
            attention = masked_softmax(logits, mask[:, None]).amax(dim=1)
            total = attention.sum(dim=-1, keepdim=True)
            attention = attention / total.masked_fill(total == 0, 1)
            important[heads] = sum_rows(_max_pool(attention, kernel)) / a
        else:
            grouped = logits.amax(dim=1, keepdim=True) if variant == "published" else logits
            received = sum_rows(masked_softmax(grouped, mask[:, None])).amax(dim=1, keepdim=True)
            important[heads] = _max_pool(received / a, kernel)[:, 0]
    return important.unflatten(0, keys.shape[:2])


def redundancy(
    keys: Tensor, valid: Tensor, threshold: float, recent_similar: int, variant: str
) -> Tensor:
    """Compute R, how redundant an entry is: ``[B, H, N]``, a softmax over a row's entries.

    Cosine similarity of all pairs of keys (section 3.3), observation tokens included, 0 on the
    diagonal.  In the row of each token the ``recent_similar`` last entries with a similarity above
    ``threshold`` are set to 0, wherever they stand before or after it.  Then the mean over the rows
    for each entry, and a softmax over all entries.

    *Which of two similar tokens is forgiven.*  The paper's text: only the beta most recent of the
    similar tokens are retained.  Its formula: ``S[j, i] = 0`` for the beta most recent j that are
    similar to i, then for each i the mean over j, which takes something off every copy, also the
    early ones.  The released code: as the text, the latest similar token of each row is forgiven
    (beta = 1), and where there is none, the first entry.  Here: as the text and the code, with any
    beta; the first entry is not forgiven in "paper".

    The mean needs no N x N matrix: the similarities of an entry add up to the product of its unit
    key and the sum of all unit keys, and what was set to 0 is taken off (:func:`latest_similar`).

    Args:
        keys: ``[B, H, N, D]``.
        valid: bool ``[B, N]``.
    """
    b, h, n, d = keys.shape
    keys_LND = keys.flatten(0, 1)
    valid_LN = valid.repeat_interleave(h, dim=0)
    first = n - valid_LN.sum(dim=-1)
    total = torch.empty(b * h, n, dtype=torch.float32, device=keys.device)
    for heads in pieces(b * h, max(n * d, min(n, TILE) ** 2)):
        unit = keys_LND[heads].float()
        unit = unit / (unit.norm(dim=-1, keepdim=True) + EPSILON)
        unit = unit.masked_fill(~valid_LN[heads, :, None], 0)  # padding is not similar to any key
        forgiven, found = latest_similar(unit, valid_LN[heads], threshold, recent_similar)
        if variant != "paper":
            first_L1 = first[heads, None].clamp(max=n - 1)
            column = unit.gather(1, first_L1[:, :, None].expand(-1, 1, d))
            alone = (unit * column).sum(dim=-1).masked_fill(found > 0, 0)
            alone = alone.scatter(1, first_L1, 0)  # the first entry's own similarity is 0 already
            forgiven.scatter_add_(1, first_L1, alone.sum(dim=-1, keepdim=True))
        similarities = (unit * unit.sum(dim=1, keepdim=True)).sum(dim=-1)
        total[heads] = similarities - unit.square().sum(dim=-1) - forgiven
    mean = total.unflatten(0, (b, h)) / valid.sum(dim=-1).clamp(min=1)[:, None, None]
    return masked_softmax(mean, valid[:, None])


def _max_pool(values: Tensor, kernel: int) -> Tensor:
    """Take the maximum of ``[L, a, N]`` over ``kernel`` entries, of even ones more before."""
    return F.max_pool1d(values, kernel, stride=1, padding=kernel // 2)[..., : values.shape[-1]]
