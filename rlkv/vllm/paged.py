"""Attention over entries in blocks, in plain torch: a decoding query reads the entries that it
sees, and no others.

Shapes: R requests, Q queries of each, K entries read for each request, T query tokens of all
requests one after the other, H KV heads, G query heads per KV head, D head size; cache ``[blocks,
H, N, 2 * D]``: N tokens a block, keys then values. A slot is a block's number times N plus the
place in the block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.triton_utils import tl, triton

from rlkv.attention.branches import grouped_attention
from rlkv.attention.mixed import mix
from rlkv.vllm.packing import SinkWindowDemand


@dataclass
class GapRules:
    """What a step's queries see of the first tokens, and how long tables without gaps get.

    ``longest``: tokens of the longest text; ``full_prefill``: prompts are read in full, and not
    kept.
    """

    demand: SinkWindowDemand
    longest: int
    full_prefill: bool = False

    def width(self, queries: int, prompt: int = 0) -> int:
        """Blocks that a request can need with this many queries in a step, and a prompt that is
        read in full in it.
        """
        demand = self.demand
        prefix = max(prompt, demand.prefix(self.longest))
        return demand.full(prefix) + demand.full(demand.window - 1 + queries) + 1

    def full_prompts(self, common: Any, vllm_config: Any) -> list[int] | None:
        """:func:`prompt_lengths` of a step's metadata; None unless it reads prompts in full."""
        return (
            prompt_lengths(common)
            if self.full_prefill and _reads_prompts(common, vllm_config)
            else None
        )

    def prefixes(self, common: Any, vllm_config: Any) -> Tensor | None:
        """First tokens that each request of a step sees, on either device; None: the sinks, of all."""
        if not self.demand.protect_prompt:
            return None
        _reads_prompts(common, vllm_config)
        # the first step of all states no lengths, and reads nothing but prompts
        prompt_R = common.seq_lens if common.rswa_prefix_lens is None else common.rswa_prefix_lens
        return prompt_R.clamp(min=self.demand.sink)


def _reads_prompts(common: Any, vllm_config: Any) -> bool:
    """Whether a step reads prompts; after the first one that does, the engine states the lengths of
    prompts.

    Not while decoding, nor in batches that the engine makes up while it starts.
    """
    if common.is_prefilling is None or not bool(common.is_prefilling.any()):
        return False
    # By this number the engine knows models that need prompt lengths, and states them from the next
    # step on. The first prompt comes when all stock layers and builders have read it, so that
    # nothing else changes.
    arch = vllm_config.model_config.model_arch_config
    if arch.rswa_window is None:
        arch.rswa_window = vllm_config.model_config.max_model_len
    return True


def prompt_lengths(common: Any) -> list[int]:
    """For each request of a step the length of its prompt, if the prompt is read in this step, else
    0.

    The first step of all states no prompt lengths: no request can have been preempted, so what it
    reads is a prompt. A preempted request is read again with what it has written, which must see no
    more than it did.
    """
    starts = common.query_start_loc_cpu.tolist()
    stated = None if common.rswa_prefix_lens is None else common.rswa_prefix_lens.tolist()
    found = []
    for row, length in enumerate(common.seq_lens_cpu_upper_bound.tolist()):
        queries = starts[row + 1] - starts[row]
        before = length - queries
        if queries == 0:
            found.append(0)
            continue
        prompt = stated[row] if stated is not None else length if before == 0 else 0
        if before < prompt and (before > 0 or queries < prompt):
            raise RuntimeError(
                f"rlkv: a prompt of {prompt:,} tokens is read in pieces ({before:,} and then "
                f"{queries:,} tokens): with "
                "prefill 'full' send whole prompts, not streamed ones; else please report this "
                "with the engine's "
                "settings"
            )
        found.append(prompt if before == 0 else 0)
    return found


class SteadyTables:
    """Tables without gaps at the same addresses in every step, as a captured CUDA graph needs them.

    Every builder has its own: the engine builds the metadata of all before it uses one.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The buffers' part for a table ``[rows, columns]`` and its lengths."""
        return self._table[:rows, :columns], self._lengths[:rows]


QUERIES_AT_ONCE = 128


class Piece(NamedTuple):
    """Queries of the request ``row`` up to the place ``end`` of the step, from where the piece
    before ends.

    ``prompt``: the piece is a whole prompt of so many tokens, each of which sees everything before
    it; else 0.
    """

    row: int
    end: int
    prompt: int

    @property
    def reads_cache(self) -> bool:
        return self.prompt <= QUERIES_AT_ONCE


def cut_step(starts: list[int], prompts: list[int] | None = None) -> list[Piece]:
    """Pieces of the requests ``starts[r] <= t < starts[r + 1]``, in their order, of at most
    ``QUERIES_AT_ONCE`` queries where they read the cache.

    ``prompts``: how many first tokens of each are a prompt that this step reads in full.
    """
    pieces = []
    for row, (first, end) in enumerate(pairwise(starts)):
        prompt = prompts[row] if prompts else 0
        if prompt:
            pieces.append(Piece(row, first + prompt, prompt))
        pieces += [
            Piece(row, min(at + QUERIES_AT_ONCE, end), 0)
            for at in range(first + prompt, end, QUERIES_AT_ONCE)
        ]
    return pieces


def whole_prompts(starts: list[int], prompts: list[int] | None) -> list[slice]:
    """Queries of the step's prompts that need no cache; arguments as of :func:`cut_step`."""
    return [
        slice(first, first + prompt)
        for first, prompt in zip(starts, prompts or (), strict=False)
        if prompt > QUERIES_AT_ONCE
    ]


ROWS_AT_ONCE = 64  # of decoding requests
EVERYTHING = 2**31  # a window that no text exceeds


def _entries(cache: Tensor) -> Tensor:
    """All entries from the first one of a cache on, ``[entries, 2 * D]``.

    Those of other layers may lie between.
    """
    blocks, heads, in_block, twice = cache.shape
    assert cache.stride()[1:] == (in_block * twice, twice, 1)
    entries = (blocks - 1) * (cache.stride(0) // twice) + heads * in_block
    return cache.as_strided((entries, twice), (twice, 1))


@dataclass
class Places:
    """Slots ``[..., n]`` of a step among the entries of the layers' caches, which differ in their
    heads.
    """

    slots: Tensor
    _of_first_head: Tensor | None = None
    _of_heads: dict[int, Tensor] = field(default_factory=dict)

    def among(self, cache: Tensor) -> Tensor:
        """Their numbers among these entries, int64 ``[..., H, n]``: made once for each number of
        heads.
        """
        _, heads, in_block, twice = cache.shape
        if heads not in self._of_heads:
            if self._of_first_head is None:
                assert cache.stride(0) % twice == 0
                self._of_first_head = (
                    self.slots // in_block * (cache.stride(0) // twice) + self.slots % in_block
                )
            self._of_heads[heads] = (
                self._of_first_head[..., None, :] + torch.arange(heads)[:, None] * in_block
            )
        return self._of_heads[heads]


@dataclass
class Writes:
    """Slots ``[n]`` that are written, none of them padding; made once for all layers of a bin.

    ``kept``: which tokens of the step have one, bool; None: the first n.
    """

    places: Places
    kept: Tensor | None = None

    @staticmethod
    def of(slots_T: Tensor) -> Writes:
        """Of a step whose token t has the slot ``slots_T[t]``; below 0: padding, as further tokens
        are.
        """
        kept = slots_T >= 0
        return Writes(Places(slots_T)) if bool(kept.all()) else Writes(Places(slots_T[kept]), kept)

    def store(self, key_THD: Tensor, value_THD: Tensor, cache: Tensor) -> None:
        """Put the step's tokens into their slots."""
        tokens = len(self.places.slots if self.kept is None else self.kept)
        states_THC = torch.cat([key_THD[:tokens], value_THD[:tokens]], -1)
        self.write(states_THC if self.kept is None else states_THC[self.kept], cache)

    def write(self, states_NHC: Tensor, cache: Tensor) -> None:
        """Put entry n, ``[H, 2 * D]``, into slot n of the cache."""
        _entries(cache)[self.places.among(cache)] = states_NHC.to(cache.dtype).transpose(0, 1)


@dataclass
class Reads:
    """Queries that are computed together, and the entries that they read.

    Made once for all layers of a bin.

    Attributes:
        tokens: the queries, by their place in the step: R * Q in a row, or int64 ``[R * Q]``.
        places_RK: the entries; all of them were written.
        position_RQ, column_RK: positions of queries and entries in their text.
        prefix_R: first tokens that the queries see, int64; window: last tokens.
    """

    tokens: slice | Tensor
    places_RK: Places
    position_RQ: Tensor
    column_RK: Tensor
    prefix_R: Tensor
    window: int
    _mask: tuple[Tensor | None] | None = None

    def mask(self) -> Tensor | None:
        """Which entries each query sees, bool ``[R, Q, K]``; None: all."""
        if self._mask is not None:
            return self._mask[0]
        column_RQK = self.column_RK[:, None]
        distance = self.position_RQ[:, :, None] - column_RQK
        kept = (column_RQK < self.prefix_R[:, None, None]) | (distance < self.window)
        seen = (distance >= 0) & (column_RQK >= 0) & kept
        mask = None if bool(seen.all()) else seen
        if self.position_RQ.shape[1] == 1:  # the masks of a long prompt, all together, may be large
            self._mask = (mask,)
        return mask


def plan_reads(
    table_RC: Tensor,
    starts: list[int],
    lengths: list[int],
    demand: SinkWindowDemand,
    prompts: list[int] | None = None,
    prefixes: list[int] | None = None,
) -> list[Reads]:
    """What the queries ``starts[r] <= t < starts[r + 1]`` of requests with ``lengths`` tokens read.

    ``table_RC``: blocks of each request; ``prompts``: as of :func:`cut_step`, whose
    :func:`whole_prompts` are left out; ``prefixes``: first tokens that each request sees, by
    default the sinks.
    """
    pieces = cut_step(starts, prompts)
    begins = [0, *(piece.end for piece in pieces)]
    decoding, found = [], []
    for begin, piece in zip(begins, pieces, strict=False):
        row, end, prompt = piece
        if not piece.reads_cache:
            continue
        last = lengths[row] - 1 - (starts[row + 1] - end)  # the position of its last query
        prefix = max(prompt, prefixes[row] if prefixes else demand.sink)
        if end - begin == 1:
            decoding.append((begin, row, last, prefix))
            continue
        position_Q = torch.arange(last + 1 - (end - begin), last + 1)
        first = max(min(prefix, last + 1), int(position_Q[0]) - demand.window + 1)
        column_K = torch.cat([torch.arange(min(prefix, last + 1)), torch.arange(first, last + 1)])
        slots_K = (
            table_RC[row][column_K // demand.block_size].long() * demand.block_size
            + column_K % demand.block_size
        )
        places, prefix_R = slice(begin, end), torch.tensor([prefix])
        found.append(
            Reads(
                places,
                Places(slots_K[None]),
                position_Q[None],
                column_K[None],
                prefix_R,
                demand.window,
            )
        )
    if len(decoding) > ROWS_AT_ONCE:  # rows of about the same length together
        decoding.sort(key=itemgetter(2))
    return found + [
        _decoding_reads(table_RC, decoding[first : first + ROWS_AT_ONCE], demand)
        for first in range(0, len(decoding), ROWS_AT_ONCE)
    ]


def _decoding_reads(
    table_RC: Tensor, rows: list[tuple[int, int, int, int]], demand: SinkWindowDemand
) -> Reads:
    """Of single queries ``(place, request, position, prefix)``.

    Where one sees fewer entries than another, it reads its own.
    """
    token_R, row_R, position_R, prefix_R = torch.tensor(rows).unbind(1)
    first, position_R1, prefix_R1 = rows[0][0], position_R[:, None], prefix_R[:, None]
    in_a_row = all(row[0] == first + n for n, row in enumerate(rows))
    positions, prefixes = [row[2] for row in rows], [row[3] for row in rows]
    longest, prefix = max(positions) + 1, max(prefixes)
    window = min(demand.window, longest)
    moving_RK = position_R1 - torch.arange(window - 1, -1, -1)
    first_RK = torch.arange(min(prefix, longest)).expand(len(rows), -1)
    column_RK = read_RK = torch.cat([first_RK, moving_RK], 1)
    sees_all = min(prefixes) == prefix <= min(positions) + 1 - demand.window
    if not sees_all:  # an entry of both is read among the first ones
        unseen_RK = torch.cat([first_RK >= prefix_R1, moving_RK < prefix_R1], 1) | (
            column_RK > position_R1
        )
        column_RK, read_RK = (
            column_RK.masked_fill(unseen_RK, -1),
            torch.where(unseen_RK, position_R1, column_RK),
        )
    block_RK = table_RC[row_R].gather(1, read_RK // demand.block_size).long()
    return Reads(
        slice(first, first + len(rows)) if in_a_row else token_R,
        Places(block_RK * demand.block_size + read_RK % demand.block_size),
        position_R1,
        column_RK,
        prefix_R,
        demand.window,
        (None,) if sees_all else None,
    )


def paged_local_attention(
    query_TXD: Tensor, cache: Tensor, reads: list[Reads], scale: float, out: Tensor
) -> None:
    """Fill ``out`` from queries, both ``[T, H * G, D]``, query heads of a group side by side.

    Scores are float32.
    """
    for part in reads:
        _attend(query_TXD, cache, part, scale, out)


def _attend(query_TXD: Tensor, cache: Tensor, reads: Reads, scale: float, out: Tensor) -> None:
    kv_heads, size = cache.shape[1], cache.shape[3] // 2
    queries = reads.position_RQ.shape[1]
    index = reads.places_RK.among(cache)  # [R, H, K]
    states = _entries(cache).index_select(0, index.flatten()).view(*index.shape, 2 * size).float()
    query = query_TXD[reads.tokens].unflatten(1, (kv_heads, -1)).float()  # [R * Q, H, G, D]
    group, mask = query.shape[2], reads.mask()
    if queries > 1:  # one request: [1, H, G * Q, D]
        query = query.permute(1, 2, 0, 3).flatten(1, 2)[None]
    if mask is not None:  # [R, 1, G * Q, K]
        mask = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(
        query, states[..., :size], states[..., size:], attn_mask=mask, scale=scale
    )
    if queries > 1:
        mixed = mixed[0].unflatten(1, (group, queries)).permute(2, 0, 1, 3)
    out[reads.tokens] = mixed.flatten(1, 2).to(out.dtype)


def attend_prompts(
    query_TXD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    prompts: list[slice],
    scale: float,
    out: Tensor,
) -> None:
    """Fill ``out`` for queries that see everything before them in their own slice of the step, and
    no cache.

    Torch's fused attention reads half of the square.
    """
    for places in prompts:
        query, key, value = (
            tensor[places].transpose(0, 1)[None] for tensor in (query_TXD, key_THD, value_THD)
        )
        mixed = grouped_attention(query, key, value, None, causal=True, scale=scale)
        out[places] = mixed[0].transpose(0, 1).to(out.dtype)


MixedReads = tuple[list[Reads], list[Reads]]  # of the full and of the local branch


def plan_mixed_reads(
    table_RC: Tensor, starts: Tensor, lengths_R: Tensor, demand: SinkWindowDemand
) -> MixedReads:
    """What a step reads; arguments as of :func:`plan_reads`."""
    everything = SinkWindowDemand(demand.block_size, 0, EVERYTHING)
    begins, lengths = starts.tolist(), lengths_R.tolist()
    return plan_reads(table_RC, begins, lengths, everything), plan_reads(
        table_RC, begins, lengths, demand
    )


def paged_mixed_attention(
    query_TXD: Tensor, cache: Tensor, reads: MixedReads, alpha_H: Tensor, scale: float, out: Tensor
) -> None:
    """As :func:`paged_local_attention`:

    ``alpha * full + (1 - alpha) * local`` per KV head, mixed in float32.
    """
    branches = torch.zeros(2, *query_TXD.shape)
    for own, branch in zip(reads, branches, strict=True):
        paged_local_attention(query_TXD, cache, own, scale, branch)
    out.copy_(mix_tokens(branches[0], branches[1], alpha_H))


def mix_tokens(full_TXD: Tensor, local_TXD: Tensor, alpha_H: Tensor) -> Tensor:
    """:func:`rlkv.attention.mixed.mix`, which wants ``[rows, query heads, tokens, D]``, of ``[T, H
    * G, D]``.
    """
    return mix(full_TXD.transpose(0, 1)[None], local_TXD.transpose(0, 1)[None], alpha_H)[
        0
    ].transpose(0, 1)


TILE = 128  # columns at once


@triton.jit
def _cut_gaps(
    table: Any,
    lengths: Any,
    starts: Any,
    prefixes: Any,
    out_table: Any,
    out_lengths: Any,
    columns: Any,
    width: Any,
    stride: Any,
    out_stride: Any,
    window: Any,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    queries = tl.load(starts + row + 1) - tl.load(starts + row)
    sinks = (tl.load(prefixes + row) + BLOCK_SIZE - 1) // BLOCK_SIZE
    # below 0, where division rounds to 0 and not down, there is no gap in either case
    gap = tl.maximum((length - queries - window + 1) // BLOCK_SIZE - sinks, 0)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        source = tl.minimum(column + tl.where(column < sinks, 0, gap), columns - 1)
        block = tl.load(table + row.to(tl.int64) * stride + source, mask=column < width)
        tl.store(out_table + row.to(tl.int64) * out_stride + column, block, mask=column < width)
    tl.store(out_lengths + row, length - gap * BLOCK_SIZE)


def cut_gaps(
    table_RM: Tensor,
    lengths_R: Tensor,
    starts: Tensor,
    prefix_R: Tensor,
    block_size: int,
    window: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """Cut the gaps out of a step's block tables ``table_RM`` and lengths, into ``out``.

    All tensors are int32.

    Args:
        lengths_R: tokens of each request, those of this step included.
        starts: ``[R + 1]``, the first query of each.
        prefix_R: the first tokens that it sees.
        out: the table ``[R, width]``, with no more columns than ``table_RM``, and the lengths
            ``[R]``.
    """
    table, shorter = out
    rows, width = table.shape
    if not rows:
        return
    with torch.cuda.device_of(table):  # Triton launches on the current device
        _cut_gaps[(rows,)](
            table_RM,
            lengths_R,
            starts,
            prefix_R,
            table,
            shorter,
            table_RM.shape[1],
            width,
            table_RM.stride(0),
            table.stride(0),
            window,
            BLOCK_SIZE=block_size,
            TILE=TILE,
        )
