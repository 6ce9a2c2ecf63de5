"""Orders of heads: what is compressible at a sparsity, what is when only the most needed heads go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkv.evaluation.measurements import (
    Condition,
    Ranking,
    gates_rankings,
    group_by_name,
    reference_rankings,
)
from rlkv.evaluation.report import ORACLE, RANDOM
from rlkv.eviction import RKV
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.tiny import load
from tests.helpers.study_fakes import SHAPE, ranking

ALPHA = [0.9, 0.1, 0.5, 0.0, 0.7, 0.3]
MODEL = ModelShape("m", "llama", *SHAPE, 6, 8)


def compressible(allocation: HeadAllocation) -> list[int]:
    return (~allocation.full).flatten().nonzero().flatten().tolist()


def test_low_gates_go_first_and_the_top_is_the_other_end() -> None:
    found = ranking("RLKV", ALPHA)
    assert compressible(found.allocations(0.5)[0]) == [1, 3, 5]
    assert [compressible(found.without_top(k)[0]) for k in range(1, 4)] == [[0], [0, 4], [0, 2, 4]]
    assert (
        compressible(found.without_top(6)[0])
        == compressible(found.allocations(1.0)[0])
        == [0, 1, 2, 3, 4, 5]
    )


def test_a_share_of_heads_loses_no_head_to_rounding() -> None:
    heads = tuple(divmod(i, 7) for i in range(7 * 13))
    found = Ranking("x", (13, 7), (heads,))
    assert [found.without_top(k)[0].num_compressible for k in range(92)] == list(range(92))


def test_seeds_that_agree_are_counted_once() -> None:
    other_low = [0.9, 0.0, 0.5, 0.1, 0.7, 0.3]  # another order of the same halves
    found = ranking("RLKV", ALPHA, other_low, ALPHA[::-1])
    conditions = [
        {Condition("tiny", allocation) for allocation in found.allocations(s)}
        for s in (0.5, 0.17, 0.0)
    ]
    assert [len(same) for same in conditions] == [2, 3, 1]
    assert [len({condition.key for condition in same}) for same in conditions] == [2, 3, 1]
    full = HeadAllocation.random(*SHAPE, 0.0, 0)
    assert Condition("tiny", full, RKV(budget=64)) == Condition(
        "tiny", full
    )  # nothing to evict from
    none = HeadAllocation.random(*SHAPE, 1.0, 0)
    assert (
        len(
            {
                Condition("tiny", none, policy).key
                for policy in (None, RKV(budget=64), RKV(budget=65))
            }
        )
        == 3
    )


def test_references() -> None:
    order = [(1, 2), (0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
    truth = {"elimination": [{"layer": layer, "head": head} for layer, head in order]}
    oracle, random = reference_rankings(MODEL, truth, 3)
    assert (oracle.name, random.name, random.drawn) == (ORACLE, RANDOM, True)
    assert compressible(oracle.allocations(0.34)[0]) == [0, 5]
    for seed, allocation in enumerate(random.allocations(0.5)):
        assert allocation == HeadAllocation.random(*SHAPE, 0.5, seed)
    assert reference_rankings(MODEL, None, 0) == []


def test_files_of_one_name_are_seeds() -> None:
    assert group_by_name(["a=1.pt", "b=2.pt", "a=3.pt"], "--gates") == {
        "a": ["1.pt", "3.pt"],
        "b": ["2.pt"],
    }
    for text in ("a.pt", "=a.pt", "a="):
        with pytest.raises(ValueError, match=f"--gates {text!r}"):
            group_by_name([text], "--gates")
    with pytest.raises(ValueError, match=r"--ablation.*'a'"):
        group_by_name(["a=1.pt"], "--ablation", ["a"])


def test_gates_of_another_model_are_refused(tmp_path: Path) -> None:
    model, _ = load()
    HeadGates(torch.rand(4, 6)).save(tmp_path / "fits.pt")
    HeadGates(torch.rand(2, 3)).save(tmp_path / "other.pt")
    (found,) = gates_rankings({"a": [str(tmp_path / "fits.pt")]}, model.config)
    assert found.shape == (4, 6)
    with pytest.raises(ValueError, match=r"other.pt.*2 layers x 3 KV heads"):
        gates_rankings({"a": [str(tmp_path / "fits.pt"), str(tmp_path / "other.pt")]}, model.config)
