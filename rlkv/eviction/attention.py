"""How much attention cached entries get, computed from queries and keys: no policy needs eager attention.

Shapes: B, H, Q = H * G, N, a, D as in :mod:`rlkv.eviction.base`; L = B * H, the KV heads of all rows in one dimension.
All results are float32, whatever the dtype of keys and queries.  No result depends on what padding holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = 2**22  # numbers in the largest temporary tensor (16 MB in float32), unless one row of one head needs more


def items_at_once(floats_each: int) -> int:
    """How many items of ``floats_each`` numbers fit into ``FLOATS``, at least one."""
    return max(1, FLOATS // max(1, floats_each))


def pieces(total: int, floats_each: int) -> Iterator[slice]:
    """Slices that cover ``range(total)``, each of :func:`items_at_once`."""
    step = items_at_once(floats_each)
    return (slice(begin, min(begin + step, total)) for begin in range(0, total, step))


class FlatHeads(NamedTuple):
    """The KV heads of all rows side by side: keys ``[L, N, D]``, queries ``[L, G, a, D]``, valid bool ``[L, N]``."""

    keys: Tensor
    queries: Tensor
    valid: Tensor

    @classmethod
    def of(cls, keys: Tensor, queries: Tensor, valid: Tensor) -> FlatHeads:
        """From keys ``[B, H, N, D]``, queries ``[B, Q, a, D]``, valid ``[B, N]``."""
        h = keys.shape[1]
        grouped = queries.unflatten(1, (h, queries.shape[1] // h))
        return cls(keys.flatten(0, 1), grouped.flatten(0, 1), valid.repeat_interleave(h, dim=0))


def attention_logits(keys: Tensor, queries: Tensor) -> Tensor:
    """``query . key / sqrt(D)``: keys ``[L, N, D]``, queries ``[L, G, a, D]`` -> ``[L, G, a, N]``."""
    scaled = queries.float() * queries.shape[-1] ** -0.5
    # the queries of a group as rows of one product: a broadcast one would copy the keys G times
    logits = scaled.flatten(1, 2) @ keys.float().mT
    return logits.unflatten(1, queries.shape[1:3])


def visible(valid: Tensor, queries: slice, hidden: int = 0) -> Tensor:
    """Entries up to each query's own, without padding and the last ``hidden``: valid ``[L, N]`` -> ``[L, a, N]``."""
    n = valid.shape[-1]
    entry = torch.arange(n, device=valid.device)
    seen = (entry <= entry[queries, None]) & (entry < n - hidden)
    return seen & valid[:, None, :]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension where ``mask``, 0 elsewhere; 0 where nothing is left.  Overwrites logits."""
    return logits.masked_fill_(~mask, -torch.inf).softmax(dim=-1).masked_fill_(~mask, 0)


def sum_rows(values: Tensor) -> Tensor:
    """``[..., a, N]`` -> ``[..., N]``, added up in the same order for every entry (``sum(dim=-2)`` is not)."""
    return values.mT.contiguous().sum(dim=-1)


def attention_received(keys: Tensor, queries: Tensor, valid: Tensor, hidden: int = 0) -> Tensor:
    """Attention that every entry gets, summed over the queries: float32 ``[B, H, G, N]``.

    Each query head's softmax runs over the entries that are :func:`visible` to the query.  Queries are taken in pieces,
    so that the whole a x N matrix is never in memory.
    """
    flat = FlatHeads.of(keys, queries, valid)
    (num_flat, n, d), (g, a) = flat.keys.shape, flat.queries.shape[1:3]
    received = torch.zeros(num_flat, g, n, dtype=torch.float32, device=keys.device)
    for heads in pieces(num_flat, max(n * d, g * n)):
        keys_LND, valid_LN = flat.keys[heads].float(), flat.valid[heads]
        for rows in pieces(a, keys_LND.shape[0] * g * n):
            mask = visible(valid_LN, slice(n - a + rows.start, n - a + rows.stop), hidden)
            logits = attention_logits(keys_LND, flat.queries[heads, :, rows])
            received[heads] += sum_rows(masked_softmax(logits, mask[:, None]))
    return received.unflatten(0, keys.shape[:2])
