"""Every registered policy in its variants: the cases of all tests that hold for any policy.

A newly registered policy is in ``CASES`` and ``INSTANCES`` with its default options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkv.eviction import H2O, POLICIES, RKV, RPC, TOVA, EvictionPolicy, RandomEviction, make_policy

# Options that leave room for a choice in a budget of 24; {} for policies that are not named.
VARIANTS: Mapping[str, list[dict[str, Any]]] = {
    "sink_window": [{"sink": 4}],
    "rkv": [
        {},
        {"variant": "published"},
        {"recent_similar": 3, "sink": 3, "lam": 0.5, "threshold": 0.2},
        {"kernel": 6},
    ],
    "snapkv": [{}, {"variant": "published", "observation": 4, "kernel": 3}],
    "rpc": [{"R": 10}, {"R": 6, "aggregation": "group", "sink": 2}],
    "h2o": [{}, {"sink": 5}],
    "tova": [{}, {"sink": 2, "observation": 4}],
    "random": [{}, {"seed": 7, "sink": 2}],
}
CASES = [(name, options) for name in POLICIES for options in VARIANTS.get(name, [{}])]
IDS = [
    name + "".join(f"-{key}={value}" for key, value in options.items()) for name, options in CASES
]

HEADS, HEAD_SIZE, BUDGET = 3, 16, 24


def build(case: tuple[str, dict[str, Any]], budget: int = BUDGET) -> EvictionPolicy:
    name, options = case
    return make_policy(name, budget=budget, **options)


def small_policy(name: str, **options: Any) -> EvictionPolicy:
    """A policy whose budget may be as small as 5 entries."""
    fewer = {"sink_window": {"sink": 2}, "rpc": {"R": 3}}.get(name, {"observation": 3})
    return make_policy(name, **fewer, **options)


@dataclass(frozen=True)
class OldestKey(EvictionPolicy):
    """A user's own policy, not registered: the larger the first element of a key, the better."""

    name: ClassVar[str] = "oldest_key"

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return keys[..., 0].float()


# Policies for caches of about 20 to 50 tokens.
INSTANCES: Mapping[str, EvictionPolicy] = {
    **{name: small_policy(name, budget=9, buffer=4) for name in POLICIES},
    "rkv published": RKV(budget=9, buffer=5, observation=3, variant="published"),
    "rkv sinks": RKV(budget=9, buffer=5, observation=3, sink=2),
    "rpc schedule": RPC(P=12, R=3, c=3),
    "rpc prompt evictable": RPC(P=12, R=3, c=3, protect_prompt=False),
    "h2o at every token": H2O(budget=8),
    "h2o protected": H2O(budget=8, protect_prompt=True),
    "tova at every token": TOVA(budget=7),
    "tova protected": TOVA(budget=5, buffer=2, protect_prompt=True),
    "random unprotected": RandomEviction(budget=8, buffer=3, seed=5, protect_prompt=False),
    "ratio": RKV(ratio=0.3, extra=4, buffer=4, observation=3),
    "ratio random": RandomEviction(ratio=0.4, extra=9, buffer=3),
    "ratio h2o protected": H2O(ratio=0.3, extra=4, protect_prompt=True),
    "rkv of rlkv's tables": RKV(
        ratio=0.4, extra=4, buffer=3, observation=3, variant="rlkv_tables", compacted=10, kernel=3
    ),
    "h2o of rlkv's tables": H2O(ratio=0.3, extra=5, variant="rlkv_tables"),
    "own": OldestKey(budget=10, buffer=3, observation=2),
}


def random_entries(
    rows: int, n: int, group_size: int, queries: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Keys ``[rows, HEADS, n, D]`` with some near copies, queries ``[rows, HEADS * G, queries,
    D]``.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, HEADS, n, HEAD_SIZE, generator=generator)
    copied = torch.randint(n, (n // 3,), generator=generator)
    keys[:, :, copied] = keys[:, :, copied.flip(0)] + 0.1 * torch.randn(
        rows, HEADS, n // 3, HEAD_SIZE, generator=generator
    )
    return keys, 2 * torch.randn(rows, HEADS * group_size, queries, HEAD_SIZE, generator=generator)
