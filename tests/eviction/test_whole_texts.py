"""Over a whole text the cache holds the tokens that each method's rules keep, index for index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from rlkv.cache import HeadReallocationCache
from rlkv.cache.layer import CachedCall
from rlkv.eviction import H2O, RKV, RPC, TOVA, EvictionPolicy, SnapKV
from tests.helpers import naive_selection as naive
from tests.helpers import naive_walk as rules

HEADS, GROUP_SIZE, TOKENS, PROMPT, HEAD_SIZE = 2, 3, 150, 17, 8


def every_buffer(select: Callable, **sizes: int) -> Callable:
    return lambda keys, queries: rules.every_buffer(select, keys, queries, PROMPT, **sizes)


# each with 3 evictions or more
METHODS: dict[str, tuple[EvictionPolicy, Callable[..., Iterator[rules.Held]]]] = {
    "rkv paper": (
        RKV(24, buffer=20),
        every_buffer(partial(naive.rkv, variant="paper"), budget=24, buffer=20, a=8),
    ),
    "rkv paper, 2W": (
        RKV(24, buffer=20, kernel=4),
        every_buffer(partial(naive.rkv, variant="paper", kernel=4), budget=24, buffer=20, a=8),
    ),
    "rkv published": (
        RKV(24, buffer=20, variant="published", lam=0.07),
        every_buffer(partial(naive.rkv, variant="published", lam=0.07), budget=24, buffer=20, a=8),
    ),
    "rkv rlkv_tables": (
        RKV(ratio=0.2, extra=20, buffer=12, variant="rlkv_tables", compacted=30),
        lambda k, q: rules.rkv_of_tables(k, q, PROMPT, 0.2, 20, buffer=12, a=8, last=30, kernel=7),
    ),
    "snapkv": (
        SnapKV(24, buffer=20),
        every_buffer(partial(naive.snapkv, variant="paper"), budget=24, buffer=20, a=8),
    ),
    "rpc all": (RPC(P=36, R=5, c=3), lambda k, q: rules.rpc(k, q, PROMPT, 36, 5, 3, "all")),
    "rpc group": (
        RPC(P=36, R=5, c=3, aggregation="group"),
        lambda k, q: rules.rpc(k, q, PROMPT, 36, 5, 3, "group"),
    ),
    "h2o": (H2O(25), lambda k, q: rules.h2o(k, q, PROMPT, lambda read: 25, even=False)),
    "h2o rlkv_tables": (
        H2O(ratio=0.3, extra=5, variant="rlkv_tables"),
        lambda k, q: rules.h2o(k, q, PROMPT, lambda read: int(read * 0.3) + 5, even=True),
    ),
    "tova": (TOVA(20), lambda k, q: rules.tova(k, q, PROMPT, 20)),
}


def held_by_the_cache(
    policy: EvictionPolicy, keys: torch.Tensor, queries: torch.Tensor
) -> Iterator[rules.Held]:
    """After the prompt and every further token; keys ``[H, T, D]``, queries ``[Q, T, D]``."""
    cache = HeadReallocationCache(
        torch.zeros(1, HEADS, dtype=torch.bool), eviction=policy, record=True
    )
    (layer,) = cache.layers
    begin = 0
    for end in range(PROMPT, keys.shape[1] + 1):
        parts = CachedCall(None, begin, end - begin, rows=1).plan(cache.state, keys.device)
        span = slice(begin, end)
        layer.attend_and_store(
            queries[None, :, span], keys[None, :, span], keys[None, :, span], parts, HEAD_SIZE**-0.5
        )
        yield [head.nonzero()[:, 0].tolist() for head in cache.held(0)[0]]
        begin = end


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_the_cache_holds_what_the_rules_keep(method: str, seed: int) -> None:
    policy, by_rules = METHODS[method]
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((HEADS, TOKENS, HEAD_SIZE)).astype(np.float32)
    keys[:, rng.permutation(TOKENS)[:50]] = (
        keys[:, rng.permutation(TOKENS)[:50]] + 0.1
    )  # some similar ones
    queries = 2 * rng.standard_normal((HEADS * GROUP_SIZE, TOKENS, HEAD_SIZE)).astype(np.float32)
    expected = by_rules(keys.astype(np.float64), queries.astype(np.float64))
    evictions, before = 0, 0
    for got, want in zip(
        held_by_the_cache(policy, torch.from_numpy(keys), torch.from_numpy(queries)),
        expected,
        strict=True,
    ):
        assert got == want
        evictions += len(want[0]) <= before
        before = len(want[0])
    assert evictions >= 3
