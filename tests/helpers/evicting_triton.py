"""The CUDA path of eviction on a CPU, through the Triton interpreter.

Three requests are read in chunks and decoded, with several evictions, by the torch path and twice
by the builder and the implementation of the CUDA path, each over a cache of its own, NaN where
nothing was written. The second one decodes as a captured graph does: every step computes with the
metadata of the first, whose numbers change in place.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from typing import Any

from tests.helpers import interpreted
from tests.helpers.interpreted import GROUPS, IN_BLOCK, KV_HEADS, QUERY_HEADS, SIZE

import torch

from rlkv.eviction import make_policy
from rlkv.vllm.packing import BufferDemand
from rlkv.vllm.evicting import (
    Eviction,
    EvictingTorchBuilder,
    EvictingTorchImpl,
    EvictingTritonBuilder,
    EvictingTritonImpl,
)

SCALE = 0.25  # not 1 / sqrt(SIZE): policies want it scaled
POLICY = make_policy("rkv", budget=20, buffer=12)
DEMAND = BufferDemand.of(POLICY, IN_BLOCK, GROUPS)
# tokens of each request after each step: chunks with no, one and two evictions, then decoding over
# the next ones
STEPS = [(30, 5, 70), (33, 21, 71), *((33 + n, 32 + n, 71 + n) for n in (1, 2, 3)), (60, 60, 90)]
ROWS, PADDED = 3, 5  # requests, and rows of a captured graph


class Side:
    """One path with a cache of its own."""

    def __init__(self, builder: Any, implementation: Any, captures: bool = False) -> None:
        blocks = ROWS * DEMAND.compressible(DEMAND.capacity) + 1
        self.cache = torch.full((blocks, KV_HEADS, IN_BLOCK, 2 * SIZE), float("nan"))
        self.cache[0] = 0  # the null block
        self.impl = interpreted.make_implementation(implementation, SCALE)
        self.layer = interpreted.make_layer(
            self.impl, kv_cache=self.cache, kept=Eviction(POLICY, DEMAND)
        )
        self.builder = interpreted.make_builder(builder, self.layer, 256)
        self.captures = captures
        self.captured: Any = None

    def step(self, common: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        found = torch.full_like(query, 7.0)
        metadata = self.builder.build(0, common)
        if self.captures and common.max_query_len == 1:
            metadata = self.captured = self.captured or metadata
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, found)
        return found


class Inputs:
    """Tensors that the engine keeps: the numbers of every step are written into the same ones."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = torch.zeros(PADDED, table.shape[1], dtype=torch.int32)
        self.table[:ROWS] = table
        self.starts = torch.zeros(PADDED + 1, dtype=torch.int32)
        self.lengths = torch.zeros(PADDED, dtype=torch.int32)

    def step(self, lengths: tuple[int, ...], queries: list[int]) -> Any:
        """Padded rows and tokens where all decode, as for a graph of five; else as they are."""
        decoding = max(queries) == 1
        rows = PADDED if decoding else ROWS
        tokens = sum(queries)
        self.starts[: ROWS + 1] = torch.tensor([0, *queries]).cumsum(0)
        self.starts[ROWS + 1 :] = tokens
        self.lengths[:ROWS] = torch.tensor(lengths)
        return interpreted.step_metadata(
            self.table[:rows],
            self.starts[: rows + 1],
            self.lengths[:rows],
            PADDED if decoding else tokens,
        )


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(ROWS * DEMAND.compressible(DEMAND.capacity), generator=generator) + 1
    table = torch.cat([blocks.view(ROWS, -1), torch.zeros(ROWS, 2, dtype=torch.int64)], dim=1)
    sides = [
        Side(EvictingTorchBuilder, EvictingTorchImpl),
        Side(EvictingTritonBuilder, EvictingTritonImpl),
        Side(EvictingTritonBuilder, EvictingTritonImpl, captures=True),
    ]
    inputs = Inputs(table)
    earlier = (0,) * ROWS
    for number, lengths in enumerate(STEPS):
        queries = [now - before for now, before in zip(lengths, earlier, strict=True)]
        tokens = sum(queries)
        query, key, value = (
            torch.randn(tokens + PADDED - ROWS, heads, SIZE, generator=generator)
            for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
        )
        expected, *others = (
            side.step(inputs.step(lengths, queries), query, key, value)[:tokens] for side in sides
        )
        for side, found in zip(sides[1:], others, strict=True):
            same = torch.equal(
                side.cache[1:].nan_to_num(nan=9.0), sides[0].cache[1:].nan_to_num(nan=9.0)
            )
            assert same, f"step {number}: other entries"
            print("evicting", (found - expected).abs().max().item())
        earlier = lengths
