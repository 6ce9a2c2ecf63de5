"""Eviction on the device against the CPU: the same entries chosen from the same states, and the
same whole texts.

A device adds in another order, so entries whose scores are equal up to rounding may take each
other's place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkv.benchmarks.check.one import Check, Findings, Setting
from rlkv.benchmarks.check.twins import Texts, Twins, read_by_tokens
from rlkv.benchmarks.compaction import CASES, CompactionConfig, draw_states
from rlkv.cache import IMPLEMENTATION, HeadReallocationCache
from rlkv.cache.evicting import KeptTokens
from rlkv.eviction import POLICIES, EvictionPolicy, make_policy

# difference of two scores, over the largest score of the head, that rounding may turn round
TIE = 1e-4
FEW = 0.05  # share of evictions in which a tie may fall otherwise, after which the texts go apart
BUDGET, BUFFER = 40, 8


def swapped(own: Tensor, wanted: Tensor, scores: Tensor) -> Iterator[tuple[int, float]]:
    """Of each head that keeps others than wanted: how many, and how far their scores are apart,
    over the largest.

    Args: own, wanted ``[B, H, K]``, indices that are kept; scores ``[B, H, N]``.
    """
    for mine, others, score in zip(
        *(tensor.flatten(0, 1) for tensor in (own, wanted, scores)), strict=True
    ):
        kept = torch.zeros(2, len(score), dtype=torch.bool)
        kept[0, mine[mine >= 0]], kept[1, others[others >= 0]] = True, True
        if differ := int((kept[0] ^ kept[1]).sum()):
            apart = score[kept[0] ^ kept[1]]
            yield differ // 2, float((apart.max() - apart.min()) / score.abs().max())


def check_selection(setting: Setting, found: Findings) -> None:
    """Every policy chooses from states of the device's dtype, there and on the CPU in float32."""
    entries, size = (1024, 128) if setting.on_gpu else (256, 16)
    dtype = str(setting.dtype).removeprefix("torch.")
    config = CompactionConfig(rows=2, device=str(setting.device), dtype=dtype, head_dim=size)
    ties = 0
    for name in CASES:
        policy, keys, _, queries = draw_states(config, name, entries)
        own = policy.select(keys, queries, entries // 2).cpu()
        keys, queries = keys.float().cpu(), queries.float().cpu()
        wanted = policy.select(keys, queries, entries // 2)
        scores = policy.scores(keys, queries, torch.ones(keys.shape[0], entries, dtype=torch.bool))
        for count, apart in swapped(own, wanted, scores):
            ties += count
            found.require(
                apart < TIE,
                f"{name} keeps {count} other entries than on a CPU, scores {apart:.1g} apart",
            )
    found.figures["entries kept otherwise in a tie"] = ties


def kept_tokens(
    model: Any, policy: EvictionPolicy, texts: Texts, full: Tensor
) -> tuple[Tensor, list[KeptTokens]]:
    """Logits of a text that is read token by token, and what each eviction kept."""
    cache = HeadReallocationCache(full, eviction=policy, record=True)
    return read_by_tokens(model, texts, cache).cpu(), cache.kept


def check_texts(setting: Setting, found: Findings) -> None:
    """Every policy in a model in float32, on the device and on the CPU."""
    twins = Twins.make(setting)
    own: Any = copy.deepcopy(twins.exact).float()
    own.set_attn_implementation(IMPLEMENTATION)
    other: Any = copy.deepcopy(own).to(setting.device)
    full = torch.zeros(twins.sizes.layers, twins.sizes.kv_heads, dtype=torch.bool)
    full[:, 0] = True
    texts = Texts.draw(twins.sizes, 76, 64, (0, 9))
    evictions = different = 0
    for name in POLICIES:
        policy = make_policy(name, budget=BUDGET, buffer=BUFFER, protect_prompt=False)
        wanted_logits, wanted = kept_tokens(own, policy, texts, full)
        logits, kept = kept_tokens(other, policy, texts, full)
        others = sum(
            not torch.equal(a.positions, b.positions) for a, b in zip(kept, wanted, strict=True)
        )
        evictions, different = evictions + len(wanted), different + others
        found.require(bool(wanted), f"{name}: no eviction took place")
        found.require(
            others <= FEW * len(wanted),
            f"{name}: {others} of {len(wanted)} evictions keep other tokens",
        )
        error = float((logits - wanted_logits)[texts.real].abs().max())
        found.details.append(
            {"policy": name, "evictions": len(wanted), "different": others, "error": error}
        )
        found.require(
            others > 0 or error < 1e-3,
            f"{name}: logits differ by {error:.2g} with the same tokens kept",
        )
    found.figures |= {"evictions": evictions, "evictions that kept others": different}


def run(setting: Setting, found: Findings) -> None:
    check_selection(setting, found)
    check_texts(setting, found)


CHECK = Check("eviction", "Every policy keeps what it keeps on a CPU in float32, ties aside.", run)
