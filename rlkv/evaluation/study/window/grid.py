"""The settings of a window study: the grid, and three ways to spend the same bytes.

A setting's *share* is its bytes of KV over the full cache's, both over the texts of the full-cache run: the same texts
for all settings, so that a setting whose texts get longer does not seem to hold less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.study.matching import kv_share
from rlkv.evaluation.study.measurements import Condition, ConditionRequests, Measurements, Outcome, Sizes
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates

HEADS, WINDOW, PROMPT = "fewer compressible heads", "bigger window", "prompt"


@dataclass(frozen=True)
class Step:
    """Bytes spent in several ways: from ``sparsity`` with the base sizes to what the next ``lower`` one holds.

    ``ways``: sizes and sparsity of each; None where the bytes do not suffice.
    """

    sparsity: float
    lower: float
    ways: dict[str, tuple[Sizes, float] | None]


@dataclass(frozen=True)
class Grid:
    """All settings; ``base``: those that others are compared with, ``sparsities`` ascend."""

    gates: HeadGates
    measurements: Measurements
    entry_size: EntrySize
    base: Sizes
    sinks: tuple[int, ...]
    windows: tuple[int, ...]
    sparsities: tuple[float, ...]

    @cached_property
    def sizes(self) -> tuple[Sizes, ...]:
        """Every sinks x window x prompt once: a protected prompt makes sinks within it the same setting."""
        shortest = min(min(task.prompt_tokens) for task in self.measurements.tasks.values())
        every = product((False, True), self.sinks, self.windows)
        return tuple(dict.fromkeys(Sizes(0 if on and s <= shortest else s, w, on) for on, s, w in every))

    def allocation(self, sparsity: float) -> HeadAllocation:
        return HeadAllocation.from_gates(self.gates, sparsity)

    def condition(self, task: str, sizes: Sizes, sparsity: float) -> Condition:
        return Condition(task, self.allocation(sparsity), sizes=sizes)

    def full_condition(self, task: str) -> Condition:
        return Condition(task, HeadAllocation(torch.ones(self.gates.alpha.shape, dtype=torch.bool)))

    def full(self, task: str) -> Outcome:
        return self.measurements.outcome(self.full_condition(task))

    def outcome(self, task: str, sizes: Sizes, sparsity: float) -> Outcome:
        return self.measurements.outcome(self.condition(task, sizes, sparsity))

    def share(self, task: str, sizes: Sizes, sparsity: float) -> float:
        """Bytes of KV over the full cache's, at the end of the texts of the full-cache run."""
        lengths = self.measurements.text_lengths(task, self.full(task))
        full = self.allocation(sparsity).full
        return kv_share(CacheSettings(**sizes._asdict()), full, self.entry_size, lengths)

    def steps(self, task: str) -> list[Step]:
        """For each two sparsities of the grid, the ways to spend the bytes between them."""
        found = []
        for lower, sparsity in pairwise(self.sparsities):
            if self.allocation(lower) == self.allocation(sparsity):  # of few heads: no bytes lie between them
                continue
            budget = self.share(task, self.base, lower)
            prompt = Sizes(0, 1, protect_prompt=True)
            wide = {WINDOW: self._widest(task, self.base, sparsity, budget)}
            wide[PROMPT] = self._widest(task, prompt, sparsity, budget)
            ways = {name: None if sizes is None else (sizes, sparsity) for name, sizes in wide.items()}
            found.append(Step(sparsity, lower, {HEADS: (self.base, lower), **ways}))
        return found

    def _widest(self, task: str, sizes: Sizes, sparsity: float, budget: float) -> Sizes | None:
        """``sizes`` with the longest window that holds at most ``budget``; None if a window of 1 holds more."""

        def fits(window: int) -> bool:
            return self.share(task, sizes._replace(window=window), sparsity) <= budget

        low = 0  # fits, or nothing does
        high = 1 + max(tokens for _, tokens in self.measurements.text_lengths(task, self.full(task)))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return sizes._replace(window=low) if low else None

    def conditions(self) -> ConditionRequests:
        """All that must be measured in addition to the full cache, which must have been measured."""
        for task in self.measurements.tasks:
            for sparsity, sizes in product(self.sparsities, self.sizes):
                yield f"{sizes} @ {sparsity:g}", self.condition(task, sizes, sparsity)
            for step in self.steps(task):
                for name, way in step.ways.items():
                    if way is not None:
                        yield f"{name} for the bytes of {step.lower:g}", self.condition(task, *way)


def with_recommendation(gates: HeadGates, sizes: Sizes, base_sink: int, summary: dict[str, object]) -> HeadGates:
    """``gates`` that state ``sizes`` for serving; ``summary`` of the choice goes into their training summary."""
    return replace(
        gates,
        deploy_sink=max(sizes.sink, base_sink) if sizes.protect_prompt else sizes.sink,
        deploy_window=sizes.window,
        deploy_protect_prompt=sizes.protect_prompt,
        training={**gates.training, "window_study": summary},
    )
