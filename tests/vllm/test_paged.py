"""Attention over blocks, tables without gaps and steps in pieces against explicit masks.

What lies in the gap is NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.vllm import paged
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import (
    GapRules,
    Writes,
    attend_prompts,
    cut_step,
    paged_local_attention,
    paged_mixed_attention,
    plan_mixed_reads,
    plan_reads,
    prompt_lengths,
    whole_prompts,
)
from tests.helpers.gaps import without_gaps
from tests.helpers.mixed_reference import full_mask, local_mask, mixed_by_head_attention

KV_HEADS, GROUPS, SIZE = 3, 2, 8
SCALE = SIZE**-0.5
TOLERANCE = 2e-6  # float32 sums of at most 100 terms of size ~1

# (queries, tokens) of each request
REQUESTS = [(1, 1), (1, 17), (1, 260), (9, 9), (7, 33), (1, 64), (150, 300), (40, 90), (2, 500)]
# (block, sink, window)
SIZES = [(5, 0, 1), (5, 4, 9), (16, 16, 64), (8, 7, 3), (16, 17, 33), (4, 600, 600)]
LENGTHS = torch.tensor([length for _, length in REQUESTS], dtype=torch.int32)
STARTS = torch.tensor([0] + [queries for queries, _ in REQUESTS]).cumsum(0)


class Step:
    """Requests with their states in scattered blocks of a cache; unwritten entries are NaN."""

    def __init__(self, demand: SinkWindowDemand, gives_back: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        size = demand.block_size
        self.states = []
        for _, length in REQUESTS:
            heads = (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
            own = [torch.randn(length, n, SIZE, generator=generator) for n in heads]
            self.states.append(own)
        counts = [demand.full(length) for _, length in REQUESTS]
        free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.cache = torch.full((sum(counts) + 1, KV_HEADS, size, 2 * SIZE), float("nan"))
        self.table = torch.zeros(len(REQUESTS), max(counts) + 2, dtype=torch.int32)
        for row, ((queries, length), (_, key, value)) in enumerate(
            zip(REQUESTS, self.states, strict=True)
        ):
            blocks = torch.tensor([free.pop() for _ in range(counts[row])])
            order = torch.arange(length)
            Writes.of(blocks[order // size] * size + order % size).store(key, value, self.cache)
            if gives_back:  # what the manager has given back by now is the null block, full of NaN
                outside = max(0, length - queries - demand.window + 1) // size
                sinks = demand.full(demand.sink)
                blocks[sinks : max(outside, sinks)] = 0
            self.table[row, : counts[row]] = blocks
        latest = [own[0][-n:] for (n, _), own in zip(REQUESTS, self.states, strict=True)]
        self.query = torch.cat(latest)

    def expected(self, row: int, sizes: LocalSizes, alpha_H: torch.Tensor) -> torch.Tensor:
        """Attend with explicit masks: the branches, then mixed per KV head."""
        query, key, value = (state.transpose(0, 1)[None] for state in self.states[row])
        real = torch.ones(1, key.shape[2], dtype=torch.bool)
        ones = torch.ones(KV_HEADS, dtype=torch.bool)
        branches = []
        for mask in (full_mask(real), local_mask(real, sizes.sink, sizes.window)):
            attended = mixed_by_head_attention(query, key, value, ones, mask, mask, SCALE)
            branches.append(attended[0][-REQUESTS[row][0] :])
        gate = alpha_H.repeat_interleave(GROUPS)[None, :, None]
        return gate * branches[0] + (1 - gate) * branches[1]

    def check(self, out: torch.Tensor, sizes: LocalSizes, alpha_H: torch.Tensor) -> None:
        for row in range(len(REQUESTS)):
            error = out[STARTS[row] : STARTS[row + 1]] - self.expected(row, sizes, alpha_H)
            assert error.abs().max() < TOLERANCE, f"request {row}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_request_equals_the_reference(sizes: tuple[int, int, int]) -> None:
    demand = SinkWindowDemand(*sizes)
    step = Step(demand, gives_back=True)
    prefixes = torch.full((len(REQUESTS),), demand.sink)
    width = GapRules(demand, 600).width(max(queries for queries, _ in REQUESTS))
    # the same keys, by either table
    compacted = without_gaps(demand, step.table, LENGTHS, STARTS, prefixes, width)
    outs = []
    for table, lengths in ((step.table, LENGTHS), compacted):
        outs.append(torch.full_like(step.query, float("nan")))
        reads = plan_reads(table, STARTS.tolist(), lengths.tolist(), demand)
        paged_local_attention(step.query, step.cache, reads, SCALE, outs[-1])
    assert torch.equal(*outs)
    step.check(outs[0], LocalSizes(demand.sink, demand.window), torch.zeros(KV_HEADS))


@pytest.mark.parametrize("at_once", [64, 2])
def test_every_mixed_request_equals_the_reference(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUERIES_AT_ONCE", "ROWS_AT_ONCE"):  # 2: both are cut into pieces
        monkeypatch.setattr(paged, name, at_once)
    demand = SinkWindowDemand(5, 4, 9)
    step, alpha = Step(demand, gives_back=False), torch.tensor([0.0, 0.3, 1.0])
    out = torch.full_like(step.query, float("nan"))
    reads = plan_mixed_reads(step.table, STARTS, LENGTHS, demand)
    paged_mixed_attention(step.query, step.cache, reads, alpha, SCALE, out)
    step.check(out, LocalSizes(4, 9), alpha)


def test_mixing_is_float32_on_a_bfloat16_cache() -> None:
    demand = SinkWindowDemand(5, 2, 3)
    step = Step(demand, gives_back=False)
    reads = plan_mixed_reads(step.table, STARTS, LENGTHS, demand)
    outs = [torch.empty_like(step.query) for _ in range(2)]
    for alpha, out in zip((0.999, 1.0), outs, strict=True):
        gates = torch.full((KV_HEADS,), alpha)
        paged_mixed_attention(
            step.query.bfloat16(), step.cache.bfloat16(), reads, gates, SCALE, out
        )
    difference = (outs[0] - outs[1]).abs().max()
    assert 0 < difference < 0.01  # bfloat16(0.999) is 1: nothing would differ
    step.states = [[state.bfloat16().float() for state in own] for own in step.states]
    step.check(outs[0], LocalSizes(2, 3), torch.full((KV_HEADS,), 0.999))


def test_padding_slots_are_not_written() -> None:
    cache = torch.zeros(3, KV_HEADS, 5, 2 * SIZE)
    states = torch.ones(4, KV_HEADS, SIZE)
    # a fourth token beyond the slots: padding
    Writes.of(torch.tensor([7, -1, 11])).store(states, 2 * states, cache)
    assert cache.abs().sum((1, 3)).nonzero().tolist() == [[1, 2], [2, 1]]
    assert (cache[1, :, 2, :SIZE] == 1).all()
    assert (cache[1, :, 2, SIZE:] == 2).all()


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


def entries_read(length: int, step: int) -> int:
    """Count what the queries of a prompt read in steps of so many tokens, in pieces."""
    demand, total = SinkWindowDemand(16, 16, 64), 0
    rules = GapRules(demand, length)
    table = torch.arange(demand.full(length), dtype=torch.int32)[None]
    for end in range(step, length + 1, step):
        ends = torch.tensor([piece.end for piece in cut_step([0, step])])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        rows, width = table.expand(len(ends), -1), rules.width(step)
        prefixes = torch.full((len(ends),), demand.sink)
        _, shorter = without_gaps(demand, rows, end - step + ends, starts, prefixes, width)
        total += int((starts.diff() * shorter).sum())
    return total


def test_a_prompt_is_read_in_linear_time() -> None:
    """Queries times entries of their tables, which the Triton kernel reads whatever its mask is."""
    for length, step in ((8192, 8192), (8192, 2048), (32768, 8192)):
        now = entries_read(length, step)
        assert now <= length * (16 + 64 + 128 + 16)  # the window may begin anywhere in a block
        assert now < 0.06 * length * (length + 1) // 2


# --- where prompts end


def step(
    starts: list[int], lengths: list[int], prompts: list[int] | None, prefilling: bool = True
) -> Any:
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts),
        is_prefilling=torch.tensor([prefilling] + [False] * (len(lengths) - 1)),
    )


def test_where_prompts_end() -> None:
    # a prompt, one that is read again with 7 more tokens, a decoding request, padding that is not
    # stated
    assert prompt_lengths(step([0, 20, 47, 48, 48], [20, 27, 90, 0], [20, 20, 60])) == [
        20,
        20,
        0,
        0,
    ]
    assert prompt_lengths(step([0, 20, 21], [20, 30], None)) == [20, 0]
    for lengths, queries in (([10], 10), ([20], 10), ([21], 1)):
        with pytest.raises(RuntimeError, match="25 tokens"):
            prompt_lengths(step([0, queries], lengths, [25]))


def test_prompt_lengths_are_asked_for_with_the_first_prompt() -> None:
    """Not before: an engine that starts makes up batches, and later builders must not know."""
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch, max_model_len=640)
    )
    rules = GapRules(SinkWindowDemand(16, 16, 64), 640, full_prefill=True)
    assert rules.full_prompts(step([0, 20], [20], None, prefilling=False), config) is None
    assert arch.rswa_window is None
    assert rules.full_prompts(step([0, 20], [20], None), config) == [20]
    assert arch.rswa_window == 640


def test_where_a_protected_prompt_ends() -> None:
    """The engine states lengths of prompts from the second step on.

    Rows of padding may have none.
    """
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch, max_model_len=640)
    )
    rules = GapRules(SinkWindowDemand(16, 16, 64, protect_prompt=True), 640)
    reading = {"is_prefilling": torch.tensor([True, False]), "seq_lens": torch.tensor([20, 9])}
    made_up = SimpleNamespace(
        **{**reading, "is_prefilling": torch.zeros(2, dtype=torch.bool)}, rswa_prefix_lens=None
    )
    assert rules.prefixes(made_up, config).tolist() == [20, 16]
    assert arch.rswa_window is None
    assert rules.prefixes(SimpleNamespace(**reading, rswa_prefix_lens=None), config).tolist() == [
        20,
        16,
    ]
    assert arch.rswa_window == 640
    stated = SimpleNamespace(**reading, rswa_prefix_lens=torch.tensor([300, 7]))
    assert rules.prefixes(stated, config).tolist() == [300, 16]
    assert rules.full_prompts(stated, config) is None
