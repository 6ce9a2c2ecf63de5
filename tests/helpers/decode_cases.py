"""Cases of the decode kernel, and what they compare: the kernel, the cache's torch path, and the
fp32 reference.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import combinations, product
from unittest import mock

import torch
from torch import Tensor

import rlkv.cache.layer as layer_module
from rlkv.cache import HeadReallocationCache
from rlkv.cache.layer import CachedCall
from rlkv.cache.plan import CallLayout
from rlkv.cache.stores import FullStore, PlainStore
from rlkv.kernels.step import SWITCH, DecodeStep
from tests.helpers.mixed_reference import full_mask, local_mask, mixed_by_head_attention

FULL_HEADS = {"full": [True, True], "compressible": [False], "mixed": [False, True, False]}
FACTORS = {
    "length": (1, 63, 64, 65, 500, 1023),
    "sizes": ((0, 1), (1, 4), (4, 16), (16, 128)),
    "group": (1, 2, 3, 4, 7, 8),
    "heads": tuple(FULL_HEADS),
    "padded": (False, True),
    "size": (24, 32),
    "processors": (1, 3, 24),
}


@dataclass(frozen=True)
class Case:
    """``length`` columns once the first new token is there; ``sizes``: sinks and window.

    ``size`` of a head.
    """

    length: int
    sizes: tuple[int, int]
    group: int
    heads: str
    padded: bool
    size: int
    processors: int
    value_size: int | None = None

    @property
    def padding(self) -> Tensor:
        """int64 ``[B]``: one row, or two; the padded one has the new token alone, or half of a long
        text.
        """
        second = self.length - 1 if self.length < 100 else self.length // 2
        return torch.tensor([0, second] if self.padded else [0])


def covering_cases() -> list[Case]:
    """Cases in which every pair of values of two factors occurs: about 40 of 5,184 combinations."""

    def pairs(values: tuple) -> set:
        return set(combinations(enumerate(values), 2))

    everything = list(product(*FACTORS.values()))
    missing = set().union(*map(pairs, everything))
    draw, found = random.Random(0), []
    while missing:
        # of those with the most new pairs the shortest text, for the time it takes
        some = draw.sample(everything, 500)
        best = max(some, key=lambda values: (len(pairs(values) & missing), -values[0]))
        if pairs(best) & missing:
            found.append(best)
            missing -= pairs(best)
    return [Case(*values) for values in found]


def extreme_cases() -> list[Case]:
    """Head sizes at both ends, values of another size than keys, and a group of the largest size."""
    rest = {"sizes": (4, 16), "heads": "mixed", "padded": True, "processors": 24}
    return [
        Case(length=300, group=5, size=256, **rest),
        Case(length=150, group=1, size=128, **rest),
        Case(length=400, group=32, size=80, **rest),
        Case(length=150, group=1, size=72, value_size=40, **rest),
        Case(length=150, group=3, size=40, value_size=72, **rest),
    ]


@contextmanager
def kernel(on: bool) -> Iterator[None]:
    """Tokens that come one at a time go through the kernel, or not, whatever the device.

    For caches made here.
    """
    switched_on = mock.patch.dict(os.environ, {SWITCH: "1"})
    serves = mock.patch.object(
        layer_module, "serves", lambda query, key, value: on and key.shape[2] == 1
    )
    with switched_on, serves:
        yield


def rmse_ratio(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences, over that of the expected numbers."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


@dataclass(frozen=True)
class Errors:
    """Largest over the steps:

    RMSE ratio to the reference and to the torch path, and wrong numbers in the buffers.
    """

    reference: float
    torch_path: float
    buffers: int


class Run:
    """Two caches of one layer with the same text, one for each path.

    States ``[B, H, T, D]``, drawn at once.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: str, steps: int = 2) -> None:
        generator = torch.Generator().manual_seed(sum(map(hash, astuple(case)[:3])))
        self.case, self.device = case, device
        self.full = torch.tensor(FULL_HEADS[case.heads])
        self.padding, tokens = case.padding, case.length - 1 + steps
        shape = (len(self.padding), len(self.full))

        def drawn(heads: int, size: int) -> Tensor:
            states = torch.randn(shape[0], tokens, heads, size, generator=generator)
            return states.to(device, dtype).transpose(1, 2)  # as projections lie in memory

        self.query = drawn(shape[1] * case.group, case.size)
        self.key, self.value = (
            drawn(shape[1], case.size),
            drawn(shape[1], case.value_size or case.size),
        )
        self.real = torch.arange(tokens) >= self.padding[:, None]
        self.by_kernel, self.by_torch = (self._new_cache() for _ in range(2))
        self.step: DecodeStep | None = None

    def errors(self) -> Errors:
        """Of all steps."""
        steps = [self._step(column) for column in range(self.case.length - 1, self.key.shape[2])]
        return Errors(*(max(values) for values in zip(*map(astuple, steps), strict=True)))

    def _new_cache(self) -> HeadReallocationCache:
        prompt = self.case.length - 1
        with kernel(False):
            cache = HeadReallocationCache(self.full[None], *self.case.sizes)
            if prompt:
                self._call(cache, 0, prompt)
            else:
                cache.layers[0].lazy_initialization(self.key[:, :, :1], self.value[:, :, :1])
        return cache

    def _call(
        self, cache: HeadReallocationCache, start: int, length: int, step: DecodeStep | None = None
    ) -> Tensor:
        """Output of a call, ``[B, n, H * G, D]``."""
        span, (layer,) = slice(start, start + length), cache.layers
        plan = self.plan(cache, start, length)
        if step is not None:
            plan[0].decode_step = step
        states = (states[:, :, span] for states in (self.query, self.key, self.value))
        return layer.attend_and_store(*states, plan, self.case.size**-0.5)

    def plan(self, cache: HeadReallocationCache, start: int, length: int) -> list[CallLayout]:
        """Of a call."""
        mask = self.real[:, : start + length].to(self.device)
        return CachedCall(mask, start, length, len(mask)).plan(cache.state, self.query.device)

    def _step(self, column: int) -> Errors:
        for store in self.by_kernel.layers[0].stores:
            assert isinstance(store, PlainStore)
            store.make_room(*self.plan(self.by_kernel, column, 1))
            unused = ~self._used(store, column)[:, None, :, None]
            for plane in store.planes.values():
                plane.masked_fill_(unused, float("nan"))
        with kernel(True):
            found = self._call(self.by_kernel, column, 1, self._next_step(column))
        with kernel(False):
            by_torch = self._call(self.by_torch, column, 1)
        assert found.shape == by_torch.shape
        assert found.dtype == by_torch.dtype
        wrong = 0
        for ours, theirs in zip(
            self.by_kernel.layers[0].stores, self.by_torch.layers[0].stores, strict=True
        ):
            used = self._used(ours, column + 1)[:, None, :, None]
            for name, plane in ours.planes.items():
                same = torch.where(used, plane == theirs.planes[name], plane.isnan())
                wrong += int((~same).sum())
        return Errors(rmse_ratio(found, self.reference(column)), rmse_ratio(found, by_torch), wrong)

    def _next_step(self, column: int) -> DecodeStep:
        """One for all steps, so that it goes on by itself, as in a captured graph, and its counters
        are used again.
        """
        if self.step is None:
            self.step = self.plan(self.by_kernel, column, 1)[0].decode_step
        else:
            self.step.start += 1
        return self.step

    def _used(self, store: PlainStore, columns: int) -> Tensor:
        """bool ``[B, entries]``: which entries hold what some token may see, once ``columns``
        columns are cached.
        """
        entry, padding = torch.arange(store.keys.shape[2]), self.padding[:, None]
        if isinstance(store, FullStore):
            used = (entry >= padding) & (entry < columns)
        else:
            used = (entry < columns - padding) & (entry < sum(self.case.sizes))
        return used.to(self.device)

    def reference(self, column: int) -> Tensor:
        """The output of the token at ``column`` in fp32, without a cache."""
        real, last = self.real[:, : column + 1], slice(column, column + 1)
        masks = (full_mask(real)[:, last], local_mask(real, *self.case.sizes)[:, last])
        query, key, value = (states.float().cpu() for states in (self.query, self.key, self.value))
        past = (key[:, :, : column + 1], value[:, :, : column + 1])
        return mixed_by_head_attention(
            query[:, :, last], *past, self.full, *masks, self.case.size**-0.5
        )
