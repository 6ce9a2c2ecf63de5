"""Compaction of a paged cache under an eviction policy, in plain torch; the same code on a CPU and on a GPU.

Shapes: R requests, H KV heads, G query heads per KV head, C entries of a request, N entries in a block, D size of a
head, a observed queries, E entries per observed query; the cache is ``[blocks, H, N, 2 * D]``, keys then values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.eviction.attention import items_at_once
from rlkv.eviction.base import EvictionPolicy
from rlkv.vllm.blocks.buffers import NOWHERE, BufferUse, Round, plan_rounds


@dataclass
class Eviction:
    """What all compressible heads of a served model share."""

    policy: EvictionPolicy
    use: BufferUse
    _latest: tuple[Any, list[Round]] | None = field(default=None, repr=False)

    def rounds(self, common: Any) -> list[Round]:
        """The rounds of a step by its metadata (vLLM's), planned once for all bins."""
        lengths = common.seq_lens_cpu_upper_bound  # exact without speculative decoding, which is refused
        if self._latest is None or self._latest[0] is not lengths:
            self._latest = (lengths, plan_rounds(self.use, common.query_start_loc_cpu.tolist(), lengths.tolist()))
        return self._latest[1]


def entry_slots(use: BufferUse, table_RM: Tensor, row_T: Tensor, entry_T: Tensor) -> Tensor:
    """Slots (block * N + place) of entries ``entry_T`` of the requests ``row_T``, int64 ``[T]``."""
    return _slots(use, table_RM, row_T, entry_T + use.query_blocks * use.block_size)


def query_slots(use: BufferUse, table_RM: Tensor, row_T: Tensor, place_T: Tensor) -> Tensor:
    """Slots of observed queries, int64 ``[E, T]``; ``NOWHERE`` where ``place_T`` is."""
    each = torch.arange(use.entries_per_query, device=place_T.device)[:, None]
    slots = _slots(use, table_RM, row_T, place_T.clamp(min=0) * use.entries_per_query + each)
    return slots.masked_fill(place_T == NOWHERE, NOWHERE)


def _slots(use: BufferUse, table_RM: Tensor, row_T: Tensor, entry: Tensor) -> Tensor:
    return table_RM[row_T, entry // use.block_size].long() * use.block_size + entry % use.block_size


def query_halves(query_TXD: Tensor, kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Queries ``[T, H * G, D]`` as E pairs ``[T, H, D]`` in the places of a key and a value; an odd G is filled up."""
    grouped = query_TXD.unflatten(1, (kv_heads, -1))
    if grouped.shape[2] % 2:
        grouped = F.pad(grouped, (0, 0, 0, 1))
    # the engine's kernel that writes them wants the heads of a token side by side
    heads = [head.contiguous() for head in grouped.unbind(2)]
    return list(zip(heads[::2], heads[1::2], strict=True))


def compact(cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float) -> None:
    """Keep ``budget`` of the C entries of each request, in their order, at the front of its entries.

    Args:
        table_RM: the blocks of the requests.
        positions_R: int64, the position of the token that comes next.
        factor: what queries are multiplied by, so that ``query . key / sqrt(D)`` is the attention logit.
    """
    use = eviction.use
    numbers = cache.shape[1] * use.capacity * cache.shape[3]
    at_once = items_at_once(numbers)
    for first in range(0, len(table_RM), at_once):
        piece = slice(first, first + at_once)
        _compact(cache, table_RM[piece].long(), positions_R[piece], eviction, factor)


def _compact(cache: Tensor, table_RM: Tensor, positions_R: Tensor, eviction: Eviction, factor: float) -> None:
    use, policy, size = eviction.use, eviction.policy, cache.shape[3] // 2
    blocks = table_RM[:, use.query_blocks : use.query_blocks + use.full(use.capacity)]
    states = _entries(cache, blocks)[:, :, : use.capacity]  # [R, H, C, 2 * D]
    queries = observed_queries(cache, table_RM, positions_R, use) * factor
    keys = states[..., :size]
    valid = torch.ones(len(keys), use.capacity, dtype=torch.bool, device=cache.device)
    scores = policy.scores(keys, queries.flatten(1, 2), valid)
    kept = policy.keep(scores, use.budget, valid)  # [R, H, budget]
    states = states.gather(2, kept[..., None].expand(-1, -1, -1, 2 * size))
    entry = torch.arange(use.budget, device=cache.device)
    cache[blocks[:, entry // use.block_size], :, entry % use.block_size] = states.transpose(1, 2)


def observed_queries(cache: Tensor, table_RM: Tensor, positions_R: Tensor, use: BufferUse) -> Tensor:
    """The last a queries before each position, oldest first: ``[R, H, G, a, D]``."""
    stored = _entries(cache, table_RM[:, : use.query_blocks])[:, :, : use.observation * use.entries_per_query]
    # an entry's key and value are two query heads
    places = stored.unflatten(2, (use.observation, use.entries_per_query)).unflatten(4, (2, -1)).flatten(3, 4)
    order = use.observed_before(positions_R)[:, None, :, None, None].expand(-1, places.shape[1], -1, *places.shape[3:])
    return places.gather(2, order)[:, :, :, : use.group_size].transpose(2, 3)


def _entries(cache: Tensor, blocks_RM: Tensor) -> Tensor:
    """The entries in blocks ``[R, M]``, side by side: ``[R, H, M * N, 2 * D]``."""
    return cache[blocks_RM].permute(0, 2, 1, 3, 4).flatten(2, 3)
