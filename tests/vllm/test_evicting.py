"""Entries under an eviction policy in blocks: where they lie, when which ones are evicted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from rlkv.cache.schedule import RowCounts, plan_segments
from rlkv.eviction import EvictionPolicy, make_policy
from rlkv.vllm.evicting import (
    Eviction,
    entry_slots,
    evict,
    observed_queries,
    plan_rounds,
    query_entries,
    query_slots,
)
from rlkv.vllm.packing import NOWHERE, BufferDemand
from rlkv.vllm.paged import Writes

KV_HEADS, SIZE = 2, 8
# (block, budget, buffer, observation, query heads per KV head)
SIZES = [(16, 40, 24, 8, 4), (5, 12, 3, 8, 3), (16, 9, 1, 8, 1), (4, 20, 20, 7, 7)]


@pytest.fixture(params=SIZES, ids=str)
def demand(request: pytest.FixtureRequest) -> BufferDemand:
    return BufferDemand(*request.param)


def policy_of(demand: BufferDemand, name: str = "rkv", **own: Any) -> EvictionPolicy:
    sizes = {"budget": demand.budget, "buffer": demand.buffer, "observation": demand.observation}
    return make_policy(name, **sizes, **own)


def test_tokens_are_evicted_as_in_the_cache_of_transformers(demand: BufferDemand) -> None:
    """One row that is read in one go, token by token: same evictions, same number of entries."""
    length = demand.capacity + 5 * demand.buffer + 2
    policy = policy_of(demand)
    segments = plan_segments(policy, RowCounts.start(1), None, 0, length, in_one_go=False)
    evicted = [segment.end for segment in segments if segment.kept is not None]
    due = [n for n in range(length) if demand.evicts_before(n)]
    assert due == [n for n in evicted if n < length]
    held = {0: 0}
    for segment in segments:
        before = int(segment.before.held)
        held |= {n + 1: before + n + 1 - segment.begin for n in range(segment.begin, segment.end)}
    at_once = demand.evicts_before(torch.arange(-1, length))
    assert at_once.tolist() == [demand.evicts_before(n) for n in range(-1, length)]
    found = demand.entries(torch.arange(length)) + 1
    assert found.tolist() == [held[n] for n in range(1, length + 1)]
    for n in range(length):
        at = n + 1
        while not demand.evicts_before(at):
            at += 1
        assert demand.next_eviction(n) == at


def test_the_observed_queries_are_those_before_an_eviction(demand: BufferDemand) -> None:
    length = demand.capacity + 4 * demand.buffer + 1
    places = demand.observed(torch.arange(length)).tolist()
    for position in range(length):
        if demand.evicts_before(position):
            latest = list(range(position - demand.observation, position))
            found = demand.observed_before(torch.tensor([position]))[0].tolist()
            assert found == [places[n] for n in latest]
    # no other query is written: it would cost time
    looked_at = set()
    for at in range(length + demand.buffer):
        if demand.evicts_before(at):
            looked_at.update(range(at - demand.observation, at))
    assert {n for n in range(length) if places[n] != NOWHERE} <= looked_at


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_rounds_cover_a_step_and_cut_it_at_evictions(demand: BufferDemand, chunk: int) -> None:
    most = demand.capacity
    lengths = [1, most - 1, most, most + 1, 3 * most, most + 2 * demand.buffer]
    first = [max(0, length - chunk) for length in lengths]
    starts = [0]
    for length, begin in zip(lengths, first, strict=True):
        starts.append(starts[-1] + length - begin)
    rounds = plan_rounds(demand, starts, lengths)
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    tokens = []
    for number, part in enumerate(rounds):
        own = torch.arange(starts[-1]) if part.tokens is None else part.tokens
        tokens += own.tolist()
        assert part.starts[-1] == len(own) == len(part.row_T) == len(part.position_T)
        for at, row in enumerate(part.rows):
            positions = part.position_T[part.starts[at] : part.starts[at + 1]].tolist()
            assert own[part.starts[at] : part.starts[at + 1]].tolist() == [
                starts[row] + n - first[row] for n in positions
            ]
            assert not any(demand.evicts_before(n) for n in positions[1:])
            is_due = bool(positions) and demand.evicts_before(positions[0])
            assert (row in part.due) == is_due
            if is_due:
                assert part.due_positions[part.due == row].tolist() == positions[:1]
            if positions:
                assert part.lengths[at] == int(demand.entries(torch.tensor(positions[-1]))) + 1
            seen[row] += positions
        # later rounds have no idle rows
        assert number == 0 or all(a < b for a, b in pairwise(part.starts))
    assert sorted(tokens) == list(range(starts[-1]))
    for row, length in enumerate(lengths):
        assert seen[row] == list(range(first[row], length))


def test_rows_of_padding_take_part_with_nothing() -> None:
    demand = BufferDemand(16, 40, 24, 8, 4)
    (only,) = plan_rounds(demand, [0, 1, 2, 2, 2], [65, 10, 0, 0])
    assert only.rows == [0, 1, 2, 3]
    assert only.due.tolist() == [0]
    assert only.lengths == [41, 10, 0, 0]
    assert only.tokens is None


def test_blocks_do_not_grow_with_the_text(demand: BufferDemand) -> None:
    queries = -(-demand.observation * -(-demand.group_size // 2) // demand.block_size)
    assert demand.compressible(1) == queries + 1
    most = queries + demand.full(demand.capacity)
    assert demand.compressible(demand.capacity) == demand.compressible(10**6) == most


@pytest.mark.parametrize("at_once", [1, 2**22])
@pytest.mark.parametrize("name", ["rkv", "snapkv"])
@pytest.mark.parametrize("variant", ["paper", "published"])
def test_an_eviction_keeps_what_the_policy_selects(
    demand: BufferDemand, name: str, variant: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in scattered blocks, one by one or together; other blocks stay."""
    monkeypatch.setattr("rlkv.eviction.base.FLOATS", at_once)
    policy = policy_of(demand, name, variant=variant, sink=1)
    generator = torch.Generator().manual_seed(0)
    rows, per_request = 3, demand.compressible(demand.capacity)
    blocks = torch.randperm(rows * per_request + 2, generator=generator)[: rows * per_request]
    table = blocks.view(rows, per_request).int()
    cache_shape = (rows * per_request + 2, KV_HEADS, demand.block_size, 2 * SIZE)
    cache = torch.full(cache_shape, float("nan"))
    # the tokens before an eviction, of a request that evicted before or did not
    nexts = demand.capacity + torch.tensor([0, demand.buffer, 3 * demand.buffer])
    heads = KV_HEADS * demand.group_size
    query = torch.randn(rows, demand.observation, heads, SIZE, generator=generator)
    key = torch.randn(rows, demand.capacity, KV_HEADS, SIZE, generator=generator)
    value = torch.randn(key.shape, generator=generator)
    for row in range(rows):
        entries = torch.arange(demand.capacity)
        slots = entry_slots(demand, table, torch.full_like(entries, row), entries)
        Writes.of(slots).store(key[row], value[row], cache)
        positions = nexts[row] - demand.observation + torch.arange(demand.observation)
        observed = demand.observed(positions)
        places = query_slots(demand, table, torch.full_like(positions, row), observed)
        for entries, own in zip(query_entries(query[row], KV_HEADS), places, strict=True):
            Writes.of(own).store(*entries.chunk(2, -1), cache)
    found = observed_queries(cache, table.long(), nexts, demand)
    assert torch.equal(found.flatten(1, 2), query.transpose(1, 2))
    before, factor = cache.clone(), 1.3
    evict(cache, table, nexts, Eviction(policy, demand), factor)
    kept = policy.select(key.transpose(1, 2), query.transpose(1, 2) * factor, demand.budget)
    entries = torch.arange(demand.budget)
    for row in range(rows):
        slots = entry_slots(demand, table, torch.full_like(entries, row), entries)
        stored = cache[slots // demand.block_size, :, slots % demand.block_size].transpose(0, 1)
        expected = torch.cat([key[row], value[row]], dim=-1).transpose(0, 1)
        index = kept[row][..., None].expand(-1, -1, 2 * SIZE)
        assert torch.equal(stored, expected.gather(1, index))
    first = demand.query_blocks
    touched = table[:, first : first + demand.full(demand.budget)].flatten().tolist()
    others = [block for block in range(len(cache)) if block not in touched]
    assert torch.equal(cache[others].nan_to_num(9.0), before[others].nan_to_num(9.0))
