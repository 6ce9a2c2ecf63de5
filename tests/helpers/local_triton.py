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
from rlkv.vllm.paged import QUERIES_AT_ONCE, GapRules
from tests.helpers.scattered import Scattered

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
    demand = replace(DEMAND, protect_prompt=protect)
    prompts = [prompt for _, _, prompt in requests]
    long = []  # a prompt that is read in full at once reads no block
    prefilling = [False] * (len(requests) + 1)
    for row, (queries, length, prompt) in enumerate(requests):
        prefilling[row] = length - queries < prompt
        if full_prefill and length == prompt > QUERIES_AT_ONCE:
            long.append(row)
    sizes = [(queries, length) for queries, length, _ in requests]
    own = Scattered(sizes, demand, (QUERY_HEADS, KV_HEADS), SIZE, prompts, long)
    query, key, value = own.step
    # and a row of padding, which the newer runner states no prompt for
    starts = torch.cat([own.starts, own.starts[-1:]])
    lengths = torch.cat([own.lengths, own.lengths[:1] * 0])
    table = torch.cat([own.table, own.table[:1] * 0])
    rules = GapRules(demand, 512, full_prefill)
    # as in an engine whose builders were made after prompt lengths had been asked for
    rswa_window = 512 if full_prefill or protect else None
    found = []
    for kind, implementation in (
        (LocalTorchBuilder, LocalTorchImpl),
        (LocalTritonBuilder, LocalTritonImpl),
    ):
        impl = interpreted.make_implementation(implementation, SCALE)
        layer = interpreted.make_layer(impl, kv_cache=own.cache, kept=rules)
        common = interpreted.step_metadata(
            table,
            starts,
            lengths,
            len(query),
            rswa_prefix_lens=torch.tensor(prompts),
            is_prefilling=torch.tensor(prefilling),
        )
        builder = interpreted.make_builder(kind, layer, 512, rswa_window=rswa_window)
        metadata = builder.build(0, common)
        found.append(torch.full_like(query, 7.0))
        impl.forward(layer, query, key, value, own.cache, metadata, found[-1])
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
