"""Budgets at matched bytes: never above the target, and the next larger one is above it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.study import ByteTarget, default_extra, kv_share, policy_templates
from rlkv.eviction import H2O, RKV, RPC, TOVA, RandomEviction, SinkWindow

SIZE = EntrySize(head_dim=16, group_size=2, itemsize=4)
LENGTHS = [(20, 200), (35, 410), (50, 333)]
NONE_FULL = torch.zeros(2, 4, dtype=torch.bool)
HALF_FULL = torch.tensor([[True, True, False, False]] * 2)
POLICIES = [
    SinkWindow(ratio=0.0, extra=20, buffer=16),
    RKV(ratio=0.0, extra=20, buffer=16, observation=4),
    RPC(ratio=0.0, extra=20, buffer=16, R=4),
    H2O(ratio=0.0, extra=20),
    TOVA(ratio=0.0, extra=20),
    RandomEviction(ratio=0.0, extra=20, buffer=16),
]


def target(share: float) -> ByteTarget:
    return ByteTarget(share, SIZE, LENGTHS, CacheSettings(sink=4, window=16))


@pytest.mark.parametrize(("fixed", "share"), [(False, 0.6), (False, 0.8), (True, 0.7)])
@pytest.mark.parametrize("full", [NONE_FULL, HALF_FULL], ids=["all heads", "half full"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_the_largest_ratio_that_fits(policy, full: torch.Tensor, fixed: bool, share: float) -> None:
    found = target(share).match_ratio(policy, full, fixed)
    assert found is not None
    assert replace(found, ratio=0.0) == policy
    held = kv_share(CacheSettings(eviction=found), full, SIZE, LENGTHS, fixed)
    assert share - 0.06 < held <= share  # a buffer of the shortest text is 8% of it
    larger = replace(found, ratio=found.ratio + 2**-14)
    assert kv_share(CacheSettings(eviction=larger), full, SIZE, LENGTHS, fixed) > share


def test_what_must_stay_can_be_too_much() -> None:
    assert target(0.3).match_ratio(RKV(ratio=0.0, extra=150, observation=4), NONE_FULL) is None
    kept = RandomEviction(ratio=0.0, extra=20)
    assert target(0.1).match_ratio(kept, NONE_FULL) is None
    assert (
        target(0.3).match_ratio(TOVA(ratio=0.0, extra=20), HALF_FULL) is None
    )  # full heads alone hold half


def test_everything_fits_into_everything() -> None:
    # the observed query comes on top of the text
    found = target(1.01).match_ratio(TOVA(ratio=0.0, extra=20), NONE_FULL)
    assert found is not None
    assert found.ratio == 1.0


def test_heads_are_compressed_in_their_order_until_it_fits() -> None:
    order = ((1, 3), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3))
    sizes = target(1).cache
    for share in (0.9, 0.6, 0.3):
        full = target(share).match_heads(order, (2, 4))
        assert full is not None
        assert kv_share(sizes, full, SIZE, LENGTHS) <= share
        count = int((~full).sum())
        assert {tuple(head) for head in (~full).nonzero().tolist()} == set(order[:count])
        fewer = full.clone()
        fewer[order[count - 1]] = True
        assert kv_share(sizes, fewer, SIZE, LENGTHS) > share
    assert target(0.01).match_heads(order, (2, 4)) is None


@pytest.mark.parametrize(
    ("names", "observation", "extra"),
    [(("rkv", "h2o"), None, 20), (("rkv", "rpc"), None, 32), (("rpc",), 4, 20)],
)
def test_what_policies_keep_always_fits(
    names: tuple[str, ...], observation: int | None, extra: int
) -> None:
    assert default_extra(names, observation, sink=4, ring=20) == extra
    assert set(policy_templates(names, None, observation, extra, 4, False)) == set(names)


def test_policies_come_with_the_other_treatment_of_the_prompt() -> None:
    found = policy_templates(("rkv", "random"), None, None, 20, 4, True)
    kept = {name: policy.protect_prompt for name, policy in found.items()}
    assert kept == {
        "rkv": False,
        "rkv (prompt kept)": True,
        "random": True,
        "random (prompt evictable)": False,
    }
