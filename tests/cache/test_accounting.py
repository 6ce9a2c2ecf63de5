"""Bytes computed from lengths against bytes in use of real caches."""

from __future__ import annotations

import pytest
import torch

from rlkv.cache import IMPLEMENTATION, CacheSettings, HeadReallocationCache, schedule
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.eviction import RPC
from tests.helpers.cached_logits import MIXED
from tests.helpers.eviction_matrix import INSTANCES
from tests.helpers.models import make_tiny_model

HEAD = RPC(P=12, R=3, c=3, aggregation="head")
LENGTHS = [(20, 44), (4, 31), (30, 30), (1, 26)]


@pytest.mark.parametrize("prefill", ["full", "published"])
@pytest.mark.parametrize(
    "policy", [None, HEAD, *INSTANCES.values()], ids=["ring", "rpc by head", *INSTANCES]
)
def test_computed_bytes_are_those_of_a_cache_of_one_row(policy, prefill, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "DECODED", 6)
    model = make_tiny_model("qwen3")
    model.set_attn_implementation(IMPLEMENTATION)
    settings = CacheSettings(sink=3, window=5, prefill=prefill, eviction=policy)
    prompts, tokens = (torch.tensor(column) for column in zip(*LENGTHS, strict=True))
    held, full = kv_nbytes(settings, MIXED, EntrySize.of(model), prompts, tokens)
    for row, (prompt, total) in enumerate(LENGTHS):
        cache = HeadReallocationCache(MIXED, 3, 5, prefill, eviction=policy)
        with torch.no_grad():
            for length in [prompt] + [1] * (total - prompt):
                model(torch.full((1, length), 7), past_key_values=cache)
        assert (int(held[row]), int(full[row])) == (cache.used_nbytes(), cache.full_nbytes())
