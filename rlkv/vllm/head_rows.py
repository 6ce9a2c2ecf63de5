"""Heads as sequences: one launch of the stock CPU kernel for heads that read by different tables.

A block of a cache is pages side by side, one for each of its heads.  So R sequences of H heads are
R * H sequences of one head, each with its own length and table of pages, and the kernel does not
know that some of them are of one request.

Shapes: K kinds of tables, L layers, R requests, H KV heads of a layer, G query heads for each, D
head size, T tokens of a step, C columns of a table, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm import _custom_ops as ops
from vllm import envs

from rlkv.vllm.check import Row
from rlkv.vllm.settings import CHECK


class HeadRows(NamedTuple):
    """Sequences of a layer: tables of pages, lengths, starts and the kernel's schedule."""

    table: Tensor
    lengths: Tensor
    starts: Tensor
    schedule: Tensor


class HeadPlace(NamedTuple):
    """Place of a head's entries: its kind of tables, and its page of a block."""

    kind: int
    page: int


Places = tuple[HeadPlace, ...]  # of a layer's heads


class Kernel(NamedTuple):
    """Properties of caches and queries that the kernel asks for; ``block_size``: N."""

    head_size: int
    dtype: torch.dtype
    isa: str
    kv_cache_dtype: str
    block_size: int


@dataclass(frozen=True)
class HeadLayers:
    """Layers with the same number of heads; ``pages`` of a block, ``group_size`` G."""

    layers: Sequence[Places]
    pages: int
    kernel: Kernel
    group_size: int

    @cached_property
    def numbers(self) -> Tensor:
        """Kinds and pages, int64 ``[L, H, 2]``."""
        return torch.tensor(self.layers)

    def schedule(self, lengths: Tensor, starts: Tensor) -> Tensor:
        """Let the kernel plan its work."""
        kernel = self.kernel
        schedule: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.group_size,
            num_kv_heads=1,
            head_dim=kernel.head_size,
            seq_lens=lengths,
            dtype=kernel.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=kernel.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=kernel.kv_cache_dtype,
        )
        return schedule


def split_pages(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Split a cache ``[pages, 1, 2 * N, D]`` into keys and values ``[pages, 1, N, D]``."""
    keys, values = pages.chunk(2, 2)
    return keys, values


@dataclass
class StepRows:
    """The rows of a step, made for a layer when it first asks.

    Attributes:
        kinds: stock metadata with the step's tables.
        schedules: by the kinds of a layer's heads.
    """

    of: HeadLayers
    kinds: Sequence[Any]
    made: dict[Places, HeadRows] = field(default_factory=dict)
    schedules: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        """True if every request has one query."""
        return bool(self.kinds[0].max_query_len == 1)

    def rows(self, places: Places) -> HeadRows:
        """Return the rows of a layer.

        In a step of decoding the heads of a request are neighbours, as its queries are; else the
        requests of a head.
        """
        if self.decoding and not self.made:
            self._decode()
        if places not in self.made:
            self._make(places, *self._sequences(places))
        return self.made[places]

    def _make(self, places: Places, table: Tensor, lengths: Tensor, starts: Tensor) -> None:
        kinds = tuple(place.kind for place in places)  # from which lengths follow, pages do not
        if kinds not in self.schedules:
            self.schedules[kinds] = self.of.schedule(lengths, starts)
        self.made[places] = HeadRows(table, lengths, starts, self.schedules[kinds])

    def _tables(self) -> list[Tensor]:
        """Return the first pages of each kind's blocks, equally wide."""
        size = self.of.kernel.block_size
        tables = []
        for kind in self.kinds:
            # the engine's tables are as wide as its longest text
            columns = min(kind.block_table.shape[1], -(-kind.max_seq_len // size))
            tables.append(kind.block_table[:, :columns] * self.of.pages)
        widest = max(table.shape[1] for table in tables)
        return [pad(table, (0, widest - table.shape[1])) for table in tables]

    def _decode(self) -> None:
        """Make the rows of all layers in a step of decoding, together: it is a short one."""
        kind_LH, page_LH = self.of.numbers.unbind(-1)
        table_KRC = torch.stack(self._tables())
        length_KR = torch.stack([kind.seq_lens for kind in self.kinds])
        table_LRHC = table_KRC[kind_LH].transpose(1, 2)
        table_LRHC = table_LRHC + page_LH[:, None, :, None].int()
        length_LRH = length_KR[kind_LH].transpose(1, 2)
        starts = torch.arange(length_LRH[0].numel() + 1, dtype=torch.int32)
        tables = table_LRHC.flatten(1, 2)
        lengths = length_LRH.flatten(1)
        for number, places in enumerate(self.of.layers):
            self._make(places, tables[number], lengths[number], starts)

    def _sequences(self, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Return pages, lengths and starts of all heads' sequences, head by head."""
        tables = self._tables()
        rows = []
        lengths = []
        counts = []
        for place in places:
            rows.append(tables[place.kind] + place.page)
            lengths.append(self.kinds[place.kind].seq_lens)
            counts.append(self.kinds[place.kind].query_start_loc.diff())
        starts = pad(torch.cat(counts).cumsum(0), (1, 0)).int()
        return torch.cat(rows), torch.cat(lengths), starts

    def attend(
        self,
        layer: Any,
        places: Places,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        scale: float,
        output: Tensor,
    ) -> None:
        """Write the attention of a layer's queries.

        Args:
            layer: the engine's, for the scales of a quantised cache.
            query: ``[T, H * G, D]``; the output likewise, or ``[T, H * G * D]``, contiguous.
            cache: keys and values, of :func:`split_pages`.
        """
        tokens = self.kinds[0].num_actual_tokens
        rows = self.rows(places)
        keys, values = cache
        own = query[:tokens].view(tokens, len(places), -1, query.shape[-1])
        if not self.decoding:
            own = own.transpose(0, 1)
        own = own.contiguous()
        direct = output[:tokens].view(tokens, len(places), -1, query.shape[-1])
        out = direct if self.decoding else torch.empty_like(own)
        ops.cpu_attention_with_kv_cache(
            query=own.view(-1, *own.shape[2:]),
            key_cache=keys,
            value_cache=values,
            output=out.view(-1, *out.shape[2:]),
            query_start_loc=rows.starts,
            seq_lens=rows.lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=rows.table,
            softcap=0,
            scheduler_metadata=rows.schedule,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.of.kernel.kv_cache_dtype,
        )
        if not self.decoding:
            direct.copy_(out.transpose(0, 1))

    def handed(self, places: Places, head: int) -> Iterator[Row]:
        """Yield what the kernel reads for the queries of a head: slots of its blocks."""
        size = self.of.kernel.block_size
        tokens = self.kinds[0].num_actual_tokens
        heads = len(places)
        own = self.made[places]
        first = head * tokens
        for number, (start, end) in enumerate(pairwise(own.starts.tolist())):
            if self.decoding:
                if number % heads != head:
                    continue
                queries = range(number // heads, number // heads + 1)
            elif first <= start < first + tokens:
                queries = range(start - first, end - first)
            else:
                continue
            length = int(own.lengths[number])
            place = torch.arange(length)
            page = own.table[number][place // size].long()
            if (page % self.of.pages != places[head].page).any():
                raise RuntimeError(f"rlkv: {CHECK}: head {head} is handed a page of another one")
            slots = page // self.of.pages * size + place % size
            for query in queries:
                yield Row(query, slots[: length - (queries[-1] - query)])
