"""The CUDA path of eviction on a CPU, through the Triton interpreter; prints the largest error of every step.

    python tests/serving/evicting_triton.py

Three requests are read in chunks and decoded, with several compactions, once by the torch path and once by the
builder and the implementation of the CUDA path, each over a cache of its own.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from interpreted import fake_config

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlkv.eviction import make_policy
from rlkv.serving.buffers import BufferUse
from rlkv.serving.evicting import Eviction
from rlkv.serving.evicting_backend import (
    EvictingTorchBuilder,
    EvictingTorchImpl,
    EvictingTritonBuilder,
    EvictingTritonImpl,
)

KV_HEADS, GROUPS, SIZE, IN_BLOCK = 2, 3, 32, 16
SCALE = 0.25  # not 1 / sqrt(SIZE): policies want it scaled
POLICY = make_policy("rkv", budget=20, buffer=12)
USE = BufferUse.of(POLICY, IN_BLOCK, GROUPS)
# tokens of each request after each step: chunks with no, one and two compactions, then decoding over the next ones
STEPS = [(30, 5, 70), (33, 21, 71), *((33 + n, 32 + n, 71 + n) for n in range(1, 14)), (60, 60, 90)]
PADDING = 2  # tokens, and one row, that the engine adds in some steps


class Side:
    """One path with a cache of its own."""

    def __init__(self, builder: Any, implementation: Any, blocks: int) -> None:
        # the engine zeroes a block before its first token
        self.cache = torch.zeros(blocks, KV_HEADS, IN_BLOCK, 2 * SIZE)
        self.impl = implementation(KV_HEADS * GROUPS, SIZE, SCALE, KV_HEADS, None, None, "auto")
        one = torch.ones(())
        self.layer = SimpleNamespace(
            impl=self.impl,
            kv_cache=self.cache,
            eviction=Eviction(POLICY, USE),
            block_bytes=self.cache.stride(0) * self.cache.element_size(),
            _q_scale=one,
            _k_scale=one,
            _v_scale=one,
        )
        spec = FullAttentionSpec(block_size=IN_BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
        config = fake_config(self.layer, KV_HEADS * GROUPS, KV_HEADS, SIZE, 256)
        self.builder = builder(spec, ["layer"], config, torch.device("cpu"))

    def step(self, common: CommonAttentionMetadata, query: Any, key: Any, value: Any) -> torch.Tensor:
        found = torch.full_like(query, 7.0)
        metadata = self.builder.build(0, common)
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, found)
        return found


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, per_request = len(STEPS[0]), USE.compressible(USE.capacity)
    blocks = torch.randperm(rows * per_request, generator=generator) + 1  # block 0 is the null block
    table = torch.cat([blocks.view(rows, per_request), torch.zeros(rows, 2, dtype=torch.int64)], dim=1).int()
    sides = [
        Side(builder, implementation, len(blocks) + 1)
        for builder, implementation in (
            (EvictingTorchBuilder, EvictingTorchImpl),
            (EvictingTritonBuilder, EvictingTritonImpl),
        )
    ]
    earlier = (0,) * rows
    for number, lengths in enumerate(STEPS):
        queries = [now - before for now, before in zip(lengths, earlier, strict=True)]
        padding, extra = (PADDING, 1) if number % 3 == 2 else (0, 0)
        starts = torch.tensor([0, *queries, *[0] * extra]).cumsum(0).int()
        seen = torch.tensor([*lengths, *[0] * extra], dtype=torch.int32)
        tokens = sum(queries)
        query, key, value = (
            torch.randn(tokens + padding, heads, SIZE, generator=generator)
            for heads in (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
        )
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seen,
            seq_lens_cpu_upper_bound=seen,
            num_reqs=rows + extra,
            num_actual_tokens=tokens + padding,
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=torch.cat([table, table[:extra] * 0]),
            slot_mapping=torch.full((tokens + padding,), -1, dtype=torch.int64),
        )
        expected, found = (side.step(common, query, key, value)[:tokens] for side in sides)
        error = (found - expected).abs().max()
        assert torch.equal(sides[0].cache[1:], sides[1].cache[1:]), f"step {number}: other entries"
        print(f"max error {error.item()}")
        earlier = lengths


if __name__ == "__main__":
    main()
