"""A decoder under token eviction, token by token and head by head: lists of entries, no batch, no
shared code.

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
class _Head:
    """Entries of a head, oldest first: positions ``[n]``, keys and values ``[n, D]``."""

    positions: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    totals: torch.Tensor  # summed attention of each entry

    def append(self, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.positions.append(position)
        self.keys, self.values = (
            torch.cat([self.keys, key[None]]),
            torch.cat([self.values, value[None]]),
        )
        self.totals = torch.cat([self.totals, torch.zeros(1)])

    def keep(self, index: list[int]) -> None:
        self.positions = [self.positions[i] for i in index]
        self.keys, self.values, self.totals = (
            self.keys[index],
            self.values[index],
            self.totals[index],
        )


@dataclass
class _Layer:
    """Queries ``[Q, D]`` of all tokens so far."""

    heads: list[_Head]
    queries: list[torch.Tensor] = field(default_factory=list)
    evictions: int = 0


@dataclass
class NaiveRun:
    """One row; ``layers`` as it goes; ``full`` bool ``[L, H]``."""

    policy: EvictionPolicy
    full: torch.Tensor
    layers: dict[int, _Layer] = field(default_factory=dict)
    start: int = 0  # tokens before this call
    prompt: int = 0  # first tokens, which may be protected


_runs: list[NaiveRun] = []


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any
) -> Any:
    run = _runs[-1]
    heads, length, size = key.shape[1:]
    groups = query.shape[1] // heads
    empty = torch.zeros(0, size)
    layer = run.layers.setdefault(
        module.layer_idx, _Layer([_Head([], empty, empty, torch.zeros(0)) for _ in range(heads)])
    )
    protected = _protected(run)
    out = torch.zeros(1, length, query.shape[1], size)
    for t in range(length):
        layer.queries.append(query[0, :, t])
        for index, head in enumerate(layer.heads):
            head.append(run.start + t, key[0, index, t], value[0, index, t])
            own = slice(index * groups, (index + 1) * groups)
            logits = query[0, own, t] @ head.keys.T * scaling
            out[0, t, own] = torch.softmax(logits, -1) @ head.values
            if (
                run.policy.accumulates and run.start + t >= protected
            ):  # attention among what may be evicted
                head.totals[protected:] += torch.softmax(logits[:, protected:], -1).sum(0)
    _evict(run, layer, module.layer_idx, scaling)
    return out, None


def _protected(run: NaiveRun) -> int:
    return run.prompt if run.policy.protect_prompt else 0


def _evict(run: NaiveRun, layer: _Layer, layer_idx: int, scaling: float) -> None:
    """After a call: evict from the compressible heads if they are due."""
    policy, protected = run.policy, _protected(run)
    seen = len(layer.queries) - protected
    chosen = [h for h in range(len(layer.heads)) if not run.full[layer_idx, h]]
    if not chosen or seen <= 0:
        return
    heads = [layer.heads[h] for h in chosen]
    count = len(heads[0].positions) - protected
    tensors = torch.tensor([seen]), torch.tensor([layer.evictions])
    if count < int(policy.capacity(*tensors)):
        return
    budget = min(int(policy.entries(*tensors)), count)
    keys = torch.stack([head.keys[protected:] for head in heads])[None]
    groups = layer.queries[0].shape[0] // len(layer.heads)
    index = [h * groups + g for h in chosen for g in range(groups)]
    recent = min(policy.observation, count)
    queries = (
        torch.stack(layer.queries[-recent:], dim=1)[index][None] * scaling * keys.shape[-1] ** 0.5
    )
    if policy.accumulates:
        scores = torch.stack([head.totals[protected:] for head in heads])
        kept = policy.keep(scores[None], budget, torch.ones(1, count, dtype=torch.bool))[0]
    elif policy.draws:
        valid = torch.ones(1, count, dtype=torch.bool)
        draws: Any = {"seen": torch.tensor([seen + protected]), "layer": layer_idx}
        kept = policy.keep(policy.scores(keys, queries, valid, **draws), budget, valid)[0]
    else:
        kept = policy.select(keys, queries, budget)[0]
    for head, index_H in zip(heads, kept.tolist(), strict=True):
        head.keep([*range(protected), *(protected + i for i in index_H)])
    layer.evictions += 1


AttentionInterface.register("rlkv_naive_eviction", _attention)
AttentionMaskInterface.register("rlkv_naive_eviction", lambda **kwargs: None)


@torch.no_grad()
def naive_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    calls: list[int],
    policy: EvictionPolicy,
    full: torch.Tensor,
    prompt: int | None = None,
) -> tuple[torch.Tensor, NaiveRun]:
    """Logits ``[1, T, vocabulary]`` of one row ``[1, T]`` fed in ``calls``, tokens of a call seeing
    each other.

    ``prompt``: how many tokens are the prompt; default: those of the first call.
    """
    run = NaiveRun(policy, full, prompt=calls[0] if prompt is None else prompt)
    _runs.append(run)
    before = model.config._attn_implementation
    model.set_attn_implementation("rlkv_naive_eviction")
    outputs, begin = [], 0
    try:
        for length in calls:
            run.start = begin
            positions = torch.arange(begin, begin + length)[None]
            outputs.append(
                model(
                    ids[:, begin : begin + length], position_ids=positions, use_cache=False
                ).logits
            )
            begin += length
    finally:
        model.set_attn_implementation(before)
        _runs.pop()
    return torch.cat(outputs, dim=1), run
