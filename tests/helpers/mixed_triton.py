"""The CUDA path of mixed attention on a CPU, through the Triton interpreter.

Builder and implementation are the real ones.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from types import SimpleNamespace

from tests.helpers.interpreted import fake_config

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlkv.attention import LocalSizes
from rlkv.vllm.backends import MixedTritonBuilder, MixedTritonImpl
from rlkv.vllm.paged import Writes, paged_mixed_attention, plan_mixed_reads

KV_HEADS, GROUPS, SIZE, IN_BLOCK = 2, 3, 32, 16
SCALE = SIZE**-0.5
SIZES = LocalSizes(20, 40)  # neither a whole number of blocks
STEPS = (  # (queries, tokens) per request: decoding only, and prompts in chunks next to it
    [(1, 150), (1, 61), (1, 5), (1, 140)],
    [(1, 130), (20, 20), (18, 115), (1, 20)],
    [(130, 130), (1, 70)],  # more queries than one piece has
)


def make_builder(layer: object) -> MixedTritonBuilder:
    config = fake_config(layer, KV_HEADS * GROUPS, KV_HEADS, SIZE, 320)
    spec = FullAttentionSpec(
        block_size=IN_BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
    )
    return MixedTritonBuilder(spec, ["layer"], config, torch.device("cpu"))


def error_of(
    requests: list[tuple[int, int]], alpha: torch.Tensor, builder: MixedTritonBuilder, layer: object
) -> float:
    """Largest difference from the torch path, on a step of these requests."""
    generator = torch.Generator().manual_seed(len(requests))
    blocks = [-(-length // IN_BLOCK) for _, length in requests]
    free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    cache = torch.full((len(free), KV_HEADS, IN_BLOCK, 2 * SIZE), float("nan"))
    table = torch.zeros(len(requests), max(blocks) + 1, dtype=torch.int32)
    for row, ((_, length), count) in enumerate(zip(requests, blocks, strict=True)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        cache[table[row, :count].long()] = 0  # the engine zeroes a block before its first token
        order = torch.arange(length)
        slots = table[row, order // IN_BLOCK].long() * IN_BLOCK + order % IN_BLOCK
        key, value = (torch.randn(length, KV_HEADS, SIZE, generator=generator) for _ in range(2))
        Writes.of(slots).store(key, value, cache)
    queries = torch.tensor([n for n, _ in requests])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    tokens = int(starts[-1])
    query = torch.randn(tokens, KV_HEADS * GROUPS, SIZE, generator=generator)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(requests),
        num_actual_tokens=tokens,
        max_query_len=int(queries.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )
    found = torch.full((tokens + 2, *query.shape[1:]), 7.0)  # two rows of padding
    padded = torch.cat([query, torch.zeros(2, *query.shape[1:])])
    layer.impl.forward(layer, padded, None, None, cache, builder.build(0, common), found)
    expected = torch.empty_like(query)
    reads = plan_mixed_reads(table, starts, lengths, builder.gap_rules.demand)
    paged_mixed_attention(query, cache, reads, alpha, SCALE, expected)
    assert (found[tokens:] == 7).all(), "padding was written to"
    return (found[:tokens] - expected).abs().max().item()


def main() -> None:
    alpha = torch.tensor([0.3, 1.0])
    impl = MixedTritonImpl(KV_HEADS * GROUPS, SIZE, SCALE, KV_HEADS, None, None, "auto")
    impl.attach(alpha, SIZES)
    one = torch.ones(())
    layer = SimpleNamespace(impl=impl, _q_scale=one, _k_scale=one, _v_scale=one)
    builder = make_builder(layer)
    print("mixed", max(error_of(step, alpha, builder, layer) for step in STEPS))
    alpha.copy_(
        torch.tensor([0.9, 0.0])
    )  # in place: builder and implementation read the same numbers
    print("mixed", error_of(STEPS[0], alpha, builder, layer))
