"""The scores of every policy in readable form: float32, one row without padding, loops over heads
and entries.

Slow.  Shapes: H KV heads, Q = H * G query heads, N entries, a queries, D size of a head.
Each function takes the policy, keys ``[H, N, D]`` and queries ``[Q, a, D]`` of the last a entries,
and returns float32 ``[H, N]``.  Entries that are kept whatever their score may differ from what
``policy.scores`` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rlkv.eviction.policies import H2O, RPC, TOVA, RandomEviction, SinkWindow, SnapKV
from rlkv.eviction.rkv import RKV


def attention(keys_ND: Tensor, query_D: Tensor, begin: int, end: int) -> Tensor:
    """Attention of one query to the entries ``begin <= j < end``, ``[N]``, 0 elsewhere."""
    out = torch.zeros(keys_ND.shape[0])
    if begin < end:
        logits = torch.stack(
            [query_D @ keys_ND[j] / math.sqrt(keys_ND.shape[1]) for j in range(begin, end)]
        )
        out[begin:end] = logits.softmax(dim=0)
    return out


def neighbours(values_N: Tensor, j: int, kernel: int) -> Tensor:
    """The values of a window of ``kernel`` entries around j, as far as they exist."""
    return values_N[max(0, j - kernel // 2) : j + (kernel - 1) // 2 + 1]


def importance(policy: RKV | SnapKV, keys_ND: Tensor, queries_GaD: Tensor) -> Tensor:
    """I of one KV head, ``[N]``; 0 for observation tokens."""
    n, candidates = keys_ND.shape[0], keys_ND.shape[0] - policy.observation
    queries_aGD = queries_GaD[:, -policy.observation :].transpose(0, 1)
    per_query = []
    for queries_GD in queries_aGD:
        if policy.variant == "published":
            logits = [
                max(float(q @ keys_ND[j]) / math.sqrt(keys_ND.shape[1]) for q in queries_GD)
                for j in range(n)
            ]
            per_query.append(torch.tensor(logits[:candidates]).softmax(dim=0))
        else:
            most = torch.stack([attention(keys_ND, q, 0, candidates) for q in queries_GD]).amax(
                dim=0
            )
            most = most / most.sum()
            per_query.append(
                torch.stack([neighbours(most, j, policy.kernel).max() for j in range(candidates)])
            )
    mean = torch.stack(per_query).mean(dim=0)
    if policy.variant == "published":
        mean = torch.stack([neighbours(mean, j, policy.kernel).max() for j in range(candidates)])
    return torch.cat([mean, torch.zeros(policy.observation)])


def redundancy(policy: RKV, keys_ND: Tensor) -> Tensor:
    """R of one KV head, ``[N]``."""
    n = keys_ND.shape[0]
    unit = [key / (key.norm() + 1e-8) for key in keys_ND]
    mean = torch.zeros(n)
    for i in range(n):
        row = torch.tensor([0.0 if i == j else float(unit[i] @ unit[j]) for j in range(n)])
        similar = [j for j in range(n) if row[j] > policy.threshold]
        if policy.variant == "published" and not similar:
            similar = [0]
        row[similar[-policy.recent_similar :]] = 0
        mean += row / n
    return mean.softmax(dim=0)


def rkv(policy: RKV, keys: Tensor, queries: Tensor) -> Tensor:
    return torch.stack(
        [
            policy.lam * importance(policy, keys_ND, queries_GaD)
            - (1 - policy.lam) * redundancy(policy, keys_ND)
            for keys_ND, queries_GaD in zip(
                keys, queries.unflatten(0, (keys.shape[0], -1)), strict=True
            )
        ]
    )


def snapkv(policy: SnapKV, keys: Tensor, queries: Tensor) -> Tensor:
    groups = queries.unflatten(0, (keys.shape[0], -1))
    return torch.stack([importance(policy, keys[h], groups[h]) for h in range(keys.shape[0])])


def rpc(policy: RPC, keys: Tensor, queries: Tensor) -> Tensor:
    h, n, _ = keys.shape
    groups = queries[:, -policy.R :].unflatten(0, (h, -1))
    received = torch.zeros(h, n)
    for head in range(h):
        for query_aD in groups[head]:
            for query_D in query_aD:
                received[head] += attention(keys[head], query_D, 0, n - policy.R) / groups.shape[1]
    if policy.aggregation == "all":
        received[:] = received.mean(dim=0)
    pooled = [
        [neighbours(received[head], j, policy.kernel).sum() / policy.kernel for j in range(n)]
        for head in range(h)
    ]
    return torch.tensor(pooled)


def h2o(policy: H2O, keys: Tensor, queries: Tensor) -> Tensor:
    h, n, _ = keys.shape
    received = torch.zeros(h, n)
    for head, queries_GaD in enumerate(queries.unflatten(0, (h, -1))):
        for query_aD in queries_GaD:
            for i, query_D in enumerate(query_aD):
                received[head] += attention(keys[head], query_D, 0, n - query_aD.shape[0] + i + 1)
    return received


def tova(policy: TOVA, keys: Tensor, queries: Tensor) -> Tensor:
    h, n, _ = keys.shape
    groups = queries.unflatten(0, (h, -1))
    received = [
        attention(keys[head], query_aD[-1], 0, n) for head in range(h) for query_aD in groups[head]
    ]
    return torch.stack(received).mean(dim=0).expand(h, n)


def sink_window(policy: SinkWindow, keys: Tensor, queries: Tensor) -> Tensor:
    return torch.tensor([[float(j) for j in range(keys.shape[1])] for _ in range(keys.shape[0])])


def random(policy: RandomEviction, keys: Tensor, queries: Tensor) -> Tensor:
    h, n, _ = keys.shape
    draws = torch.zeros(h, n)
    for head in range(h):
        for j in range(n):
            state = policy.seed
            for counter in (0, head, n, j + 1):  # layer, head, tokens read, place
                state = _splitmix((state + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)
            draws[head, j] = state >> 40
    return draws


def _splitmix(state: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014), on unsigned integers."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> bits)) * factor % 2**64
    return state ^ (state >> 31)


REFERENCES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "sink_window": sink_window,
        "rkv": rkv,
        "rpc": rpc,
        "snapkv": snapkv,
        "h2o": h2o,
        "tova": tova,
        "random": random,
    }
)
