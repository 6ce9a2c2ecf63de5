"""The CUDA path of sinks and window on a CPU, through the Triton interpreter.

The same steps by the torch path and by the CUDA path: with prompts that see sinks and window, with
prompts that are read in full, among them one that is read again with what its request wrote itself,
and with protected prompts.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.helpers.interpreted import fake_config

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlkv.vllm.backends import (
    LocalTorchBuilder,
    LocalTorchImpl,
    LocalTritonBuilder,
    LocalTritonImpl,
)
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import QUERIES_AT_ONCE, GapRules, Writes

KV_HEADS, GROUPS, SIZE, IN_BLOCK = 2, 3, 32, 16
SCALE = SIZE**-0.5
DEMAND = SinkWindowDemand(IN_BLOCK, 20, 40)
# (queries, tokens, tokens of the prompt) of each request
STEPS = [
    [(1, 150, 30), (1, 61, 60), (1, 5, 4), (1, 140, 100)],
    [(1, 130, 20), (120, 120, 120), (1, 90, 7), (9, 9, 9)],
    [(130, 130, 80), (33, 33, 33), (1, 64, 63), (100, 100, 20)],
    [(1, 150, 30), (129, 129, 129)],  # cut into pieces of at most 128 queries
]


def builder_of(kind: Any, layer: Any, full_prefill: bool, protect: bool) -> Any:
    layer.kept = GapRules(replace(DEMAND, protect_prompt=protect), 512, full_prefill)
    # as in an engine whose builders were made after prompt lengths had been asked for
    config = fake_config(
        layer,
        KV_HEADS * GROUPS,
        KV_HEADS,
        SIZE,
        512,
        rswa_window=512 if full_prefill or protect else None,
    )
    spec = FullAttentionSpec(
        block_size=IN_BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
    )
    return kind(spec, ["layer"], config, torch.device("cpu"))


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
        if not (
            full_prefill and length == prompt > QUERIES_AT_ONCE
        ):  # such a prompt reads no block: leave NaN
            Writes.of(own[order // IN_BLOCK] * IN_BLOCK + order % IN_BLOCK).store(key, value, cache)
        outside = max(0, length - queries - DEMAND.window + 1) // IN_BLOCK
        kept = DEMAND.full(max(DEMAND.sink, prompt) if protect else DEMAND.sink)
        own[kept : max(outside, kept)] = 0  # given back by now
        table[row, :count] = own
    starts = torch.tensor([0] + [queries for queries, _, _ in requests] + [0]).cumsum(0).int()
    lengths = torch.tensor(
        [length for _, length, _ in requests] + [0], dtype=torch.int32
    )  # and a row of padding
    table = torch.cat([table, table[:1] * 0])
    prompts = torch.tensor(
        [prompt for _, _, prompt in requests]
    )  # without padding, as the newer runner states them
    tokens = int(starts[-1])
    query = torch.randn(tokens, KV_HEADS * GROUPS, SIZE, generator=generator)
    one = torch.ones(())
    found = []
    for kind, implementation in (
        (LocalTorchBuilder, LocalTorchImpl),
        (LocalTritonBuilder, LocalTritonImpl),
    ):
        impl = implementation(KV_HEADS * GROUPS, SIZE, SCALE, KV_HEADS, None, None, "auto")
        layer = SimpleNamespace(impl=impl, kv_cache=cache, _q_scale=one, _k_scale=one, _v_scale=one)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(requests) + 1,
            num_actual_tokens=tokens,
            max_query_len=max(queries for queries, _, _ in requests),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            rswa_prefix_lens=prompts,
            is_prefilling=torch.tensor(
                [length - queries < prompt for queries, length, prompt in requests] + [False]
            ),
        )
        metadata = builder_of(kind, layer, full_prefill, protect).build(0, common)
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
