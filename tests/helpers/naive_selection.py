"""Which entries each method keeps, from its formulas: numpy, float64, one row without padding,
whole matrices.

Written apart from rlkv.eviction, of which nothing is imported.  Shapes: keys ``[H, N, D]``, queries
``[Q, a, D]`` of the last a entries; every function returns (kept, scores): ascending indices ``[H,
budget]`` and scores ``[H, N]``.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

DIGITS = 2.0**40  # scores are compared to 12 digits: what is equal on paper is equal here


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def grouped(keys: np.ndarray, queries: np.ndarray) -> list[np.ndarray]:
    """Logits ``[G, a, N]`` of every KV head."""
    h, _, d = keys.shape
    g = len(queries) // h
    return [
        np.stack([q @ keys[i].T / np.sqrt(d) for q in queries[i * g : (i + 1) * g]])
        for i in range(h)
    ]


def causal(logits: np.ndarray) -> np.ndarray:
    """The last query sees all, the one before it all but the last entry, and so on."""
    a, n = logits.shape[-2:]
    hidden = np.triu(np.ones((a, n), dtype=bool), k=n - a + 1)
    return np.where(hidden, -np.inf, logits)


def windows(x: np.ndarray, kernel: int, fill: float) -> np.ndarray:
    """``[..., N]`` -> ``[..., N, kernel]``, from i - W to i + W, or to i + W - 1 for 2W.

    ``fill`` beyond the ends.
    """
    sides = (kernel // 2, (kernel - 1) // 2)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [sides], constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)


def rounded(scores: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(scores)
    return np.ldexp(np.round(mantissa * DIGITS) / DIGITS, exponent)


def keep(scores: np.ndarray, budget: int, recent: int) -> np.ndarray:
    """The last ``recent`` entries and the best of the others; of equal scores the later one."""
    n = len(scores)
    candidates = np.arange(n - recent)
    order = np.lexsort((candidates, rounded(scores[: n - recent])))[::-1]
    return np.sort(np.concatenate([order[: budget - recent], np.arange(n - recent, n)]))


def keep_all(scores: list[np.ndarray], budget: int, recent: int) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([keep(s, budget, recent) for s in scores]), np.stack(scores)


# R-KV (2505.24133): Z = lambda I - (1 - lambda) R


def importance_paper(logits: np.ndarray, a: int, kernel: int) -> np.ndarray:
    """Per head softmax over all but the last a; max over the group, renormalised.

    Max over a window; mean.
    """
    p = softmax(logits[..., :-a]).max(axis=0)
    p = p / p.sum(axis=-1, keepdims=True)
    return windows(p, kernel, -np.inf).max(axis=-1).mean(axis=0)


def importance_published(logits: np.ndarray, a: int, kernel: int) -> np.ndarray:
    """Max over the group of logits, softmax over the entries before the last a, mean, max over a
    window.
    """
    p = softmax(logits.max(axis=0)[:, :-a]).mean(axis=0)
    return windows(p, kernel, -np.inf).max(axis=-1)


def importance_tables(logits: np.ndarray, a: int, kernel: int) -> np.ndarray:
    """Softmax per head over the entries before the last a, mean over the queries, max over the
    group and a window.
    """
    p = softmax(logits[..., :-a]).mean(axis=1).max(axis=0)
    return windows(p, kernel, -np.inf).max(axis=-1)


def cosines(keys: np.ndarray) -> np.ndarray:
    unit = keys / (np.sqrt((keys**2).sum(axis=-1, keepdims=True)) + 1e-8)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, 0)
    return similarity


def redundancy_paper(keys: np.ndarray, threshold: float, beta: int) -> np.ndarray:
    similarity = cosines(keys)
    for row in similarity:
        row[np.flatnonzero(row > threshold)[-beta:]] = 0
    return softmax(similarity.mean(axis=0))


def redundancy_published(keys: np.ndarray, threshold: float) -> np.ndarray:
    similarity = cosines(keys)
    for row in similarity:
        row[max(np.flatnonzero(row > threshold), default=0)] = 0  # none: the first column
    return softmax(similarity.mean(axis=0))


IMPORTANCE = MappingProxyType(
    {"paper": importance_paper, "published": importance_published, "rlkv_tables": importance_tables}
)


def rkv(keys, queries, budget, variant, lam=0.1, threshold=0.5, beta=1, kernel=7):
    a, scores = queries.shape[1], []
    for head, logits in zip(keys, grouped(keys, queries), strict=True):
        important = IMPORTANCE[variant](logits, a, kernel)
        paper = variant == "paper"
        redundant = (
            redundancy_paper(head, threshold, beta)
            if paper
            else redundancy_published(head, threshold)
        )
        scores.append(np.append(lam * important - (1 - lam) * redundant[:-a], np.zeros(a)))
    return keep_all(scores, budget, a)


def snapkv(keys, queries, budget, variant):
    return rkv(keys, queries, budget, variant, lam=1.0)


# RPC (2505.13866)


def rpc(keys, queries, budget, aggregation, kernel=7):
    r = queries.shape[1]
    received = np.stack(
        [softmax(logits[..., :-r]).sum(axis=1).mean(axis=0) for logits in grouped(keys, queries)]
    )
    if aggregation == "all":
        received = np.broadcast_to(received.mean(axis=0), received.shape)
    pooled = windows(received, kernel, 0.0).mean(axis=-1)
    return keep_all([np.append(row, np.zeros(r)) for row in pooled], budget, r)


# H2O (2306.14048): all queries of the past are given, a = N


def h2o(keys, queries, budget):
    sums = [softmax(causal(logits)).sum(axis=(0, 1)) for logits in grouped(keys, queries)]
    return keep_all(sums, budget, budget // 2)


# TOVA (2401.06104)


def tova(keys, queries, budget):
    last = np.concatenate([softmax(logits[:, -1]) for logits in grouped(keys, queries)]).mean(
        axis=0
    )
    return keep_all([last] * len(keys), budget, 1)
