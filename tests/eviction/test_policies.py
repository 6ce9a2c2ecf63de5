"""What holds for every policy: counts, forced entries, padding, batches, dtypes, pieces, the
reference.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.eviction import EvictionPolicy
from rlkv.eviction import base as attention
from tests.helpers.eviction_matrix import (
    BUDGET,
    CASES,
    HEAD_SIZE,
    HEADS,
    IDS,
    build,
    random_entries,
)
from tests.helpers.eviction_reference import REFERENCES

every_policy = pytest.mark.parametrize("case", CASES, ids=IDS)
lengths = pytest.mark.parametrize("n", [63, 500])


def forced(policy: EvictionPolicy, budget: int, n: int) -> set[int]:
    recent = int(policy.recent(torch.tensor([budget]))[0])
    return set(range(policy.sink)) | set(range(n - recent, n))


@every_policy
@lengths
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_keeps_exactly_the_budget_in_order_with_sinks_and_recent_entries(case, n, group_size):
    policy = build(case)
    keys, queries = random_entries(2, n, group_size, policy.observation, seed=n)
    scores = policy.scores(keys, queries, torch.ones(2, n, dtype=torch.bool))
    assert scores.shape == (2, HEADS, n)
    assert scores.dtype == torch.float32
    kept = policy.select(keys, queries, BUDGET)
    assert kept.shape == (2, HEADS, BUDGET)
    assert kept.dtype == torch.int64
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < n
    for head in kept.flatten(0, 1).tolist():
        assert forced(policy, BUDGET, n) <= set(head)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in REFERENCES], ids=str)
def test_reference(case):
    policy = build(case)
    n = 40
    many = n if case[0] == "h2o" else policy.observation + 2
    keys, queries = random_entries(1, n, 2, many, seed=3)
    expected = REFERENCES[case[0]](policy, keys[0], queries[0])
    got = policy.scores(keys, queries, torch.ones(1, n, dtype=torch.bool))[0]
    judged = slice(0, n - policy.observation)
    # both float32, with sums in another order; scores are of size 1/n
    torch.testing.assert_close(got[:, judged], expected[:, judged], rtol=1e-5, atol=1e-7)


@every_policy
@lengths
def test_a_left_padded_row_keeps_what_it_keeps_alone(case, n):
    policy = build(case)
    padding = [0, 1, 20, n - BUDGET - 3]
    keys, queries = random_entries(4, n, 2, policy.observation, seed=5)
    valid = torch.arange(n) >= torch.tensor(padding)[:, None]
    kept = policy.select(keys, queries, BUDGET, valid)
    for row, columns in enumerate(padding):
        alone = policy.select(keys[row : row + 1, :, columns:], queries[row : row + 1], BUDGET)
        torch.testing.assert_close(kept[row : row + 1], alone + columns, rtol=0, atol=0)


@every_policy
def test_what_padding_holds_is_never_read(case):
    policy = build(case)
    keys, queries = random_entries(2, 63, 2, 50, seed=6)
    valid = torch.arange(63) >= torch.tensor([30, 0])[:, None]
    kept = policy.select(keys, queries, BUDGET, valid)
    keys[0, :, :30], queries[0, :, : 30 - 13] = torch.nan, torch.nan
    scores = policy.scores(keys, queries, valid)
    assert scores.isfinite().all()
    torch.testing.assert_close(policy.select(keys, queries, BUDGET, valid), kept, rtol=0, atol=0)


@every_policy
def test_a_batch_keeps_what_its_rows_keep_alone(case):
    policy = build(case)
    keys, queries = random_entries(5, 200, 2, policy.observation, seed=7)
    alone = [policy.select(keys[row : row + 1], queries[row : row + 1], BUDGET) for row in range(5)]
    torch.testing.assert_close(
        policy.select(keys, queries, BUDGET), torch.cat(alone), rtol=0, atol=0
    )
    torch.testing.assert_close(
        policy.select(keys, queries, BUDGET), torch.cat(alone), rtol=0, atol=0
    )  # and again


@every_policy
def test_rows_shorter_than_the_budget_are_kept_whole(case):
    policy = build(case)
    keys, queries = random_entries(3, 40, 2, policy.observation, seed=8)
    valid = torch.arange(40) >= torch.tensor([0, 33, 39])[:, None]
    kept = policy.select(keys, queries, BUDGET, valid)
    assert policy.scores(keys, queries, valid).isfinite().all()
    assert (kept[0] >= 0).all()
    for row, first in ((1, 33), (2, 39)):
        expected = torch.tensor([-1] * (BUDGET - (40 - first)) + list(range(first, 40)))
        assert (kept[row] == expected).all()
    everything = policy.select(keys[:1], queries[:1], 45)
    assert (everything == torch.tensor([-1] * 5 + list(range(40)))).all()


@every_policy
def test_bfloat16_is_scored_in_float32(case):
    policy = build(case)
    keys, queries = (x.bfloat16() for x in random_entries(2, 100, 2, policy.observation, seed=9))
    kept = policy.select(keys, queries, BUDGET)
    torch.testing.assert_close(
        kept, policy.select(keys.float(), queries.float(), BUDGET), rtol=0, atol=0
    )


@every_policy
@pytest.mark.parametrize("floats", [1, 63 * HEAD_SIZE, 1500])
def test_pieces_change_nothing(case, floats, monkeypatch):
    policy = build(case)
    keys, queries = random_entries(
        2, 63, 2, 63 if case[0] == "h2o" else policy.observation, seed=10
    )
    valid = torch.arange(63) >= torch.tensor([0, 9])[:, None]
    whole = policy.select(keys, queries, BUDGET, valid)
    monkeypatch.setattr(attention, "FLOATS", floats)
    torch.testing.assert_close(policy.select(keys, queries, BUDGET, valid), whole, rtol=0, atol=0)


@pytest.mark.parametrize("floats", [1, 100, 101, 399, 400, 10**6])
def test_pieces_cover_everything_within_their_limit(floats, monkeypatch):
    monkeypatch.setattr(attention, "FLOATS", floats)
    cut = list(attention.pieces(37, 100))
    assert [i for piece in cut for i in range(37)[piece]] == list(range(37))
    assert all(piece.stop - piece.start <= max(1, floats // 100) for piece in cut)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("rpc", "tova")])
def test_policies_of_a_layer_keep_the_same_tokens_in_all_heads(case):
    policy = build(case)
    keys, queries = random_entries(2, 90, 2, policy.observation, seed=11)
    kept = policy.select(keys, queries, BUDGET)
    assert (kept == kept[:, :1]).all() == (case[1].get("aggregation", "all") == "all")


def test_h2o_sums_add_up_over_calls():
    policy = build(("h2o", {}))
    keys, queries = random_entries(2, 60, 2, 60, seed=12)
    valid = torch.arange(60) >= torch.tensor([0, 7])[:, None]
    parts = torch.zeros(2, HEADS, 60)
    for begin, end in ((0, 41), (41, 42), (42, 60)):
        parts[..., :end] += policy.scores(
            keys[:, :, :end], queries[:, :, begin:end], valid[:, :end]
        )
    torch.testing.assert_close(policy.scores(keys, queries, valid), parts, rtol=1e-5, atol=1e-6)
    assert torch.isclose(
        parts.sum(), torch.tensor(HEADS * 2.0 * (60 + 53))
    )  # a query gives 1 in all
