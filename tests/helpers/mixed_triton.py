"""The CUDA path of mixed attention on a CPU, through the Triton interpreter.

Builder and implementation are the real ones.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from typing import Any

from tests.helpers import interpreted
from tests.helpers.interpreted import KV_HEADS, QUERY_HEADS, SIZE

import torch

from rlkv.attention import LocalSizes
from rlkv.vllm.backends import MixedTritonBuilder, MixedTritonImpl
from rlkv.attention.softmax import Softmax
from rlkv.vllm.paged import paged_mixed_attention, plan_mixed_reads
from tests.helpers.scattered import Scattered

SCALE = SIZE**-0.5
SIZES = LocalSizes(20, 40)  # neither a whole number of blocks
STEPS = (  # (queries, tokens) per request: decoding only, and prompts in chunks next to it
    [(1, 150), (1, 61), (1, 5), (1, 140)],
    [(1, 130), (20, 20), (18, 115), (1, 20)],
    [(130, 130), (1, 70)],  # more queries than one piece has
)


def error_of(
    requests: list[tuple[int, int]], alpha: torch.Tensor, builder: MixedTritonBuilder, layer: Any
) -> float:
    """Largest difference from the torch path, on a step of these requests."""
    demand = builder.gap_rules.demand
    own = Scattered(requests, demand, (QUERY_HEADS, KV_HEADS), SIZE)
    query = own.step[0]
    tokens = len(query)
    common = interpreted.step_metadata(own.table, own.starts, own.lengths, tokens)
    found = torch.full((tokens + 2, *query.shape[1:]), 7.0)  # two rows of padding
    padded = torch.cat([query, torch.zeros(2, *query.shape[1:])])
    cache = own.cache.nan_to_num(0)  # the engine zeroes a block before its first token
    layer.impl.forward(layer, padded, None, None, cache, builder.build(0, common), found)
    expected = torch.empty_like(query)
    reads = plan_mixed_reads(own.table, own.starts, own.lengths, demand)
    paged_mixed_attention(query, cache, reads, alpha, Softmax(SCALE), expected)
    assert (found[tokens:] == 7).all(), "padding was written to"
    return (found[:tokens] - expected).abs().max().item()


def main() -> None:
    alpha = torch.tensor([0.3, 1.0])
    impl = interpreted.make_implementation(MixedTritonImpl, SCALE)
    impl.attach(alpha, SIZES)
    layer = interpreted.make_layer(impl)
    builder = interpreted.make_builder(MixedTritonBuilder, layer, 320)
    for step in STEPS:
        print("mixed", error_of(step, alpha, builder, layer))
    alpha.copy_(torch.tensor([0.9, 0.0]))  # in place: builder and implementation read it
    print("mixed", error_of(STEPS[0], alpha, builder, layer))
