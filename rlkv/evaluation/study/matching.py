"""Which heads stay full x what the others keep, all at the same bytes of KV.

A *saving* is the share of the full cache's bytes that must not be held at the end of a text.  Every method gets the
largest budget that holds at most the rest, over the texts of the full-cache run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.evaluation.study.base import Study
from rlkv.evaluation.study.measurements import Condition
from rlkv.evaluation.study.rankings import Order
from rlkv.eviction import make_policy
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation

FIXED = "fixed budget"
STEPS = 2**14  # ratios are multiples of 1/16384 of the text


def kv_share(
    settings: CacheSettings, full: Tensor, size: EntrySize, lengths: list[tuple[int, int]], fixed: bool = False
) -> float:
    """Bytes in use / bytes of the full cache, both summed over texts of (prompt, all) cached tokens.

    ``fixed``: a ratio is of each text's length from its start, not of the tokens read so far.
    """
    prompts, tokens = (torch.tensor(column) for column in zip(*lengths, strict=True))
    held, whole = kv_nbytes(settings, full, size, prompts, tokens, tokens if fixed else None)
    return float(held.sum() / whole.sum())


@dataclass(frozen=True)
class ByteTarget:
    """At most ``share`` of the full cache's bytes, over texts of ``lengths`` (prompt, all) cached tokens.

    Each method gives the largest budget that fits, or None; ``full`` is bool ``[layers, KV heads]``, the full heads.
    ``cache``: sinks and window, and how prompts are read.
    """

    share: float
    size: EntrySize
    lengths: list[tuple[int, int]]
    cache: CacheSettings

    def _fits(self, policy: EvictionPolicy | None, full: Tensor, fixed: bool = False) -> bool:
        settings = replace(self.cache, eviction=policy)
        return kv_share(settings, full, self.size, self.lengths, fixed) <= self.share

    def match_ratio(self, policy: EvictionPolicy, full: Tensor, fixed: bool = False) -> EvictionPolicy | None:
        """``policy`` with the largest ratio of the text so far or, if ``fixed``, of the text's whole length."""

        def sized(step: int) -> EvictionPolicy:
            return replace(policy, budget=None, ratio=step / STEPS)

        low, high = 0, STEPS
        if not self._fits(sized(low), full, fixed):
            return None
        if self._fits(sized(high), full, fixed):
            return sized(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(sized(middle), full, fixed) else (low, middle)
        return sized(low)

    def match_heads(self, order: Order, shape: tuple[int, int]) -> Tensor | None:
        """Full heads when heads are compressed in ``order`` until the rest fits; they keep sinks and a window."""
        full = torch.ones(shape, dtype=torch.bool)
        for head in order:
            if self._fits(None, full):
                return full
            full[head] = False
        return full if self._fits(None, full) else None


@dataclass(frozen=True)
class Match:
    """A method at a saving; ``heads``: the ranking whose heads are full.

    ``conditions``: one, or the draws that share the problems; empty if nothing fits.
    """

    method: str
    heads: str
    saved: float
    conditions: list[Condition]


def policy_templates(
    names: tuple[str, ...], buffer: int | None, observation: int | None, extra: int, sink: int, prompt_variants: bool
) -> dict[str, EvictionPolicy]:
    """Policies of the same sizes, by the name that they have in a table; a matching sets their budgets.

    A policy that by default compacts at every token, observes one or keeps no sinks stays so; None: its own default.
    With ``prompt_variants`` each policy also comes with the other choice of ``protect_prompt``.
    """
    found = {}
    for name in names:
        sizes: dict[str, Any] = {"ratio": 0.0, "extra": extra}
        defaults = make_policy(name, budget=4096)
        if defaults.buffer > 1 and buffer is not None:
            sizes["buffer"] = buffer
        if defaults.observation > 1 and defaults.uses_queries and observation is not None:
            sizes["R" if hasattr(defaults, "R") else "observation"] = observation
        if defaults.sink:
            sizes["sink"] = min(sink, extra - 1)
        found[name] = policy = make_policy(name, **sizes)
        if prompt_variants:
            other = replace(policy, protect_prompt=not policy.protect_prompt)
            found[f"{name} (prompt {'kept' if other.protect_prompt else 'evictable'})"] = other
    return found


def default_extra(names: tuple[str, ...], observation: int | None, sink: int, ring: int) -> int:
    """``ring``, or what one of the policies always keeps where that is more."""
    defaults = [make_policy(name, budget=4096) for name in names]
    observed = [policy.observation if observation is None else observation for policy in defaults]
    return max([ring, *((sink if of.sink else 0) + n for of, n in zip(defaults, observed, strict=True))])


def matched_methods(study: Study, task: str) -> list[Match]:
    """All methods at every saving.

    Policies alone in all heads with a dynamic and, of those named in the options, a fixed budget, for each problem a
    share of its own full-cache text (RLKV, figure 16); every ranking (its first seed, random heads: all draws) with
    sinks and a window; policies under the heads of the first ranking.
    """
    lengths = study.measurements.text_lengths(task, study.full(task))
    cache = study.measurements.tasks[task].settings.cache
    targets = {saved: ByteTarget(1 - saved, study.entry_size, lengths, cache) for saved in study.config.each("savings")}
    return [
        Match(method, heads, saved, conditions)
        for saved, target in targets.items()
        for method, heads, conditions in _matches(study, task, target)
    ]


def _matches(study: Study, task: str, target: ByteTarget) -> Iterator[tuple[str, str, list[Condition]]]:
    shape, first = study.first.shape, study.first
    none_full = torch.zeros(shape, dtype=torch.bool)

    def evicting(full: Tensor, template: EvictionPolicy, fixed: bool = False) -> list[Condition]:
        policy = target.match_ratio(template, full, fixed)
        planned = tuple(tokens for _, tokens in target.lengths) if fixed else None
        return [] if policy is None else [Condition(task, HeadAllocation(full), policy, planned)]

    for name, template in study.policies.items():
        yield name, "", evicting(none_full, template)
        if study.config.fixed_budgets and name in study.config.policies:
            yield f"{name}, {FIXED}", "", evicting(none_full, template, fixed=True)
    for ranking in study.rankings:
        orders = ranking.orders if ranking.drawn else ranking.orders[:1]
        found = [full for order in orders if (full := target.match_heads(order, shape)) is not None]
        conditions = study.seeds(task, ranking, [HeadAllocation(full) for full in found]) if found else []
        yield f"{ranking.name} + sinks + window", ranking.name, conditions
    split = split_heads(first.orders[0], target.share, study.config.head_share, shape)
    for name, template in study.policies.items():
        yield f"{first.name} + {name}", first.name, [] if split is None else evicting(split, template)


def split_heads(order: Order, share: float, head_share: float, shape: tuple[int, int]) -> Tensor | None:
    """Full heads, bool ``[L, H]``, such that the others may keep about ``head_share * share`` of the text each.

    The smaller ``head_share``, the more heads stay full.  None if all heads would have to be compressible.
    """
    total, kept = shape[0] * shape[1], head_share * share
    compressible = round(total * (1 - share) / (1 - kept))
    if compressible >= total:
        return None
    full = torch.ones(shape, dtype=torch.bool)
    for head in order[:compressible]:
        full[head] = False
    return full
