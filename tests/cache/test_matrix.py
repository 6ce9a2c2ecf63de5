"""Every row of a batch against its reference: policies, prefills, padding, calls, changed rows.

Without a policy the reference is one masked forward without any cache, with one a run of the row
alone with lists of entries.  Each case also compares the bytes in use with the bookkeeping that has
no states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache, schedule
from rlkv.cache import plan as plan_module
from rlkv.cache.accounting import KVSizes, kv_nbytes
from tests.helpers.cached_logits import MIXED, TOLERANCE, cached_logits, draw_ids, real_tokens
from tests.helpers.mixed_reference import reference_logits
from tests.helpers.models import FAMILIES, SOFTMAXES, make_tiny_model
from tests.helpers.naive_eviction import INSTANCES, naive_logits
from tests.helpers.pairwise import pairwise

SINK, WINDOW = 3, 5
DECODED = 6  # last tokens that "published" decodes, here
HEADS = {"mixed": MIXED, "none full": torch.zeros_like(MIXED)}
PADDING = {"none": (0, 0, 0), "some": (0, 4, 9), "all": (2, 5, 8)}
# the prompt, what is read before the rows change, and what is read after
CALLS = {
    "tokens": ([20], [1] * 5, [1] * 9),
    "short prompt": ([10], [1] * 3, [1] * 9),
    "one call": ([30], [], [1, 1]),
    "turns": ([11, 1, 1], [9, 1, 1], [6, 1, 1, 1]),
}
# rows that go on; in "join" the last one has a cache of its own before
CHANGES = {"none": [0, 1, 2], "reorder": [2, 0, 1, 0], "leave": [2], "join": [0, 1, 2]}
SHARED = {"padding": PADDING, "calls": CALLS, "change": CHANGES, "family": FAMILIES}
SHARED |= {"prefill": schedule.PREFILL_MODES}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "DECODED", DECODED)
    monkeypatch.setattr(plan_module, "BLOCK", 7)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    families = (*FAMILIES, *SOFTMAXES)
    own = {"attn_implementation": IMPLEMENTATION}
    return {family: make_tiny_model(family, **own) for family in families}


class Batch:
    """Three rows that are read in calls, and change in between."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.prompt, before, after = CALLS[case["calls"]]
        self.calls = [*self.prompt, *before, *after]
        self.rows = CHANGES[case["change"]]
        self.joins = case["change"] == "join"
        self.padding = torch.tensor(PADDING[case["padding"]])
        self.ids = draw_ids(3, sum(self.calls))
        self.real = real_tokens(self.padding.tolist(), sum(self.calls))
        self.change_at = sum(self.prompt) + sum(before)
        self.calls_before = [*self.prompt, *before]
        self.calls_after = after

    def read(
        self, model: PreTrainedModel, new_cache: Callable[[], HeadReallocationCache]
    ) -> tuple[HeadReallocationCache, list[Tensor]]:
        """The cache, and the logits ``[T, V]`` of the real tokens of each row that goes on."""
        at = self.change_at
        groups = [[0, 1], [2]] if self.joins else [[0, 1, 2]]
        caches = [new_cache() for _ in groups]
        before = []
        for cache, rows in zip(caches, groups, strict=True):
            states = self.ids[rows, :at], cache, self.calls_before, self.real[rows, :at]
            before.append(cached_logits(model, *states))
        cache = caches[0]
        dropped = 0
        if self.joins:  # columns that are padding in all rows are taken off
            dropped = int(self.padding.min())
            cache.join(caches[1], at - dropped)
        else:
            cache.batch_select_indices(torch.tensor(self.rows))
        ids, real = self.ids[self.rows, dropped:], self.real[self.rows, dropped:]
        after = cached_logits(model, ids, cache, self.calls_after, real, begin=at - dropped)
        logits = torch.cat([torch.cat(before)[self.rows], after], dim=1)
        return cache, [logits[i, self.padding[row] :] for i, row in enumerate(self.rows)]

    def check_bytes(
        self, cache: HeadReallocationCache, model: PreTrainedModel, full: Tensor
    ) -> None:
        """Where a prompt is followed by single tokens, which is what the bookkeeping knows."""
        if set(self.calls[1:]) != {1}:
            return
        padding = self.padding[self.rows]
        prompts, tokens = self.calls[0] - padding, sum(self.calls) - padding
        size = KVSizes.of(model)
        held, everything = kv_nbytes(cache.settings, full, size, prompts, tokens)
        columns = padding - (padding.min() if self.joins else 0)
        of_padding = int(columns.sum()) * size.nbytes
        unused = 0 if cache.settings.policy_of(True) else of_padding * int(full.sum())
        assert cache.used_nbytes() == int(held.sum()) + unused
        assert cache.full_nbytes() == int(everything.sum()) + of_padding * full.numel()
        assert cache.nbytes() >= cache.used_nbytes()


def one_by_one(calls: list[int], prefill: str) -> list[int]:
    """The calls as they are read: those or parts of those that are not read in full, by tokens."""
    parts = []
    for length in calls:
        whole = {"full": length, "local": 0, "published": max(0, length - DECODED)}[prefill]
        parts += [whole] * (whole > 0) + [1] * (length - whole)
    return parts


@pytest.mark.parametrize(
    "case",
    pairwise({"policy": INSTANCES, "heads": HEADS} | SHARED),
    ids=lambda case: "-".join(case.values()),
)
def test_rows_under_a_policy(case: dict[str, Any], models: dict[str, PreTrainedModel]) -> None:
    model, policy, full = models[case["family"]], INSTANCES[case["policy"]], HEADS[case["heads"]]
    batch = Batch(case)
    options = {"prefill": case["prefill"], "eviction": policy, "record": True}
    cache, logits = batch.read(model, lambda: HeadReallocationCache(full, **options))
    for i, row in enumerate(batch.rows):
        padding = int(batch.padding[row])
        prompt = batch.calls[0] - padding
        calls = one_by_one([prompt, *batch.calls[1:]], case["prefill"])
        want, run = naive_logits(model, batch.ids[row, padding:], calls, policy, full, prompt)
        assert (logits[i] - want).abs().max() < TOLERANCE
        assert torch.equal(cache.held(i), run.held())  # index for index
    batch.check_bytes(cache, model, full)


@pytest.mark.parametrize(
    "case",
    pairwise({"policy": INSTANCES, "protect": ("all sinks", "prompt kept")} | SHARED),
    ids=lambda case: "-".join(case.values()),
)
def test_rows_under_two_budgets(case: dict[str, Any], models: dict[str, PreTrainedModel]) -> None:
    model, policy = models[case["family"]], INSTANCES[case["policy"]]
    batch = Batch(case)
    options = {"prefill": case["prefill"], "eviction": policy, "evict_from": "full"}
    options |= {"protect_prompt": case["protect"] == "prompt kept", "record": True}
    cache, logits = batch.read(model, lambda: HeadReallocationCache(MIXED, SINK, WINDOW, **options))
    for i, row in enumerate(batch.rows):
        padding = int(batch.padding[row])
        prompt = batch.calls[0] - padding
        calls = one_by_one([prompt, *batch.calls[1:]], case["prefill"])
        local = (max(SINK, prompt) if options["protect_prompt"] else SINK, WINDOW)
        want, run = naive_logits(
            model, batch.ids[row, padding:], calls, policy, ~MIXED, prompt, local
        )
        assert (logits[i] - want).abs().max() < TOLERANCE
        assert torch.equal(cache.held(i)[MIXED], run.held()[MIXED])
    batch.check_bytes(cache, model, MIXED)


@pytest.mark.parametrize(
    "case",
    pairwise(
        {"protect": ("all sinks", "prompt kept")} | SHARED | {"family": (*FAMILIES, *SOFTMAXES)}
    ),
    ids=lambda case: "-".join(case.values()),
)
def test_rows_with_sinks_and_window(
    case: dict[str, Any], models: dict[str, PreTrainedModel]
) -> None:
    model, protect = models[case["family"]], case["protect"] == "prompt kept"
    batch = Batch(case)
    settings = CacheSettings(SINK, WINDOW, case["prefill"], protect_prompt=protect)

    def new_cache() -> HeadReallocationCache:
        return HeadReallocationCache(MIXED, **vars(settings))

    cache, logits = batch.read(model, new_cache)
    starts = []
    for length in one_by_one(batch.calls, case["prefill"]):
        starts += [len(starts)] * length
    sinks = settings.sinks(batch.calls[0] - batch.padding)[:, None]
    places = torch.tensor(starts)
    want = reference_logits(model, batch.ids, MIXED, sinks, WINDOW, places, batch.real)
    for i, row in enumerate(batch.rows):
        padding = batch.padding[row]
        assert (logits[i] - want[row, padding:]).abs().max() < TOLERANCE
        tokens = torch.arange(sum(batch.calls) - padding)
        held = (tokens < sinks[row]) | (tokens >= len(tokens) - WINDOW)
        assert torch.equal(cache.held(i), MIXED[..., None] | held)
    batch.check_bytes(cache, model, MIXED)
