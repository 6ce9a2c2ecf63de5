"""Every policy in its variants, for tests that hold for all of them."""

from __future__ import annotations

from typing import Any

import torch

from rlkv.eviction import POLICIES, EvictionPolicy, make_policy

# name, options.  Few observation tokens, so that a budget of 24 leaves room for a choice.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sink_window", {"sink": 4}),
    ("rkv", {}),
    ("rkv", {"variant": "published"}),
    ("rkv", {"recent_similar": 3, "sink": 3, "lam": 0.5, "threshold": 0.2}),
    ("snapkv", {}),
    ("snapkv", {"variant": "published", "observation": 4, "kernel": 3}),
    ("rpc", {"R": 10}),
    ("rpc", {"R": 6, "aggregation": "group", "sink": 2}),
    ("h2o", {}),
    ("h2o", {"sink": 5}),
    ("tova", {}),
    ("tova", {"sink": 2, "observation": 4}),
    ("random", {}),
    ("random", {"seed": 7, "sink": 2}),
]
IDS = [name + "".join(f"-{key}={value}" for key, value in options.items()) for name, options in CASES]
assert {name for name, _ in CASES} == set(POLICIES)

HEADS, HEAD_SIZE, BUDGET = 3, 16, 24


def build(case: tuple[str, dict[str, Any]], budget: int = BUDGET) -> EvictionPolicy:
    name, options = case
    return make_policy(name, budget=budget, **options)


def random_entries(rows: int, n: int, group_size: int, queries: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[rows, HEADS, n, D]`` with some near copies, queries ``[rows, HEADS * G, queries, D]``."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, HEADS, n, HEAD_SIZE, generator=generator)
    copied = torch.randint(n, (n // 3,), generator=generator)
    keys[:, :, copied] = keys[:, :, copied.flip(0)] + 0.1 * torch.randn(
        rows, HEADS, n // 3, HEAD_SIZE, generator=generator
    )
    return keys, 2 * torch.randn(rows, HEADS * group_size, queries, HEAD_SIZE, generator=generator)
