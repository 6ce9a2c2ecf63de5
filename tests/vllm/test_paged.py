"""Attention over blocks, tables without gaps and steps in pieces against explicit masks.

What lies in the gap is NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.attention.softmax import Softmax
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
from tests.helpers.gaps import SIZES, without_gaps
from tests.helpers.mixed_reference import full_mask, local_mask, mixed_by_head_attention
from tests.helpers.scattered import Scattered

KV_HEADS, GROUPS, SIZE = 3, 2, 8
SCALE = SIZE**-0.5
SOFTMAX = Softmax(SCALE)
TOLERANCE = 2e-6  # float32 sums of at most 100 terms of size ~1

# (queries, tokens) of each request
REQUESTS = [(1, 1), (1, 17), (1, 260), (9, 9), (7, 33), (1, 64), (150, 300), (40, 90), (2, 500)]


def make_step(demand: SinkWindowDemand, gives_back: bool) -> Scattered:
    prompts = [0] * len(REQUESTS) if gives_back else None
    return Scattered(REQUESTS, demand, (KV_HEADS * GROUPS, KV_HEADS), SIZE, prompts)


def expected(states: list[torch.Tensor], sizes: LocalSizes, alpha_H: torch.Tensor) -> torch.Tensor:
    """Attend with explicit masks: the branches, then mixed per KV head."""
    query, key, value = (state.transpose(0, 1)[None] for state in states)
    real = torch.ones(1, key.shape[2], dtype=torch.bool)
    ones = torch.ones(KV_HEADS, dtype=torch.bool)
    branches = []
    for mask in (full_mask(real), local_mask(real, sizes.sink, sizes.window)):
        branches.append(mixed_by_head_attention(query, key, value, ones, mask, mask, SCALE)[0])
    gate = alpha_H.repeat_interleave(GROUPS)[None, :, None]
    return gate * branches[0] + (1 - gate) * branches[1]


def check(
    step: Scattered, out: torch.Tensor, demand: SinkWindowDemand, alpha_H: torch.Tensor
) -> None:
    sizes = LocalSizes(demand.sink, demand.window)
    for row, (queries, _) in enumerate(REQUESTS):
        found = out[step.starts[row] : step.starts[row + 1]]
        error = found - expected(step.states[row], sizes, alpha_H)[-queries:]
        assert error.abs().max() < TOLERANCE, f"request {row}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_request_equals_the_reference(sizes: tuple[int, int, int]) -> None:
    demand = SinkWindowDemand(*sizes)
    step = make_step(demand, gives_back=True)
    prefixes = torch.full((len(REQUESTS),), demand.sink)
    width = GapRules(demand, 600).width(max(queries for queries, _ in REQUESTS))
    # the same keys, by either table
    compacted = without_gaps(demand, step.table, step.lengths, step.starts, prefixes, width)
    outs = []
    for table, lengths in ((step.table, step.lengths), compacted):
        outs.append(torch.full_like(step.step[0], float("nan")))
        reads = plan_reads(table, step.starts.tolist(), lengths.tolist(), demand)
        paged_local_attention(step.step[0], step.cache, reads, SOFTMAX, outs[-1])
    assert torch.equal(*outs)
    check(step, outs[0], demand, torch.zeros(KV_HEADS))


@pytest.mark.parametrize("at_once", [64, 2])
def test_every_mixed_request_equals_the_reference(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUERIES_AT_ONCE", "ROWS_AT_ONCE"):  # 2: both are cut into pieces
        monkeypatch.setattr(paged, name, at_once)
    demand = SinkWindowDemand(5, 4, 9)
    step = make_step(demand, gives_back=False)
    alpha = torch.tensor([0.0, 0.3, 1.0])
    out = torch.full_like(step.step[0], float("nan"))
    reads = plan_mixed_reads(step.table, step.starts, step.lengths, demand)
    paged_mixed_attention(step.step[0], step.cache, reads, alpha, SOFTMAX, out)
    check(step, out, demand, alpha)


def test_mixing_is_float32_on_a_bfloat16_cache() -> None:
    demand = SinkWindowDemand(5, 2, 3)
    step = make_step(demand, gives_back=False)
    query = step.step[0]
    reads = plan_mixed_reads(step.table, step.starts, step.lengths, demand)
    outs = [torch.empty_like(query) for _ in range(2)]
    for alpha, out in zip((0.999, 1.0), outs, strict=True):
        gates = torch.full((KV_HEADS,), alpha)
        paged_mixed_attention(query.bfloat16(), step.cache.bfloat16(), reads, gates, SOFTMAX, out)
    difference = (outs[0] - outs[1]).abs().max()
    assert 0 < difference < 0.01  # bfloat16(0.999) is 1: nothing would differ
    step.states = [[state.bfloat16().float() for state in own] for own in step.states]
    check(step, outs[0], demand, torch.full((KV_HEADS,), 0.999))


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
    attend_prompts(*states, whole_prompts(starts, prompts), SOFTMAX, out)
    for places in whole_prompts(starts, prompts):
        own = [state[places].transpose(0, 1)[None] for state in states]
        causal = torch.ones(own[0].shape[2], own[0].shape[2], dtype=torch.bool).tril()[None]
        expected = mixed_by_head_attention(
            *own, torch.ones(KV_HEADS, dtype=torch.bool), causal, causal, SCALE
        )[0]
        assert (out[places] - expected).abs().max() < TOLERANCE
        out[places] = 7.0
    assert out.eq(7.0).all()


@pytest.mark.parametrize(("length", "step"), [(8192, 8192), (8192, 2048), (32768, 8192)])
def test_a_prompt_is_read_in_linear_time(length: int, step: int) -> None:
    """Queries times entries of their tables, which the Triton kernel reads whatever its mask is."""
    demand = SinkWindowDemand(16, 16, 64)
    table = torch.arange(demand.full(length), dtype=torch.int32)[None]
    now = 0
    for end in range(step, length + 1, step):
        ends = torch.tensor([piece.end for piece in cut_step([0, step])])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        rows = table.expand(len(ends), -1)
        prefixes = torch.full((len(ends),), demand.sink)
        width = GapRules(demand, length).width(step)
        _, shorter = without_gaps(demand, rows, end - step + ends, starts, prefixes, width)
        now += int((starts.diff() * shorter).sum())
    assert now <= length * (16 + 64 + 128 + 16)  # the window may begin anywhere in a block
    assert now < 0.06 * length * (length + 1) // 2


# --- where prompts end


def step(
    starts: list[int], lengths: list[int], prompts: list[int] | None, prefilling: bool = True
) -> Any:
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts),
        is_prefilling=torch.tensor([prefilling] + [False] * (len(lengths) - 1)),
    )


def engine_config() -> Any:
    """The model's configuration, as far as it is looked at."""
    arch = SimpleNamespace(rswa_window=None)
    return SimpleNamespace(model_config=SimpleNamespace(model_arch_config=arch, max_model_len=640))


def test_where_prompts_end() -> None:
    # a prompt, one that is read again with 7 more tokens, a decoding request, padding that is not
    # stated
    stated = step([0, 20, 47, 48, 48], [20, 27, 90, 0], [20, 20, 60])
    assert prompt_lengths(stated) == [20, 20, 0, 0]
    assert prompt_lengths(step([0, 20, 21], [20, 30], None)) == [20, 0]
    for lengths, queries in (([10], 10), ([20], 10), ([21], 1)):
        with pytest.raises(RuntimeError, match="25 tokens"):
            prompt_lengths(step([0, queries], lengths, [25]))


def test_prompt_lengths_are_asked_for_with_the_first_prompt() -> None:
    """Not before: an engine that starts makes up batches, and later builders must not know."""
    config = engine_config()
    rules = GapRules(SinkWindowDemand(16, 16, 64), 640, full_prefill=True)
    assert rules.full_prompts(step([0, 20], [20], None, prefilling=False), config) is None
    assert config.model_config.model_arch_config.rswa_window is None
    assert rules.full_prompts(step([0, 20], [20], None), config) == [20]
    assert config.model_config.model_arch_config.rswa_window == 640


def test_where_a_protected_prompt_ends() -> None:
    """The engine states lengths of prompts from the second step on.

    Rows of padding may have none.
    """
    config = engine_config()
    rules = GapRules(SinkWindowDemand(16, 16, 64, protect_prompt=True), 640)
    for prompts, prefilling, wanted in (
        (None, False, [20, 16]),  # made up at the start
        (None, True, [20, 16]),
        ([300, 7], True, [300, 16]),
    ):
        common = step([0, 20, 29], [20, 9], prompts, prefilling)
        assert rules.prefixes(common, config).tolist() == wanted
        asked = 640 if prefilling else None
        assert config.model_config.model_arch_config.rswa_window == asked
    assert rules.full_prompts(common, config) is None
