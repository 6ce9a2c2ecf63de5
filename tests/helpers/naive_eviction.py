"""The naive reference of eviction: what each method keeps, by its formulas and rules.

- Scores and choices in numpy and float64: one row without padding, whole matrices.
- A model that reads one row with lists of entries, head by head: only the choice of the policy
  itself is taken from the package.
- The policies that tests of the cache run with.

Shapes: keys ``[H, N, D]``, queries ``[Q, a, D]`` of the last a entries, scores ``[H, N]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from rlkv.eviction import H2O, POLICIES, RKV, RPC, TOVA, EvictionPolicy, RandomEviction, make_policy

DIGITS = 2.0**40  # scores are compared to 12 digits: what is equal on paper is equal here


Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logits_of(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Logits ``[H, G, a, N]``."""
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    return grouped @ keys[:, None].transpose(0, 1, 3, 2) / np.sqrt(keys.shape[2])


def windows(x: np.ndarray, kernel: int, fill: float) -> np.ndarray:
    """``[..., N]`` -> ``[..., N, kernel]``: i - W to i + W, or to i + W - 1 for 2W entries."""
    sides = (kernel // 2, (kernel - 1) // 2)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [sides], constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)


def before_last(scores: np.ndarray, a: int) -> np.ndarray:
    """Scores of all entries from those before the last a, which are always kept."""
    return np.pad(scores, [(0, 0), (0, a)])


def choose(scores: np.ndarray, budget: int, recent: int) -> np.ndarray:
    """The last entries and the best of the others, the later of equals: ``[H, budget]``."""
    mantissa, exponent = np.frexp(scores)
    rounded = np.ldexp(np.round(mantissa * DIGITS) / DIGITS, exponent)
    n = scores.shape[1]
    kept = []
    for row in rounded:
        order = np.lexsort((np.arange(n - recent), row[: n - recent]))[::-1]
        kept.append(np.sort(np.concatenate([order[: budget - recent], np.arange(n - recent, n)])))
    return np.stack(kept)


# Scores


def importance(logits: np.ndarray, kernel: int, variant: str) -> np.ndarray:
    """I of R-KV (2505.24133): logits ``[H, G, a, n]`` of the candidates -> ``[H, n]``."""
    if variant == "paper":  # maximum over the group, renormalised; maximum over a window; mean
        p = softmax(logits).max(axis=1)
        p = p / p.sum(axis=-1, keepdims=True)
        return windows(p, kernel, -np.inf).max(axis=-1).mean(axis=1)
    if variant == "published":  # maximum over the logits of the group; mean
        p = softmax(logits.max(axis=1)).mean(axis=1)
    else:  # mean over the queries; maximum over the group
        p = softmax(logits).mean(axis=2).max(axis=1)
    return windows(p, kernel, -np.inf).max(axis=-1)


def redundancy(keys: np.ndarray, variant: str, threshold: float, beta: int) -> np.ndarray:
    """R of one head, ``[N]``: in the row of a token its beta latest similar ones are forgiven."""
    unit = keys / (np.sqrt((keys**2).sum(axis=-1, keepdims=True)) + 1e-8)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, 0)
    for row in similarity:
        similar = np.flatnonzero(row > threshold)[-beta:]
        if variant != "paper" and not len(similar):
            similar = 0  # the first column
        row[similar] = 0
    return softmax(similarity.mean(axis=0))


def rkv(
    keys: np.ndarray,
    queries: np.ndarray,
    variant: str = "paper",
    lam: float = 0.1,
    threshold: float = 0.5,
    beta: int = 1,
    kernel: int = 7,
) -> np.ndarray:
    """lambda I - (1 - lambda) R; SnapKV (2404.14469) is lambda = 1."""
    a = queries.shape[1]
    important = importance(logits_of(keys, queries)[..., :-a], kernel, variant)
    redundant = np.stack([redundancy(head, variant, threshold, beta) for head in keys])[:, :-a]
    return before_last(lam * important - (1 - lam) * redundant, a)


def compacted_rkv(keys: np.ndarray, queries: np.ndarray, compacted: int) -> np.ndarray:
    """RLKV's evaluator: only the last entries compete, the older ones stay."""
    newer = rkv(keys[:, -compacted:], queries, "rlkv_tables")
    older = keys.shape[1] - compacted
    return np.pad(newer, [(0, 0), (older, 0)], constant_values=1e30)


def rpc(
    keys: np.ndarray, queries: np.ndarray, aggregation: str = "all", kernel: int = 7
) -> np.ndarray:
    """RPC (2505.13866)."""
    r = queries.shape[1]
    received = softmax(logits_of(keys, queries)[..., :-r]).sum(axis=2).mean(axis=1)
    if aggregation == "all":
        received = np.broadcast_to(received.mean(axis=0), received.shape)
    return before_last(windows(received, kernel, 0.0).mean(axis=-1), r)


def h2o(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """H2O (2306.14048): all queries of the past are given, each sees up to itself."""
    hidden = np.triu(np.ones((keys.shape[1],) * 2, dtype=bool), k=1)
    return softmax(np.where(hidden, -np.inf, logits_of(keys, queries))).sum(axis=(1, 2))


def tova(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """TOVA (2401.06104)."""
    last = softmax(logits_of(keys, queries)[:, :, -1]).mean(axis=(0, 1))
    return np.broadcast_to(last, keys.shape[:2])


def random_draws(seed: int, layer: int, heads: int, seen: int) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014) of seed, layer, head, tokens read and place."""
    draws = np.zeros((heads, seen))
    for head, j in np.ndindex(heads, seen):
        state = seed
        for counter in (layer, head, seen, j + 1):
            state = (state + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
            for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                state = (state ^ (state >> bits)) * factor % 2**64
            state ^= state >> 31
        draws[head, j] = state >> 40
    return draws


# A model that reads one row


@dataclass
class _Head:
    """Entries of a head, oldest first: keys and values ``[n, D]``, summed attention ``[n]``."""

    keys: Tensor
    values: Tensor
    totals: Tensor
    positions: list[int] = field(default_factory=list)

    def append(self, position: int, key: Tensor, value: Tensor) -> None:
        self.positions.append(position)
        self.keys = torch.cat([self.keys, key[None]])
        self.values = torch.cat([self.values, value[None]])
        self.totals = torch.cat([self.totals, torch.zeros(1)])

    def keep(self, index: list[int]) -> None:
        self.positions = [self.positions[i] for i in index]
        self.keys = self.keys[index]
        self.values = self.values[index]
        self.totals = self.totals[index]


@dataclass
class _Layer:
    heads: list[_Head]
    queries: list[Tensor] = field(default_factory=list)  # [Q, D] of all tokens so far
    evictions: int = 0


@dataclass
class NaiveRun:
    """One row, its layers as it goes.

    ``full``: bool ``[L, H]``, heads that the policy leaves alone; with ``local``, S and W, they
    keep sinks and a window.
    """

    policy: EvictionPolicy
    full: Tensor
    protected: int  # first tokens, which are never evicted
    local: tuple[int, int] | None = None
    layers: dict[int, _Layer] = field(default_factory=dict)
    start: int = 0  # tokens before this call

    def held(self) -> Tensor:
        """bool ``[L, H, T]``."""
        held = torch.zeros(*self.full.shape, len(self.layers[0].queries), dtype=torch.bool)
        for number, layer in self.layers.items():
            for head, entries in enumerate(layer.heads):
                held[number, head, entries.positions] = True
        return held


_runs: list[NaiveRun] = []


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    run = _runs[-1]
    heads, length, size = key.shape[1:]
    groups = query.shape[1] // heads
    empty = torch.zeros(0, size)
    new = _Layer([_Head(empty, empty, torch.zeros(0)) for _ in range(heads)])
    layer = run.layers.setdefault(module.layer_idx, new)
    out = torch.zeros(1, length, query.shape[1], size)
    for t in range(length):
        layer.queries.append(query[0, :, t])
        for index, head in enumerate(layer.heads):
            head.append(run.start + t, key[0, index, t], value[0, index, t])
            if run.local is not None and run.full[module.layer_idx, index]:
                head.keep(_of_window(run, head.positions, *run.local))
            own = slice(index * groups, (index + 1) * groups)
            logits = query[0, own, t] @ head.keys.T * scaling
            out[0, t, own] = torch.softmax(logits, -1) @ head.values
            # attention among what may be evicted
            if run.policy.accumulates and run.start + t >= run.protected:
                received = torch.softmax(logits[:, run.protected :], -1).sum(0)
                head.totals[run.protected :] += received
    _evict(run, layer, module.layer_idx, scaling)
    return out, None


def _of_window(run: NaiveRun, positions: list[int], sink: int, window: int) -> list[int]:
    """Indices of the tokens that the latest one sees: sinks, its call, and a window before that."""
    kept = []
    for i, position in enumerate(positions):
        if position < sink or position >= run.start or position > positions[-1] - window:
            kept.append(i)
    return kept


def _evict(run: NaiveRun, layer: _Layer, number: int, scaling: float) -> None:
    """After a call: evict from the compressible heads if they are due."""
    policy, protected = run.policy, run.protected
    seen = len(layer.queries) - protected
    chosen = (~run.full[number]).nonzero()[:, 0].tolist()
    if not chosen or seen <= 0:
        return
    heads = [layer.heads[h] for h in chosen]
    count = len(heads[0].positions) - protected
    where = torch.tensor([seen]), torch.tensor([layer.evictions])
    if count < int(policy.capacity(*where)):
        return
    budget = min(int(policy.entries(*where)), count)
    valid = torch.ones(1, count, dtype=torch.bool)
    keys = torch.stack([head.keys[protected:] for head in heads])[None]
    latest = torch.stack(layer.queries[-min(policy.observation, count) :], dim=1)
    grouped = latest.unflatten(0, (len(layer.heads), -1))[chosen].flatten(0, 1)[None]
    queries = grouped * scaling * keys.shape[-1] ** 0.5
    if policy.accumulates:
        scores = torch.stack([head.totals[protected:] for head in heads])[None]
        kept = policy.keep(scores, budget, valid)[0]
    elif policy.draws:
        draws: Any = {"seen": torch.tensor([seen + protected]), "layer": number}
        kept = policy.keep(policy.scores(keys, queries, valid, **draws), budget, valid)[0]
    else:
        kept = policy.select(keys, queries, budget)[0]
    for head, index in zip(heads, kept.tolist(), strict=True):
        head.keep([*range(protected), *(protected + i for i in index)])
    layer.evictions += 1


AttentionInterface.register("rlkv_naive_eviction", _attention)
AttentionMaskInterface.register("rlkv_naive_eviction", lambda **kwargs: None)


@torch.no_grad()
def naive_logits(
    model: PreTrainedModel,
    ids: Tensor,
    calls: list[int],
    policy: EvictionPolicy,
    full: Tensor,
    prompt: int,
    local: tuple[int, int] | None = None,
) -> tuple[Tensor, NaiveRun]:
    """Logits ``[T, vocabulary]`` of a row ``[T]``; tokens of a call see each other.

    ``prompt``: first tokens, which the policy may protect.
    """
    run = NaiveRun(policy, full, prompt if policy.protect_prompt else 0, local)
    _runs.append(run)
    before = model.config._attn_implementation
    model.set_attn_implementation("rlkv_naive_eviction")
    outputs = []
    try:
        for length in calls:
            positions = torch.arange(run.start, run.start + length)[None]
            own = ids[None, run.start : run.start + length]
            outputs.append(model(own, position_ids=positions, use_cache=False).logits[0])
            run.start += length
    finally:
        model.set_attn_implementation(before)
        _runs.pop()
    return torch.cat(outputs), run


# Policies of tests


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


# for caches of about 20 to 50 tokens; a newly registered policy is among them
INSTANCES: Mapping[str, EvictionPolicy] = {
    **{name: small_policy(name, budget=9, buffer=4) for name in POLICIES},
    "rkv published": RKV(budget=9, buffer=5, observation=3, variant="published"),
    "rkv sinks": RKV(budget=9, buffer=5, observation=3, sink=2),
    "rkv tables": RKV(
        ratio=0.4, extra=4, buffer=3, observation=3, variant="rlkv_tables", compacted=10, kernel=3
    ),
    "rkv ratio": RKV(ratio=0.3, extra=4, buffer=4, observation=3),
    "rpc schedule": RPC(P=12, R=3, c=3),
    "rpc evictable": RPC(P=12, R=3, c=3, protect_prompt=False),
    "h2o each token": H2O(budget=8),
    "h2o protected": H2O(ratio=0.3, extra=4, protect_prompt=True),
    "h2o tables": H2O(ratio=0.3, extra=5, variant="rlkv_tables"),
    "tova protected": TOVA(budget=5, buffer=2, protect_prompt=True),
    "random evictable": RandomEviction(budget=8, buffer=3, seed=5, protect_prompt=False),
    "random ratio": RandomEviction(ratio=0.4, extra=9, buffer=3),
    "own": OldestKey(budget=10, buffer=3, observation=2),
}


def random_entries(
    rows: int, n: int, group_size: int, queries: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Keys ``[rows, 3, n, 16]`` with near copies, and queries of ``group_size`` heads each."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, 3, n, 16, generator=generator)
    copied = torch.randint(n, (n // 3,), generator=generator)
    noise = 0.1 * torch.randn(rows, 3, n // 3, 16, generator=generator)
    keys[:, :, copied] = keys[:, :, copied.flip(0)] + noise
    return keys, 2 * torch.randn(rows, 3 * group_size, queries, 16, generator=generator)
