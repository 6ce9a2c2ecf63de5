"""Paged mixed attention in plain torch against the masks of the reference, request by request."""

from __future__ import annotations

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.vllm import paged as attention
from rlkv.vllm import paged as pieces
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import MixedReads, Writes, paged_mixed_attention, plan_mixed_reads
from tests.helpers.mixed_reference import full_mask, local_mask, mixed_by_head_attention

KV_HEADS, GROUPS, SIZE, IN_BLOCK = 3, 2, 8, 5
SCALE = SIZE**-0.5
TOLERANCE = 2e-6  # float32 sums of at most 60 terms of size ~1
REQUESTS = [(1, 1), (1, 17), (1, 60), (9, 9), (7, 33), (1, 5), (4, 20)]  # (queries, tokens)
STARTS = torch.tensor([0] + [n for n, _ in REQUESTS]).cumsum(0)


def plan(table: torch.Tensor, sizes: LocalSizes) -> MixedReads:
    demand = SinkWindowDemand(IN_BLOCK, sizes.sink, sizes.window)
    return plan_mixed_reads(table, STARTS, torch.tensor([length for _, length in REQUESTS]), demand)


def make_requests(
    seed: int = 0,
) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per request ``[query, key, value]`` of all its tokens.

    A cache of scattered blocks, their table, the queries.
    """
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _, length in REQUESTS:
        heads = (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
        states.append([torch.randn(length, n, SIZE, generator=generator) for n in heads])
    blocks = [-(-length // IN_BLOCK) for _, length in REQUESTS]
    free = torch.randperm(sum(blocks) + 4, generator=generator).tolist()
    cache = torch.full((len(free), KV_HEADS, IN_BLOCK, 2 * SIZE), float("nan"))
    table = torch.full((len(REQUESTS), max(blocks) + 2), -1)
    for row, (request, count) in enumerate(zip(states, blocks, strict=True)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        order = torch.arange(len(request[1]))
        slots = table[row, order // IN_BLOCK] * IN_BLOCK + order % IN_BLOCK
        Writes.of(slots).store(request[1], request[2], cache)
    query = torch.cat([request[0][-n:] for (n, _), request in zip(REQUESTS, states, strict=True)])
    return states, cache, table, query


def reference(states: list[torch.Tensor], alpha: torch.Tensor, sizes: LocalSizes) -> torch.Tensor:
    """``[tokens, H * G, D]``: each branch by the explicit masks, then mixed per KV head."""
    query, key, value = (state.transpose(0, 1)[None] for state in states)
    real = torch.ones(1, key.shape[2], dtype=torch.bool)
    masks = full_mask(real), local_mask(real, sizes.sink, sizes.window)
    ones = torch.ones(KV_HEADS, dtype=torch.bool)
    full, local = (
        mixed_by_head_attention(query, key, value, ones, mask, mask, SCALE)[0] for mask in masks
    )
    gate = alpha.repeat_interleave(GROUPS)[None, :, None]
    return gate * full + (1 - gate) * local


@pytest.mark.parametrize("at_once", [64, 2])
@pytest.mark.parametrize(("sink", "window"), [(0, 1), (4, 9), (7, 3), (100, 100)])
def test_every_request_equals_the_reference(
    sink: int, window: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (pieces, "QUERIES_AT_ONCE"),
        (attention, "ROWS_AT_ONCE"),
    ):  # 2: both are cut into pieces
        monkeypatch.setattr(module, name, at_once)
    states, cache, table, query = make_requests()
    alpha, sizes = torch.tensor([0.0, 0.3, 1.0]), LocalSizes(sink, window)
    out = torch.full_like(query, float("nan"))
    paged_mixed_attention(query, cache, plan(table, sizes), alpha, SCALE, out)
    for row, (queries, _) in enumerate(REQUESTS):
        expected = reference(states[row], alpha, sizes)[-queries:]
        found = out[STARTS[row] : STARTS[row + 1]]
        assert (found - expected).abs().max() < TOLERANCE, f"request {row}"


def test_mixing_is_float32_on_a_bfloat16_cache() -> None:
    states, cache, table, query = make_requests()
    sizes = LocalSizes(2, 3)
    outs = [torch.empty_like(query) for _ in range(2)]
    for alpha, out in zip((0.999, 1.0), outs, strict=True):
        gates = torch.full((KV_HEADS,), alpha)
        paged_mixed_attention(
            query.bfloat16(), cache.bfloat16(), plan(table, sizes), gates, SCALE, out
        )
    difference = (outs[0] - outs[1]).abs().max()
    assert 0 < difference < 0.01  # bfloat16(0.999) is 1: nothing would differ
    exact = reference(
        [s.bfloat16().float() for s in states[2]], torch.full((KV_HEADS,), 0.999), sizes
    )[-1]
    assert (outs[0][STARTS[2]] - exact).abs().max() < TOLERANCE


def test_padding_slots_are_not_written() -> None:
    cache = torch.zeros(3, KV_HEADS, IN_BLOCK, 2 * SIZE)
    states = torch.ones(4, KV_HEADS, SIZE)
    Writes.of(torch.tensor([7, -1, 11])).store(
        states, 2 * states, cache
    )  # a fourth token beyond the slots: padding
    written = cache.abs().sum((1, 3)).nonzero().tolist()
    assert written == [[1, 2], [2, 1]]
    assert (cache[1, :, 2, :SIZE] == 1).all()
    assert (cache[1, :, 2, SIZE:] == 2).all()


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        LocalSizes(4, 0)
