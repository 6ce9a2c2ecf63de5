"""The decode kernel over block tables, replayed as a captured graph, against attention in float64.

Shapes: B requests, H KV heads of a layer, G queries per KV head, T tokens, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rlkv.benchmarks.agreement import relative_error
from rlkv.benchmarks.check.captured import captured
from rlkv.benchmarks.check.one import CannotRun, Check, Findings, Setting

STEPS = 4
ALLOWED = 5e-3  # of bfloat16's 8 bits in the weights and in the output
PREFIXES = (20, 0, 16, 300)  # first tokens that requests see in compressible heads, by turns
FULL = 0  # as a window: all tokens are seen


@dataclass(frozen=True)
class Heads:
    """A bin: ``count`` heads of all layers, blocks of ``block`` tokens, the last ``window`` tokens seen."""

    count: int
    block: int
    window: int = FULL


@dataclass(frozen=True)
class Shape:
    """A layer: for each of its heads the number of its bin and its index there; and the tokens cached of requests.

    A request without tokens is a row of padding.
    """

    bins: tuple[Heads, ...]
    heads: tuple[tuple[int, int], ...]
    group: int
    size: int
    cached: tuple[int, ...]

    @property
    def longest(self) -> tuple[int, int]:
        """How many heads see everything, one at least, and the tokens at the end."""
        full = sum(self.bins[own].window == FULL for own, _ in self.heads)
        return max(full, 1), max(self.cached) + STEPS


BINS = (Heads(6, 16), Heads(9, 16, window=64))
MIXED = ((0, 1), (0, 2), *((1, index) for index in range(6)))
SHAPES = (
    Shape(BINS, MIXED, group=4, size=128, cached=(8192, 1, 900, 3000, 0)),
    Shape(BINS, ((0, 5), *MIXED[2:5]), group=7, size=128, cached=(3000, 63, 64, 500)),
    Shape(BINS, MIXED[2:], group=4, size=128, cached=tuple(range(100, 1700, 100))),
    Shape(BINS[:1], ((0, 0), (0, 4)), group=1, size=64, cached=(32_000,)),
    Shape((Heads(2, 48), *BINS, Heads(3, 32, window=1)), ((0, 1), (1, 0), (2, 8), (3, 2)), 3, 80, (600, 17, 0)),
)


class Decoding:
    """The caches of a shape, NaN in what no head sees, and the tokens of ``STEPS`` steps."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        from rlkv.kernels.paged_decode import PagedBin, scratch_sizes

        self.shape, self.device = shape, device
        self.options: Any = {"dtype": dtype, "device": device}
        self.draws, rows = torch.Generator().manual_seed(0), len(shape.cached)
        self.queries = self._drawn(STEPS, rows, len(shape.heads), shape.group, shape.size)
        self.tokens = [
            [self._drawn(2, n + STEPS, own.count, shape.size) for n in shape.cached] for own in shape.bins
        ]  # keys and values, by bin and request
        prefixes = torch.tensor([first for first, _ in zip(cycle(PREFIXES), shape.cached, strict=False)])
        self.lengths = torch.tensor(shape.cached, dtype=torch.int32, device=device)
        self.running = (self.lengths > 0).int()
        self.bins: list[PagedBin] = []
        for own, tokens in zip(shape.bins, self.tokens, strict=True):
            cache, table = self._filled(own, tokens, prefixes)
            page = PagedBin(cache, table, self.lengths)
            prefix = prefixes.int().to(device)
            self.bins.append(page if own.window == FULL else replace(page, prefix=prefix, window=own.window))
        floats, counters = scratch_sizes(rows, len(shape.heads), shape.longest, shape.group, shape.size, device)
        self.scratch = (
            torch.full((floats,), torch.nan, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        self.places = torch.tensor(shape.heads, dtype=torch.int32, device=device).T.contiguous()
        self.inputs = (self.queries[0].clone(), *(self.queries[0, :, :, 0].clone() for _ in "kv"))

    def _drawn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.draws).to(**self.options)

    def _filled(self, own: Heads, tokens: list[Tensor], prefixes: Tensor) -> tuple[Tensor, Tensor]:
        """The cache with what heads will see of the cached ``tokens``, in blocks of any order, and the block table."""
        rows, most = len(tokens), -(-(max(self.shape.cached) + STEPS) // own.block)
        table = torch.randperm(rows * most, generator=self.draws).view(rows, most) + 1
        sizes = (rows * most + 1, own.count, own.block, 2 * self.shape.size)
        cache = torch.full(sizes, torch.nan, **self.options)
        for row, cached in enumerate(self.shape.cached):
            position = torch.arange(cached)
            if own.window != FULL:
                position = position[(position < prefixes[row]) | (position > cached - own.window)]
            both = torch.cat(tokens[row][:, position].unbind(), -1)
            cache[table[row, position // own.block], :, position % own.block] = both
        return cache, table.int().to(self.device)

    def new_states(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens of a step."""
        key, value = (
            torch.stack(
                [
                    torch.stack([self.tokens[own][row][plane, cached + step, index] for own, index in self.shape.heads])
                    for row, cached in enumerate(self.shape.cached)
                ]
            )
            for plane in range(2)
        )
        return self.queries[step], key, value

    def launch(self) -> Tensor:
        """Decode the tokens in ``inputs``: ``[B, H, G, D]``."""
        from rlkv.kernels.paged_decode import decode_paged

        self.lengths += self.running
        out = torch.full_like(self.inputs[0], torch.nan)
        scale = self.shape.size**-0.5
        query, key, value = self.inputs
        decode_paged(query, key, value, self.bins, self.places, self.shape.longest, self.scratch, scale, out)
        return out

    def expected(self, step: int) -> Tensor:
        """In float64; 0 in rows of padding."""
        out = torch.zeros(self.inputs[0].shape, dtype=torch.float64, device=self.device)
        for row, cached in enumerate(self.shape.cached):
            for head, (own, index) in enumerate(self.shape.heads if cached else ()):
                page, length = self.bins[own], cached + step + 1
                key, value = self.tokens[own][row][:, :length, index].double()
                order = torch.arange(length, device=key.device)
                first = length if page.prefix is None else int(page.prefix[row])
                seen = (order < first) | (order >= length - page.window)
                scores = self.queries[step, row, head].double() @ key.T * self.shape.size**-0.5
                out[row, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        return out

    @cached_property
    def caches_before(self) -> list[Tensor]:
        return [page.cache.clone() for page in self.bins]

    def stored_wrongly(self) -> int:
        """Numbers of the caches that differ from those before with the new tokens in their places."""
        wrong = 0
        for number, (page, wanted) in enumerate(zip(self.bins, self.caches_before, strict=True)):
            block = page.cache.shape[2]
            for row, cached in enumerate(self.shape.cached):
                for position in range(cached, cached + STEPS * bool(cached)):
                    for index in (index for own, index in self.shape.heads if own == number):
                        both = self.tokens[number][row][:, position, index].flatten()
                        wanted[page.table[row, position // block], index, position % block] = both
            wrong += int(((page.cache != wanted) & ~(page.cache.isnan() & wanted.isnan())).sum())
        return wrong


def errors_of(shape: Shape, dtype: torch.dtype, setting: Setting) -> tuple[float, int]:
    """The largest relative error of all steps, and wrong numbers in the caches and counters at the end."""
    decoding, errors = Decoding(shape, dtype, setting.device), []
    assert decoding.caches_before
    step_once = captured(decoding.launch, lambda: decoding.lengths.sub_(decoding.running), setting)
    for step in range(STEPS):
        for held, new in zip(decoding.inputs, decoding.new_states(step), strict=True):
            held.copy_(new)
        errors.append(relative_error(step_once(), decoding.expected(step)))
    return max(errors), decoding.stored_wrongly() + int(decoding.scratch[1].count_nonzero())


def run(setting: Setting, found: Findings, shapes: tuple[Shape, ...] = SHAPES) -> None:
    if find_spec("triton") is None:
        raise CannotRun("triton is not installed")
    for shape in shapes:
        error, wrong = errors_of(shape, setting.dtype, setting)
        found.details.append({"error": error, "wrong": wrong, "shape": str(shape)})
        found.require(error <= ALLOWED, f"{shape}: relative error {error:.2g}, allowed {ALLOWED:g}")
        found.require(wrong == 0, f"{shape}: {wrong} numbers of the caches are wrong")
    found.figures |= {"layers": len(shapes), "largest error": max(row["error"] for row in found.details)}


CHECK = Check(
    "kernel_paged",
    "The decode kernel over block tables, in a captured graph, equals attention in float64 and writes nothing else.",
    run,
    needs_gpu=True,
)
