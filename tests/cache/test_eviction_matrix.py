"""Every policy x every kind of budget x three families: counts, left-padded batches, bytes, leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.eviction import POLICIES
from rlkv.eviction.base import EvictionPolicy
from tests.helpers.cached_logits import MIXED, cached_logits, draw_ids, real_tokens
from tests.helpers.eviction_matrix import small_policy
from tests.helpers.models import FAMILIES, make_tiny_model

PROMPT, NEW, PADDING = 20, 15, (0, 5)
KINDS = ("fixed", "ratio", "prompt kept", "prompt kept, ratio")


def build(name: str, kind: str) -> EvictionPolicy:
    size = {"ratio": 0.3, "extra": 8} if "ratio" in kind else {"budget": 9}
    return small_policy(name, **size, buffer=4, protect_prompt="prompt" in kind)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = make_tiny_model(request.param)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def run(
    model: PreTrainedModel, cache: HeadReallocationCache, ids: Tensor, padding: tuple[int, ...]
) -> Tensor:
    """Logits of a prompt and of tokens that follow one by one."""
    real = real_tokens(padding, ids.shape[1])
    return cached_logits(model, ids, cache, [ids.shape[1] - NEW] + [1] * NEW, real)


def expected_count(policy: EvictionPolicy, prompt: int) -> int:
    """Entries of a head after the run, by the rule of the contract, token by token."""
    protected = prompt if policy.protect_prompt else 0
    held, evictions = 0, 0
    for seen in [prompt, *range(prompt + 1, prompt + NEW + 1)]:
        held = seen if seen == prompt else held + 1
        where = torch.tensor([seen - protected]), torch.tensor([evictions])
        if held - protected >= int(policy.capacity(*where)):
            held, evictions = protected + int(policy.entries(*where)), evictions + 1
    return held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_counts_batches_bytes_and_leaks(model: PreTrainedModel, name: str, kind: str) -> None:
    policy = build(name, kind)
    ids = draw_ids(2, PROMPT + NEW)
    batch = HeadReallocationCache(MIXED, eviction=policy, record=True)
    logits = run(model, batch, ids, PADDING)
    for row, pad in enumerate(PADDING):
        alone = HeadReallocationCache(MIXED, eviction=policy, record=True)
        own = ids[row : row + 1, pad:]
        run(model, alone, own, (0,))
        held = alone.held(0)
        assert torch.equal(batch.held(row), held)  # index for index
        assert (held[~MIXED].sum(-1) == expected_count(policy, PROMPT - pad)).all()
        lengths = torch.tensor([PROMPT - pad]), torch.tensor([PROMPT - pad + NEW])
        bytes_held, bytes_full = kv_nbytes(
            CacheSettings(eviction=policy), MIXED, EntrySize.of(model), *lengths
        )
        assert (alone.used_nbytes(), alone.full_nbytes()) == (int(bytes_held), int(bytes_full))
        for kept in alone.kept:
            where = (
                torch.tensor([kept.seen - (PROMPT - pad if policy.protect_prompt else 0)]),
                torch.tensor([0]),
            )
            assert kept.positions.shape[1] == int(
                policy.entries(*where)
            )  # neither kind depends on earlier evictions
    again = HeadReallocationCache(MIXED, eviction=policy, record=True)
    assert torch.equal(
        run(model, again, ids, PADDING), logits
    )  # nothing is left of the runs before


@pytest.mark.parametrize("padding", [(0, 0), PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_beyond_the_text_is_the_full_cache_bit_for_bit(
    model: PreTrainedModel, name: str, padding: tuple[int, ...]
) -> None:
    ids = draw_ids(2, PROMPT + NEW)
    real = real_tokens(padding, ids.shape[1])
    want = run(model, HeadReallocationCache(torch.ones_like(MIXED)), ids, padding)
    none_full = torch.zeros_like(MIXED)
    for policy in (
        replace(build(name, "fixed"), budget=64),
        replace(build(name, "ratio"), ratio=1.0),
    ):
        got = run(model, HeadReallocationCache(none_full, eviction=policy), ids, padding)
        assert torch.equal(got[real], want[real])
