"""The CUDA path of sinks and window on a CPU, through the Triton interpreter.

The same steps by the torch path and by the CUDA path: with prompts that see sinks and window, with
prompts that are read in full, among them one that is read again with what its request wrote itself,
and with protected prompts.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from dataclasses import replace

from tests.helpers import interpreted
from tests.helpers.interpreted import IN_BLOCK, KV_HEADS, QUERY_HEADS, SIZE

import torch

from rlkv.vllm.backends import (
    LocalTorchBuilder,
    LocalTorchImpl,
    LocalTritonBuilder,
    LocalTritonImpl,
)
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import QUERIES_AT_ONCE, GapRules, Writes

SCALE = SIZE**-0.5
DEMAND = SinkWindowDemand(IN_BLOCK, 20, 40)
# (queries, tokens, tokens of the prompt) of each request
STEPS = [
    [(1, 150, 30), (1, 61, 60), (1, 5, 4), (1, 140, 100)],
    [(1, 130, 20), (120, 120, 120), (1, 90, 7), (9, 9, 9)],
    [(130, 130, 80), (33, 33, 33), (1, 64, 63), (100, 100, 20)],
    [(1, 150, 30), (129, 129, 129)],  # cut into pieces of at most 128 queries
]


def error_of(requests: list[tuple[int, int, int]], full_prefill: bool, protect: bool) -> float:
    generator = torch.Generator().manual_seed(len(requests))
    blocks = [DEMAND.full(length) for _, length, _ in requests]
    free = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
    cache = torch.full((sum(blocks) + 1, KV_HEADS, IN_BLOCK, 2 * SIZE), float("nan"))
    table = torch.zeros(len(requests), max(blocks) + 1, dtype=torch.int32)
    keys, values = [], []  # of the step
    for row, ((queries, length, prompt), count) in enumerate(zip(requests, blocks, strict=True)):
        own = torch.tensor([free.pop() for _ in range(count)])
        order = torch.arange(length)
        key, value = (torch.randn(length, KV_HEADS, SIZE, generator=generator) for _ in range(2))
        keys.append(key[-queries:])
        values.append(value[-queries:])
        # a prompt that is read in full at once reads no block: leave NaN
        if not (full_prefill and length == prompt > QUERIES_AT_ONCE):
            Writes.of(own[order // IN_BLOCK] * IN_BLOCK + order % IN_BLOCK).store(key, value, cache)
        outside = max(0, length - queries - DEMAND.window + 1) // IN_BLOCK
        kept = DEMAND.full(max(DEMAND.sink, prompt) if protect else DEMAND.sink)
        own[kept : max(outside, kept)] = 0  # given back by now
        table[row, :count] = own
    starts = torch.tensor([0] + [queries for queries, _, _ in requests] + [0]).cumsum(0).int()
    # and a row of padding, which the newer runner states no prompt for
    lengths = torch.tensor([length for _, length, _ in requests] + [0], dtype=torch.int32)
    table = torch.cat([table, table[:1] * 0])
    prompts = torch.tensor([prompt for _, _, prompt in requests])
    prefilling = [length - queries < prompt for queries, length, prompt in requests]
    tokens = int(starts[-1])
    query = torch.randn(tokens, QUERY_HEADS, SIZE, generator=generator)
    rules = GapRules(replace(DEMAND, protect_prompt=protect), 512, full_prefill)
    # as in an engine whose builders were made after prompt lengths had been asked for
    rswa_window = 512 if full_prefill or protect else None
    found = []
    for kind, implementation in (
        (LocalTorchBuilder, LocalTorchImpl),
        (LocalTritonBuilder, LocalTritonImpl),
    ):
        impl = interpreted.make_implementation(implementation, SCALE)
        layer = interpreted.make_layer(impl, kv_cache=cache, kept=rules)
        common = interpreted.step_metadata(
            table,
            starts,
            lengths,
            tokens,
            rswa_prefix_lens=prompts,
            is_prefilling=torch.tensor([*prefilling, False]),
        )
        builder = interpreted.make_builder(kind, layer, 512, rswa_window=rswa_window)
        metadata = builder.build(0, common)
        found.append(torch.full_like(query, 7.0))
        impl.forward(layer, query, torch.cat(keys), torch.cat(values), cache, metadata, found[-1])
    assert found[0].isfinite().all()
    return (found[0] - found[1]).abs().max().item()


def main() -> None:
    for full_prefill, protect, steps in (
        (False, False, (0, 2)),
        (True, False, (1, 2, 3)),
        (False, True, (2,)),
    ):
        for step in steps:
            print("local", error_of(STEPS[step], full_prefill, protect))
