"""Requests of a step with random states in scattered blocks; what was never written is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import Writes


class Scattered:
    """A cache ``[blocks, H, N, 2 * D]`` and what a step says about it.

    Attributes:
        table, starts, lengths: int32, of the requests.
        states: query ``[T, H * G, D]``, key and value ``[T, H, D]`` of each request's whole text.
        step: the same of the step's tokens.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        demand: SinkWindowDemand,
        heads: tuple[int, int],
        size: int,
        prompts: Sequence[int] | None = None,
        unwritten: Sequence[int] = (),
    ) -> None:
        """Draw the states, the same for the same arguments.

        Args:
            requests: queries and tokens of each.
            heads: query heads, KV heads.
            prompts: tokens of their prompts, where blocks of gaps are given back by now (and a kept
                prompt of ``demand`` is not); None: all blocks are held.
            unwritten: numbers of requests whose blocks stay NaN.
        """
        generator = torch.Generator().manual_seed(len(requests))
        block = demand.block_size
        counts = [demand.full(length) for _, length in requests]
        free = torch.randperm(sum(counts), generator=generator) + 1  # 0 is the null block
        self.cache = torch.full((sum(counts) + 1, heads[1], block, 2 * size), float("nan"))
        self.table = torch.zeros(len(requests), max(counts) + 2, dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        self.starts = torch.tensor([0] + [n for n, _ in requests]).cumsum(0).int()
        self.states = []
        for row, (queries, length) in enumerate(requests):
            shapes = [(length, number, size) for number in (heads[0], heads[1], heads[1])]
            own = [torch.randn(shape, generator=generator) for shape in shapes]
            self.states.append(own)
            blocks = free.split(counts)[row].clone()
            if row not in unwritten:
                order = torch.arange(length)
                slots = blocks[order // block] * block + order % block
                Writes.of(slots).store(own[1], own[2], self.cache)
            if prompts is not None:
                outside = max(0, length - queries - demand.window + 1) // block
                kept = demand.full(demand.prefix(prompts[row]))
                blocks[kept : max(outside, kept)] = 0
            self.table[row, : counts[row]] = blocks
        self.step = []
        for kind in range(3):
            own = [states[kind][-n:] for (n, _), states in zip(requests, self.states, strict=True)]
            self.step.append(torch.cat(own))
