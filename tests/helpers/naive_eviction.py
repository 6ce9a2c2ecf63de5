"""A decoder under token eviction, token by token and head by head: lists of entries, no batch, no shared code.

Only the choice of the policy itself (``policy.select``) is taken from the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from rlkv.eviction.base import EvictionPolicy


@dataclass
class _Layer:
    """Entries of each head: (position, key, value), oldest first; queries ``[Q, D]`` of all tokens so far."""

    heads: list[list[tuple[int, torch.Tensor, torch.Tensor]]]
    queries: list[torch.Tensor] = field(default_factory=list)
    totals: list[dict[int, float]] = field(default_factory=list)  # summed attention of each position, per head
    evictions: int = 0


@dataclass
class NaiveRun:
    """One row; ``layers`` as it goes; ``full`` bool ``[L, H]``."""

    policy: EvictionPolicy
    full: torch.Tensor
    layers: dict[int, _Layer] = field(default_factory=dict)
    start: int = 0  # tokens before this call
    prompt: int = 0  # tokens of the first call


_runs: list[NaiveRun] = []


def _attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
    run = _runs[-1]
    heads, length, groups = key.shape[1], key.shape[2], query.shape[1] // key.shape[1]
    layer = run.layers.setdefault(
        module.layer_idx, _Layer([[] for _ in range(heads)], totals=[{} for _ in range(heads)])
    )
    out = torch.zeros(1, length, query.shape[1], value.shape[3])
    for t in range(length):
        layer.queries.append(query[0, :, t])
        for head in range(heads):
            entries = layer.heads[head]
            entries.append((run.start + t, key[0, head, t], value[0, head, t]))
            keys, values = torch.stack([e[1] for e in entries]), torch.stack([e[2] for e in entries])
            for g in range(groups):
                weights = torch.softmax(keys @ query[0, head * groups + g, t] * scaling, 0)
                out[0, t, head * groups + g] = weights @ values
                if run.policy.accumulates:
                    _add(layer.totals[head], entries, query[0, head * groups + g, t], scaling, _protected(run))
    _evict(run, layer, module.layer_idx, scaling)
    return out, None


def _protected(run: NaiveRun) -> int:
    return run.prompt if run.policy.protect_prompt else 0


def _add(totals: dict[int, float], entries: list, query: torch.Tensor, scaling: float, protected: int) -> None:
    """Attention among the entries that may be evicted."""
    open_entries = [e for e in entries if e[0] >= protected]
    if open_entries:
        weights = torch.softmax(torch.stack([e[1] for e in open_entries]) @ query * scaling, 0)
        for entry, weight in zip(open_entries, weights, strict=True):
            totals[entry[0]] = totals.get(entry[0], 0.0) + weight


def _evict(run: NaiveRun, layer: _Layer, layer_idx: int, scaling: float) -> None:
    """After a call: evict from the compressible heads if they are due."""
    policy, protected = run.policy, _protected(run)
    seen = len(layer.queries) - protected
    chosen = [h for h in range(len(layer.heads)) if not run.full[layer_idx, h]]
    if not chosen or seen <= 0:
        return
    count = len(layer.heads[chosen[0]]) - protected
    tensors = torch.tensor([seen]), torch.tensor([layer.evictions])
    if count < int(policy.capacity(*tensors)):
        return
    budget = min(int(policy.entries(*tensors)), count)
    open_entries = [layer.heads[h][protected:] for h in chosen]
    keys = torch.stack([torch.stack([e[1] for e in entries]) for entries in open_entries])[None]
    groups = layer.queries[0].shape[0] // len(layer.heads)
    index = [h * groups + g for h in chosen for g in range(groups)]
    recent = min(policy.observation, count)
    queries = torch.stack(layer.queries[-recent:], dim=1)[index][None] * scaling * keys.shape[-1] ** 0.5
    if policy.accumulates:
        scores = torch.tensor([[float(layer.totals[h][e[0]]) for e in layer.heads[h][protected:]] for h in chosen])
        kept = policy.keep(scores[None], budget, torch.ones(1, count, dtype=torch.bool))[0]
    elif policy.draws:
        valid = torch.ones(1, count, dtype=torch.bool)
        draws: Any = {"seen": torch.tensor([seen + protected]), "layer": layer_idx}
        kept = policy.keep(policy.scores(keys, queries, valid, **draws), budget, valid)[0]
    else:
        kept = policy.select(keys, queries, budget)[0]
    for head, entries, index_H in zip(chosen, open_entries, kept.tolist(), strict=True):
        layer.heads[head] = layer.heads[head][:protected] + [entries[i] for i in index_H]
    layer.evictions += 1


AttentionInterface.register("rlkv_naive_eviction", _attention)
AttentionMaskInterface.register("rlkv_naive_eviction", lambda **kwargs: None)


@torch.no_grad()
def naive_logits(
    model: PreTrainedModel, ids: torch.Tensor, calls: list[int], policy: EvictionPolicy, full: torch.Tensor
) -> tuple[torch.Tensor, NaiveRun]:
    """Logits ``[1, T, vocabulary]`` of one row ``[1, T]`` fed in ``calls``, tokens of a call seeing each other."""
    run = NaiveRun(policy, full, prompt=calls[0])
    _runs.append(run)
    before = model.config._attn_implementation
    model.set_attn_implementation("rlkv_naive_eviction")
    outputs, begin = [], 0
    try:
        for length in calls:
            run.start = begin
            positions = torch.arange(begin, begin + length)[None]
            outputs.append(model(ids[:, begin : begin + length], position_ids=positions, use_cache=False).logits)
            begin += length
    finally:
        model.set_attn_implementation(before)
        _runs.pop()
    return torch.cat(outputs, dim=1), run
