"""Part 1: the cache of the deployed model, and eviction, on the device against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from rlkv.benchmarks.texts import EVICTED, draw_states
from rlkv.benchmarks.turns import DecodeConfig
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.eviction import POLICIES, make_policy
from rlkv.gates.allocation import HeadAllocation
from tests.gpu.conftest import SINK, WINDOW, Record, Texts, Twins
from tests.gpu.test_attention import gated

# difference of two scores, over the largest score of the head, that rounding may turn round
TIE = 1e-4
FEW = 0.05  # share of evictions in which a tie may fall otherwise, after which the texts go apart
KERNELS = [False, pytest.param(True, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernel", KERNELS, ids=["torch", "kernel"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_decoding_equals_reading_at_once(
    sparsity: float, kernel: bool, twins: Twins, record_property: Record
) -> None:
    full = HeadAllocation.random(twins.sizes.layers, twins.sizes.kv_heads, sparsity, seed=0).full
    served = copy.deepcopy(twins.own)
    served.set_attn_implementation(IMPLEMENTATION)
    # full heads are gates of 1, compressible ones gates of 0; at sparsity 0 the unpatched model
    reference = gated(twins.exact, full.double()) if sparsity else twins.exact
    for texts in twins.texts:
        cache = HeadReallocationCache(full, SINK, WINDOW, prefill="local")
        cache.state.decode_kernel = kernel
        error = texts.error(texts.read_by_tokens(served, cache), texts.read_at_once(reference))
        allowed = twins.allowed(texts)
        record_property(f"error, {len(texts.ids)} rows", error)
        record_property(f"allowed, {len(texts.ids)} rows", allowed)
        assert error <= allowed
        assert (cache.used_nbytes() < cache.full_nbytes()) == (sparsity > 0)


def swapped(own: Tensor, wanted: Tensor, scores: Tensor) -> list[float]:
    """Return how far the scores of entries that only one side keeps are apart, for each head.

    Args: own, wanted ``[B, H, K]``, indices that are kept; scores ``[B, H, N]``.
    """
    found = []
    heads = (own.flatten(0, 1), wanted.flatten(0, 1), scores.flatten(0, 1))
    for mine, others, score in zip(*heads, strict=True):
        kept = torch.zeros(2, len(score), dtype=torch.bool)
        kept[0, mine[mine >= 0]] = True
        kept[1, others[others >= 0]] = True
        differ = score[kept[0] ^ kept[1]]
        if len(differ):
            found.append(float((differ.max() - differ.min()) / score.abs().max()))
    return found


@pytest.mark.parametrize("name", EVICTED)
def test_a_policy_chooses_what_it_chooses_on_a_cpu(
    name: str, device: torch.device, dtype: torch.dtype, on_gpu: bool, record_property: Record
) -> None:
    entries = 1024 if on_gpu else 256
    config = DecodeConfig(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        head_dim=128 if on_gpu else 16,
    )
    policy, keys, _, queries = draw_states(config, name, 2, entries)
    own = policy.select(keys, queries, entries // 2).cpu()
    keys = keys.float().cpu()
    queries = queries.float().cpu()
    wanted = policy.select(keys, queries, entries // 2)
    scores = policy.scores(keys, queries, torch.ones(2, entries, dtype=torch.bool))
    ties = swapped(own, wanted, scores)
    record_property("heads with a tie", len(ties))
    assert all(tie < TIE for tie in ties)


@pytest.mark.parametrize("name", POLICIES)
def test_whole_texts_keep_what_they_keep_on_a_cpu(
    name: str, twins: Twins, device: torch.device, record_property: Record
) -> None:
    full = torch.zeros(twins.sizes.layers, twins.sizes.kv_heads, dtype=torch.bool)
    full[:, 0] = True
    texts = Texts.draw(twins.sizes.vocabulary, 76, 64, (0, 9))
    policy = make_policy(name, budget=40, buffer=8, protect_prompt=False)
    logits = []
    kept = []
    for place in (torch.device("cpu"), device):
        model = copy.deepcopy(twins.exact).float().to(place)
        model.set_attn_implementation(IMPLEMENTATION)
        cache = HeadReallocationCache(full, eviction=policy, record=True)
        logits.append(texts.read_by_tokens(model, cache))
        kept.append(cache.kept)
    assert kept[0]
    pairs = zip(*kept, strict=True)
    others = sum(not torch.equal(one.positions.cpu(), own.positions.cpu()) for one, own in pairs)
    error = float((logits[0] - logits[1])[texts.real].abs().max())
    record_property("evictions", len(kept[0]))
    record_property("evictions that kept others", others)
    record_property("largest difference of logits", error)
    assert others <= FEW * len(kept[0])
    assert others or error < 1e-3
