"""Which heads stay full x what the others keep, all at the same bytes of KV.

A *saving* is the share of the full cache's bytes that must not be held at the end of a text.  Every method gets the
largest budget that holds at most the rest, over the texts of the full-cache run
(:mod:`rlkv.evaluation.stats.matching`); what its own texts held is reported with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkv.evaluation.stats.matching import match_budget, match_compressible, match_ratio
from rlkv.evaluation.study.base import Study
from rlkv.evaluation.study.measurements import Condition
from rlkv.evaluation.study.rankings import Order
from rlkv.eviction import make_policy
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation

FIXED = "fixed budget"
WINDOW = "sinks + window"
MIN_EXTRA = 5


@dataclass(frozen=True)
class Match:
    """A method at a saving, with its budget.

    Attributes:
        method: what tables call it.
        heads: the ranking whose heads are full; empty for none.
        condition: None if what must be kept is more than the saving leaves.
    """

    method: str
    heads: str
    saved: float
    condition: Condition | None


def policy_templates(
    names: tuple[str, ...], buffer: int, observation: int, extra: int, prompt_variants: bool
) -> dict[str, EvictionPolicy]:
    """Policies of the same sizes, by the name that they have in a table; a matching sets their budgets.

    Args:
        buffer, observation, extra: as of :class:`EvictionPolicy`; a policy that by default compacts at every token,
            observes one or keeps no sinks stays so.
        prompt_variants: each policy also with the other choice of ``protect_prompt``.

    Raises:
        ValueError: for an unknown policy, or fewer than 5 ``extra`` entries.
    """
    if extra < MIN_EXTRA:
        raise ValueError(f"--extra is {extra}: policies need {MIN_EXTRA} or more entries in addition to the ratio")
    found = {}
    for name in names:
        sizes: dict[str, Any] = {"ratio": 0.0, "extra": extra}
        defaults = make_policy(name, budget=4096)
        if defaults.buffer > 1:
            sizes["buffer"] = buffer
        if defaults.observation > 1 and defaults.uses_queries:
            sizes["R" if hasattr(defaults, "R") else "observation"] = observation
        if defaults.sink:
            sizes["sink"] = min(4, extra - 1)
        found[name] = policy = make_policy(name, **sizes)
        if prompt_variants:
            other = make_policy(name, **sizes, protect_prompt=not policy.protect_prompt)
            found[f"{name} (prompt {'kept' if other.protect_prompt else 'evictable'})"] = other
    return found


def matched_methods(study: Study, task: str) -> list[Match]:
    """All methods at every saving.

    Policies alone in all heads with a dynamic and, of those named in the options, a fixed budget; every ranking (its
    first seed) with sinks and a window; policies under the heads of the first ranking.
    """
    lengths = study.measurements.text_lengths(task, study.full(task))
    return [match for saved in study.config.savings for match in _at(study, task, saved, lengths)]


def _at(study: Study, task: str, saved: float, lengths: list[tuple[int, int]]) -> Iterator[Match]:
    share, shape, size = 1 - saved, study.first.shape, study.entry_size
    none_full = torch.zeros(shape, dtype=torch.bool)

    def match(method: str, heads: str, full: Tensor | None, policy: EvictionPolicy | None = None) -> Match:
        known = None if full is None else Condition(task, HeadAllocation(full), policy)
        return Match(method, heads, saved, known)

    for name, template in study.policies.items():
        dynamic = match_ratio(template, share, none_full, size, lengths)
        yield match(name, "", None if dynamic is None else none_full, dynamic)
        if name in study.config.policies:
            fixed = match_budget(template, share, none_full, size, lengths)
            yield match(f"{name}, {FIXED}", "", None if fixed is None else none_full, fixed)
    sizes = study.measurements.tasks[task].settings.cache
    for ranking in study.rankings:
        full = match_compressible(sizes, share, list(ranking.orders[0]), shape, size, lengths)
        yield match(f"{ranking.name} + {WINDOW}", ranking.name, full)
    split = split_heads(study.first.orders[0], share, study.config.head_share, shape)
    for name, template in study.policies.items():
        under = None if split is None else match_ratio(template, share, split, size, lengths)
        yield match(f"{study.first.name} + {name}", study.first.name, None if under is None else split, under)


def split_heads(order: Order, share: float, head_share: float, shape: tuple[int, int]) -> Tensor | None:
    """Full heads, bool ``[L, H]``, such that the others may keep about ``head_share * share`` of the text each.

    The smaller ``head_share``, the more heads stay full.  None if all heads would have to be compressible.
    """
    total, kept = shape[0] * shape[1], head_share * share
    compressible = round(total * (1 - share) / (1 - kept))
    if compressible >= total:
        return None
    full = torch.ones(shape, dtype=torch.bool)
    for layer, head in order[:compressible]:
        full[layer, head] = False
    return full
