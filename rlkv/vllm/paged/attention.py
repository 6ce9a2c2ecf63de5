"""Local and mixed attention over a paged cache in plain torch: the CPU path, and the reference of the CUDA path.

Shapes: R requests, Q queries of each, T query tokens of all requests one after the other, H KV heads, G query heads
per KV head, C blocks of a request, D head size; cache ``[blocks, H, N, 2 * D]``: N tokens a block, keys then values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.attention.mixed import mix
from rlkv.vllm.blocks.block_tables import GapRemover
from rlkv.vllm.blocks.demand import SinkWindowDemand

QUERIES_AT_ONCE = 128  # of one request: its window and these tokens are read together
ROWS_AT_ONCE = 64  # of decoding requests
EVERYTHING = 2**31  # a window that no text exceeds


def write_cache(key_THD: Tensor, value_THD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Put token t into slot ``slots_T[t]`` of the cache; slot = block * N + place in the block, below 0: padding."""
    tokens, kept = len(slots_T), slots_T >= 0  # more tokens than slots are padding too
    key_THD, value_THD = key_THD[:tokens], value_THD[:tokens]
    if not bool(kept.all()):
        key_THD, value_THD, slots_T = key_THD[kept], value_THD[kept], slots_T[kept]
    block, place = slots_T // cache.shape[2], slots_T % cache.shape[2]
    size = key_THD.shape[-1]
    cache[block, :, place, :size] = key_THD.to(cache.dtype)
    cache[block, :, place, size:] = value_THD.to(cache.dtype)


@dataclass(frozen=True)
class Reads:
    """Queries that are computed together, and the keys that they see; made once for all layers of a bin.

    Attributes:
        token_RQ, position_RQ: the queries, by their place in the step and in their text.
        block_RC, column_K: the blocks that are read, and the position of each slot in them.
        prompt: so many first tokens see everything before them.
        unwritten: row, column and slot of each slot that is read but may not have been written yet.
        seen_RQK: bool ``[R, Q, C * N]``; None: made for each layer, because all together may be large.
    """

    token_RQ: Tensor
    block_RC: Tensor
    column_K: Tensor
    position_RQ: Tensor
    demand: SinkWindowDemand
    prompt: int
    unwritten: tuple[Tensor, Tensor, Tensor]
    seen_RQK: Tensor | None = None

    def seen(self) -> Tensor:
        """Which slots each query sees, bool ``[R, Q, C * N]``."""
        if self.seen_RQK is not None:
            return self.seen_RQK
        distance = self.position_RQ[:, :, None] - self.column_K
        kept = (self.column_K < self.demand.sink) | (distance < self.demand.window)
        return (distance >= 0) & (kept | (self.position_RQ < self.prompt)[:, :, None])


def plan_reads(
    table_RC: Tensor, starts: list[int], lengths: list[int], demand: SinkWindowDemand, prompts: list[int] | None = None
) -> list[Reads]:
    """What the queries ``starts[r] <= t < starts[r + 1]`` of each request read; tables and lengths are without gaps.

    ``prompts``: how many first tokens of each request see everything before them; None: none.
    """
    queries = [end - start for start, end in pairwise(starts)]
    decoding = sorted((row for row, number in enumerate(queries) if number == 1), key=lambda row: lengths[row])
    found = []
    for first in range(0, len(decoding), ROWS_AT_ONCE):
        rows = decoding[first : first + ROWS_AT_ONCE]
        blocks = torch.arange(-(-lengths[rows[-1]] // demand.block_size))
        token_RQ = torch.tensor([[starts[row]] for row in rows])
        position_RQ = torch.tensor([[lengths[row] - 1] for row in rows])
        reads = _reads(table_RC[rows][:, : len(blocks)], blocks, token_RQ, position_RQ, demand)
        found.append(replace(reads, seen_RQK=reads.seen()))
    for row, number in enumerate(queries):
        for first in range(0, number if number > 1 else 0, QUERIES_AT_ONCE):
            own = torch.arange(first, min(first + QUERIES_AT_ONCE, number))
            position_RQ = (lengths[row] - number + own)[None]
            prompt, begin = prompts[row] if prompts else 0, int(position_RQ[0, 0])
            blocks = _blocks(begin, int(position_RQ[0, -1]), demand, begin < prompt)
            token_RQ = (starts[row] + own)[None]
            found.append(_reads(table_RC[row, blocks][None], blocks, token_RQ, position_RQ, demand, prompt))
    return found


def paged_local_attention(query_TXD: Tensor, cache: Tensor, reads: list[Reads], scale: float, out: Tensor) -> None:
    """Fill ``out`` from queries, both ``[T, H * G, D]``, query heads of a group side by side; scores are float32."""
    for part in reads:
        _attend(query_TXD, cache, part, scale, out)


MixedReads = tuple[list[Reads], list[Reads]]  # of the full and of the local branch


def plan_mixed_reads(table_RM: Tensor, starts: Tensor, lengths_R: Tensor, gap_remover: GapRemover) -> MixedReads:
    """What a step reads; arguments as of :class:`GapRemover`, which knows sinks and window."""
    begins = starts.tolist()
    most = int((starts[1:] - starts[:-1]).max())
    table_RC, shorter_R = gap_remover(table_RM, lengths_R, starts, most)
    everything = SinkWindowDemand(gap_remover.demand.block_size, 0, EVERYTHING)
    return (
        plan_reads(table_RM, begins, lengths_R.tolist(), everything),
        plan_reads(table_RC, begins, shorter_R.tolist(), gap_remover.demand),
    )


def paged_mixed_attention(
    query_TXD: Tensor, cache: Tensor, reads: MixedReads, alpha_H: Tensor, scale: float, out: Tensor
) -> None:
    """As :func:`paged_local_attention`: ``alpha * full + (1 - alpha) * local`` per KV head, mixed in float32."""
    branches = torch.zeros(2, *query_TXD.shape)
    for own, branch in zip(reads, branches, strict=True):
        paged_local_attention(query_TXD, cache, own, scale, branch)
    out.copy_(mix_tokens(branches[0], branches[1], alpha_H))


def mix_tokens(full_TXD: Tensor, local_TXD: Tensor, alpha_H: Tensor) -> Tensor:
    """:func:`rlkv.attention.mixed.mix`, which wants ``[rows, query heads, tokens, D]``, of ``[T, H * G, D]``."""
    return mix(full_TXD.transpose(0, 1)[None], local_TXD.transpose(0, 1)[None], alpha_H)[0].transpose(0, 1)


def _blocks(first: int, last: int, demand: SinkWindowDemand, everything: bool) -> Tensor:
    """Blocks of the keys that the queries at ``first`` to ``last`` see."""
    end = last // demand.block_size + 1
    if everything:
        return torch.arange(end)
    sinks = min(demand.full(demand.sink), end)
    window = max(sinks, (first - demand.window + 1) // demand.block_size)
    return torch.cat([torch.arange(sinks), torch.arange(window, end)])


def _reads(
    table_RC: Tensor, blocks_C: Tensor, token_RQ: Tensor, position_RQ: Tensor, demand: SinkWindowDemand, prompt: int = 0
) -> Reads:
    """The longest request comes last; column c of the table is the ``blocks_C[c]``-th block of a request."""
    slot_N = torch.arange(demand.block_size)
    column_K = (blocks_C[:, None] * demand.block_size + slot_N).flatten()
    end_R = position_RQ[:, -1]
    has_RC = blocks_C <= (end_R // demand.block_size)[:, None]
    # only in the last block of a request
    row, slot = (slot_N > (end_R % demand.block_size)[:, None]).nonzero(as_tuple=True)
    return Reads(
        token_RQ=token_RQ,
        # where a request has no block, the first one of the longest request: not seen, but every slot was written
        block_RC=torch.where(has_RC, table_RC, table_RC[-1, 0]).long(),
        column_K=column_K,
        position_RQ=position_RQ,
        demand=demand,
        prompt=prompt,
        unwritten=(row, has_RC.sum(1)[row] - 1, slot),
    )


def _attend(query_TXD: Tensor, cache: Tensor, reads: Reads, scale: float, out: Tensor) -> None:
    _, kv_heads, in_block, twice = cache.shape
    (rows, columns), size = reads.block_RC.shape, twice // 2
    states = _gather(cache, reads.block_RC)  # [R, H, C, N, 2 * D], a copy
    row, column, slot = reads.unwritten
    states[row, :, column, slot] = 0.0  # unwritten slots may hold anything, and 0 * NaN would be NaN
    states = states.view(rows, kv_heads, columns * in_block, twice).float()
    query = query_TXD[reads.token_RQ].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).float()  # [R, H, G, Q, D]
    group, queries = query.shape[2:4]
    seen = reads.seen()[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)  # [R, 1, G * Q, C * N]
    mixed = F.scaled_dot_product_attention(
        query.flatten(2, 3), states[..., :size], states[..., size:], attn_mask=seen, scale=scale
    )
    mixed = mixed.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    out[reads.token_RQ] = mixed.to(out.dtype)


def _gather(cache: Tensor, block_RC: Tensor) -> Tensor:
    """The blocks ``[R, H, C, N, 2 * D]`` of a cache, with one copy.

    The heads of a block lie one after the other, and so do the blocks, perhaps with other layers between them.
    """
    blocks, kv_heads, in_block, twice = cache.shape
    per_block = cache.stride(0) // cache.stride(1)
    assert cache.stride(0) % cache.stride(1) == 0
    assert cache.stride()[1:] == (in_block * twice, twice, 1)
    heads = cache.as_strided(((blocks - 1) * per_block + kv_heads, in_block, twice), (in_block * twice, twice, 1))
    index = block_RC[:, None] * per_block + torch.arange(kv_heads)[:, None]
    return heads.index_select(0, index.flatten()).view(*index.shape, in_block, twice)
