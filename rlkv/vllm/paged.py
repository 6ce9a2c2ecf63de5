"""Attention over entries in blocks in plain torch, and what block tables without gaps hold.

A decoding query reads the entries that it sees, and no others.

Shapes: R requests, Q queries of each, K entries read for each request, T query tokens of all
requests one after the other, H KV heads, G query heads per KV head, D head size; cache ``[blocks,
H, N, 2 * D]``: N tokens a block, keys then values. A slot is a block's number times N plus the
place in the block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkv.attention.branches import grouped_attention
from rlkv.attention.mixed import mix
from rlkv.attention.softmax import Softmax
from rlkv.vllm.packing import SinkWindowDemand


@dataclass
class GapRules:
    """Rules of what a step's queries see of the first tokens, and of tables without gaps.

    Attributes:
        demand: what is kept.
        longest: tokens of the longest text.
        full_prefill: whether prompts are read in full, and not kept.
        aligned: whether a query sees whole blocks (:mod:`rlkv.vllm.aligned`).
    """

    demand: SinkWindowDemand
    longest: int
    full_prefill: bool = False
    aligned: bool = False

    def width(self, queries: int, prompt: int = 0) -> int:
        """Return the blocks that a request can need with so many queries in a step.

        prompt: tokens of a prompt that the step reads in full.
        """
        demand = self.demand
        prefix = max(prompt, demand.prefix(self.longest))
        return demand.full(prefix) + demand.full(demand.window - 1 + queries) + 1

    def full_prompts(self, common: Any, vllm_config: Any) -> list[int] | None:
        """Return :func:`prompt_lengths` of a step; None unless it reads prompts in full."""
        if self.full_prefill and _reads_prompts(common, vllm_config):
            return prompt_lengths(common)
        return None

    def prefixes(self, common: Any, vllm_config: Any) -> Tensor | None:
        """Return the first tokens that each request sees, on either device; None: the sinks."""
        if not self.demand.protect_prompt:
            return None
        _reads_prompts(common, vllm_config)
        # the first step of all states no lengths, and reads nothing but prompts
        prompt_R = common.seq_lens if common.rswa_prefix_lens is None else common.rswa_prefix_lens
        return prompt_R.clamp(min=self.demand.sink)


def _reads_prompts(common: Any, vllm_config: Any) -> bool:
    """Return whether a step reads prompts; after the first such step the engine states lengths.

    Steps that decode do not, nor batches that the engine makes up while it starts.
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
    """Return the length of each request's prompt, or 0 if the step does not read the prompt.

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
                f"{queries:,} tokens): with prefill 'full' send whole prompts, not streamed ones; "
                "else please report this with the engine's settings"
            )
        found.append(prompt if before == 0 else 0)
    return found


QUERIES_AT_ONCE = 128


class Piece(NamedTuple):
    """Queries of a request that are computed together.

    Attributes:
        row: the request.
        end: the place in the step where the piece ends; it begins where the one before ends.
        prompt: tokens of a whole prompt, each of which sees everything before it; 0: other queries.
    """

    row: int
    end: int
    prompt: int

    @property
    def reads_cache(self) -> bool:
        return self.prompt <= QUERIES_AT_ONCE


def cut_step(starts: list[int], prompts: list[int] | None = None) -> list[Piece]:
    """Cut requests into pieces of at most ``QUERIES_AT_ONCE`` queries, if they read the cache.

    Args:
        starts: request r has the queries ``starts[r] <= t < starts[r + 1]``.
        prompts: how many first tokens of each are a prompt that this step reads in full.
    """
    pieces = []
    for row, (first, end) in enumerate(pairwise(starts)):
        prompt = prompts[row] if prompts else 0
        if prompt:
            pieces.append(Piece(row, first + prompt, prompt))
        for at in range(first + prompt, end, QUERIES_AT_ONCE):
            pieces.append(Piece(row, min(at + QUERIES_AT_ONCE, end), 0))
    return pieces


def whole_prompts(starts: list[int], prompts: list[int] | None) -> list[slice]:
    """Return the queries of prompts that need no cache; arguments as of :func:`cut_step`."""
    found = []
    for piece in cut_step(starts, prompts):
        if not piece.reads_cache:
            found.append(slice(piece.end - piece.prompt, piece.end))
    return found


ROWS_AT_ONCE = 64  # of decoding requests
EVERYTHING = 2**31  # a window that no text exceeds


def _entries(cache: Tensor) -> Tensor:
    """View a cache as entries ``[entries, 2 * D]``, among which those of other layers may lie."""
    blocks, heads, in_block, twice = cache.shape
    assert cache.stride()[1:] == (in_block * twice, twice, 1)
    entries = (blocks - 1) * (cache.stride(0) // twice) + heads * in_block
    return cache.as_strided((entries, twice), (twice, 1))


@dataclass
class Places:
    """Slots ``[..., n]`` among the entries of the layers' caches, which differ in their heads."""

    slots: Tensor
    _of_heads: dict[int, Tensor] = field(default_factory=dict)

    def among(self, cache: Tensor) -> Tensor:
        """Return numbers of a cache's entries, int64 ``[..., H, n]``, made once for each H."""
        _, heads, in_block, twice = cache.shape
        if heads not in self._of_heads:
            assert cache.stride(0) % twice == 0
            block = self.slots // in_block
            of_first_head = block * (cache.stride(0) // twice) + self.slots % in_block
            head = torch.arange(heads)[:, None]
            self._of_heads[heads] = of_first_head[..., None, :] + head * in_block
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
        """Plan to write token t to slot ``slots_T[t]``; below 0: padding, as are later tokens."""
        kept = slots_T >= 0
        if bool(kept.all()):
            return Writes(Places(slots_T))
        return Writes(Places(slots_T[kept]), kept)

    def store(self, key_THD: Tensor, value_THD: Tensor, cache: Tensor) -> None:
        """Put the step's tokens into their slots."""
        tokens = len(self.places.slots if self.kept is None else self.kept)
        states_THC = torch.cat([key_THD[:tokens], value_THD[:tokens]], -1)
        if self.kept is not None:
            states_THC = states_THC[self.kept]
        _entries(cache)[self.places.among(cache)] = states_THC.to(cache.dtype).transpose(0, 1)


@dataclass
class Reads:
    """Queries that are computed together, and the entries that they read, for all layers of a bin.

    Attributes:
        tokens: the queries, R * Q, by their place in the step: a slice, or int64.
        places_RK: the entries; all of them were written.
        position_RQ, column_RK: positions of queries and entries in their text.
        prefix_R: first tokens that the queries see, int64.
        window: last tokens that they see.
    """

    tokens: slice | Tensor
    places_RK: Places
    position_RQ: Tensor
    column_RK: Tensor
    prefix_R: Tensor
    window: int

    def mask(self) -> Tensor | None:
        """Mask of the entries that each query sees, bool ``[R, Q, K]``; None: all.

        Kept for the layers of a step for decoding queries alone: the masks of a long prompt, all
        together, may be large.
        """
        return self._decoding_mask if self.position_RQ.shape[1] == 1 else self._make_mask()

    @cached_property
    def _decoding_mask(self) -> Tensor | None:
        return self._make_mask()

    def _make_mask(self) -> Tensor | None:
        column_RQK = self.column_RK[:, None]
        distance = self.position_RQ[:, :, None] - column_RQK
        kept = (column_RQK < self.prefix_R[:, None, None]) | (distance < self.window)
        seen = (distance >= 0) & (column_RQK >= 0) & kept
        return None if bool(seen.all()) else seen


def plan_reads(
    table_RC: Tensor,
    starts: list[int],
    lengths: list[int],
    demand: SinkWindowDemand,
    prompts: list[int] | None = None,
    prefixes: list[int] | None = None,
) -> list[Reads]:
    """Plan what the queries of a step read.

    Args:
        table_RC: blocks of each request.
        starts, prompts: as of :func:`cut_step`; :func:`whole_prompts` are left out.
        lengths: tokens of each request.
        prefixes: first tokens that each request sees, by default the sinks.
    """
    decoding = []
    found = []
    end = 0
    for piece in cut_step(starts, prompts):
        begin = end
        row, end, prompt = piece
        if not piece.reads_cache:
            continue
        last = lengths[row] - 1 - (starts[row + 1] - end)  # the position of its last query
        prefix = max(prompt, prefixes[row] if prefixes else demand.sink)
        if end - begin == 1:
            decoding.append((begin, row, last, prefix))
        else:
            found.append(_reads(table_RC, [(begin, row, last, prefix)], end - begin, demand))
    if len(decoding) > ROWS_AT_ONCE:  # rows of about the same length together
        decoding.sort(key=itemgetter(2))
    for at in range(0, len(decoding), ROWS_AT_ONCE):
        found.append(_reads(table_RC, decoding[at : at + ROWS_AT_ONCE], 1, demand))
    return found


def _reads(
    table_RC: Tensor, rows: list[tuple[int, int, int, int]], queries: int, demand: SinkWindowDemand
) -> Reads:
    """Plan what rows ``(place of the first query, request, position of the last, prefix)`` read.

    Where one sees fewer entries than another, it reads its own.
    """
    token_R1, row_R1, last_R1, prefix_R1 = torch.tensor(rows)[:, :, None].unbind(1)
    longest = int(last_R1.max()) + 1
    window = min(demand.window - 1 + queries, longest)
    moving_RK = last_R1 - torch.arange(window - 1, -1, -1)
    first_RK = torch.arange(min(int(prefix_R1.max()), longest)).expand(len(rows), -1)
    column_RK = torch.cat([first_RK, moving_RK], 1)
    # an entry of both is read among the first ones
    unseen_RK = torch.cat([first_RK >= prefix_R1, moving_RK < prefix_R1], 1)
    unseen_RK |= column_RK > last_R1
    read_RK = torch.where(unseen_RK, last_R1, column_RK)
    block_RK = table_RC[row_R1[:, 0]].gather(1, read_RK // demand.block_size).long()
    query_Q = torch.arange(queries)
    token_T = (token_R1 + query_Q).flatten()
    first = rows[0][0]
    end = first + len(token_T)
    in_a_row = token_T.tolist() == list(range(first, end))
    return Reads(
        tokens=slice(first, end) if in_a_row else token_T,  # a slice copies nothing
        places_RK=Places(block_RK * demand.block_size + read_RK % demand.block_size),
        position_RQ=last_R1 + 1 - queries + query_Q,
        column_RK=column_RK.masked_fill(unseen_RK, -1),
        prefix_R=prefix_R1[:, 0],
        window=demand.window,
    )


def paged_local_attention(
    query_TXD: Tensor, cache: Tensor, reads: list[Reads], softmax: Softmax, out: Tensor
) -> None:
    """Fill ``out`` from queries, both ``[T, H * G, D]``, query heads of a group side by side.

    Scores are float32.
    """
    kv_heads = cache.shape[1]
    for part in reads:
        rows, queries = part.position_RQ.shape
        index = part.places_RK.among(cache)  # [R, H, K]
        states = _entries(cache).index_select(0, index.flatten()).view(*index.shape, -1).float()
        query = query_TXD[part.tokens].float().view(rows, queries, kv_heads, -1, out.shape[2])
        query = query.permute(0, 2, 3, 1, 4)  # [R, H, G, Q, D]
        group = query.shape[2]
        mask = part.mask()
        if mask is not None:  # [R, 1, G * Q, K]
            mask = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
        key, value = states.chunk(2, -1)
        mixed = softmax.attend(query.flatten(2, 3), key, value, mask)
        mixed = mixed.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
        out[part.tokens] = mixed.reshape(rows * queries, -1, out.shape[2]).to(out.dtype)


def attend_prompts(
    query_TXD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    prompts: list[slice],
    softmax: Softmax,
    out: Tensor,
) -> None:
    """Fill ``out`` for prompts, which see everything before them in their slice, and no cache.

    Torch's fused attention reads half of the square.
    """
    for places in prompts:
        query = query_TXD[places].transpose(0, 1)[None]
        key = key_THD[places].transpose(0, 1)[None]
        value = value_THD[places].transpose(0, 1)[None]
        mixed = grouped_attention(query, key, value, None, causal=True, softmax=softmax)
        out[places] = mixed[0].transpose(0, 1).to(out.dtype)


# of the full and of the local branch
MixedReads = tuple[list[Reads], list[Reads]]


def plan_mixed_reads(
    table_RC: Tensor, starts: Tensor, lengths_R: Tensor, demand: SinkWindowDemand
) -> MixedReads:
    """Plan what a step's branches read; arguments as of :func:`plan_reads`."""
    begins = starts.tolist()
    lengths = lengths_R.tolist()
    everything = SinkWindowDemand(demand.block_size, 0, EVERYTHING)
    full = plan_reads(table_RC, begins, lengths, everything)
    return full, plan_reads(table_RC, begins, lengths, demand)


def paged_mixed_attention(
    query_TXD: Tensor,
    cache: Tensor,
    reads: MixedReads,
    alpha_H: Tensor,
    softmax: Softmax,
    out: Tensor,
) -> None:
    """Fill ``out`` with ``alpha * full + (1 - alpha) * local`` per KV head, mixed in float32.

    Arguments as of :func:`paged_local_attention`.
    """
    branches = torch.zeros(2, *query_TXD.shape)
    for own, branch in zip(reads, branches, strict=True):
        paged_local_attention(query_TXD, cache, own, softmax, branch)
    out.copy_(mix_tokens(branches[0], branches[1], alpha_H))


def mix_tokens(full_TXD: Tensor, local_TXD: Tensor, alpha_H: Tensor) -> Tensor:
    """Mix outputs ``[T, H * G, D]`` (:func:`rlkv.attention.mixed.mix`, which has rows first)."""
    full = full_TXD.transpose(0, 1)[None]
    local = local_TXD.transpose(0, 1)[None]
    return mix(full, local, alpha_H)[0].transpose(0, 1)
