"""Compacted block tables and attention over them against explicit masks.

What lies in the gap is NaN.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import (
    GapRules,
    SteadyTables,
    Writes,
    attend_prompts,
    cut_step,
    paged_local_attention,
    plan_reads,
    whole_prompts,
)
from tests.helpers.gaps import without_gaps
from tests.helpers.mixed_reference import local_mask, mixed_by_head_attention

KV_HEADS, GROUPS, SIZE = 3, 2, 8
SCALE = SIZE**-0.5
TOLERANCE = 2e-6  # float32 sums of at most 100 terms of size ~1
REQUESTS = [
    (1, 1),
    (1, 17),
    (1, 260),
    (9, 9),
    (7, 33),
    (1, 64),
    (150, 300),
    (40, 90),
    (2, 500),
]  # (queries, tokens)
SIZES = [
    (5, 0, 1),
    (5, 4, 9),
    (16, 16, 64),
    (8, 7, 3),
    (16, 17, 33),
    (4, 600, 600),
]  # (block, sink, window)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_request_equals_the_reference(sizes: tuple[int, int, int]) -> None:
    demand = SinkWindowDemand(*sizes)
    generator = torch.Generator().manual_seed(0)
    heads = (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
    requests = [
        [torch.randn(length, n, SIZE, generator=generator) for n in heads] for _, length in REQUESTS
    ]
    total = sum(demand.full(length) for _, length in REQUESTS)
    free = (torch.randperm(total, generator=generator) + 1).tolist()
    cache = torch.full((total + 1, KV_HEADS, demand.block_size, 2 * SIZE), float("nan"))
    table = torch.zeros(
        len(REQUESTS), max(demand.full(length) for _, length in REQUESTS) + 2, dtype=torch.int32
    )
    for row, ((queries, length), (_, key, value)) in enumerate(
        zip(REQUESTS, requests, strict=True)
    ):
        blocks = torch.tensor([free.pop() for _ in range(demand.full(length))])
        order = torch.arange(length)
        slots = blocks[order // demand.block_size] * demand.block_size + order % demand.block_size
        Writes.of(slots).store(key, value, cache)
        # what the block manager has given back by now: block 0 is the null block, full of NaN
        outside = max(0, length - queries - demand.window + 1) // demand.block_size
        blocks[demand.full(demand.sink) : max(outside, demand.full(demand.sink))] = 0
        table[row, : len(blocks)] = blocks
    starts = torch.tensor([0] + [n for n, _ in REQUESTS]).cumsum(0)
    lengths = torch.tensor([length for _, length in REQUESTS], dtype=torch.int32)
    rules, prefixes = GapRules(demand, 600), torch.full((len(REQUESTS),), demand.sink)
    # the same keys, by either table
    compacted, shorter = without_gaps(
        demand, table, lengths, starts, prefixes, rules.width(max(n for n, _ in REQUESTS))
    )
    query = torch.cat([request[0][-n:] for (n, _), request in zip(REQUESTS, requests, strict=True)])
    outs = [torch.full_like(query, float("nan")) for _ in range(2)]
    for out, own, ends in zip(outs, (table, compacted), (lengths, shorter), strict=True):
        paged_local_attention(
            query, cache, plan_reads(own, starts.tolist(), ends.tolist(), demand), SCALE, out
        )
    assert torch.equal(*outs)
    out = outs[0]
    for row, (queries, length) in enumerate(REQUESTS):
        states = (state.transpose(0, 1)[None] for state in requests[row])
        mask = local_mask(torch.ones(1, length, dtype=torch.bool), demand.sink, demand.window)
        ones = torch.ones(KV_HEADS, dtype=torch.bool)
        expected = mixed_by_head_attention(*states, ones, mask, mask, SCALE)[0][-queries:]
        assert (out[starts[row] : starts[row + 1]] - expected).abs().max() < TOLERANCE, (
            f"request {row}"
        )


def test_a_long_prompt_reads_the_states_of_its_step() -> None:
    # a prompt read again with 30 more tokens, a decoding request, a short prompt, a long one
    starts, prompts = [0, 230, 231, 241, 391], [200, 0, 10, 150]
    assert whole_prompts(starts, prompts) == [slice(0, 200), slice(241, 391)]
    assert whole_prompts(starts, None) == []
    pieces = cut_step(starts, prompts)
    assert [piece[:] for piece in pieces] == [
        (0, 200, 200),
        (0, 230, 0),
        (1, 231, 0),
        (2, 241, 10),
        (3, 391, 150),
    ]
    assert [piece.reads_cache for piece in pieces] == [False, True, True, True, False]

    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(391, heads, SIZE, generator=generator)
        for heads in (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
    ]
    out = torch.full_like(states[0], 7.0)
    attend_prompts(*states, whole_prompts(starts, prompts), SCALE, out)
    for places in whole_prompts(starts, prompts):
        own = [state[places].transpose(0, 1)[None] for state in states]
        causal = torch.ones(own[0].shape[2], own[0].shape[2], dtype=torch.bool).tril()[None]
        expected = mixed_by_head_attention(
            *own, torch.ones(KV_HEADS, dtype=torch.bool), causal, causal, SCALE
        )[0]
        assert (out[places] - expected).abs().max() < TOLERANCE
        out[places] = 7.0
    assert out.eq(7.0).all()


def test_a_decoding_request_has_a_short_table() -> None:
    demand = SinkWindowDemand(16, 16, 64)
    table = torch.arange(1, 401)[None].int()
    ends, starts, prefixes = torch.tensor([6000]), torch.arange(2), torch.tensor([16])
    compacted, lengths = without_gaps(
        demand, table, ends, starts, prefixes, GapRules(demand, 6000).width(1)
    )
    # position 5999 sees 5936 to 5999: from block 371 on; 370 blocks are left out
    assert compacted[0, : -(-int(lengths[0]) // 16)].tolist() == [1, 372, 373, 374, 375]
    assert lengths.tolist() == [6000 - 370 * 16]
    assert compacted.shape[1] == 6


def test_buffers_stay_in_place() -> None:
    own, of_another_builder = (SteadyTables(8, 6, torch.device("cpu")) for _ in range(2))
    for before, now, elsewhere in zip(own(3, 6), own(5, 4), of_another_builder(3, 6), strict=True):
        assert now.data_ptr() == before.data_ptr() != elsewhere.data_ptr()
    assert [tuple(found.shape) for found in own(5, 4)] == [(5, 4), (5,)]


def test_a_short_table_has_no_more_columns() -> None:
    table = torch.arange(1, 4)[None].int()
    demand, ends, starts, prefixes = (
        SinkWindowDemand(16, 16, 64),
        torch.tensor([40]),
        torch.arange(2),
        torch.tensor([16]),
    )
    compacted, lengths = without_gaps(
        demand, table, ends, starts, prefixes, GapRules(demand, 640).width(1)
    )
    assert compacted.tolist() == [[1, 2, 3]]
    assert lengths.tolist() == [40]
