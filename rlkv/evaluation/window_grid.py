"""The settings of a window study: the grid, and three ways to spend the same bytes.

A setting's *share* is its bytes of KV over the full cache's, both over the texts of the full-cache
run: the same texts for all settings, so that a setting whose texts get longer does not seem to hold
less.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.measurements import Condition, ConditionRequests, Measurements, Outcome, Sizes
from rlkv.evaluation.study import kv_share
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates

HEADS, WINDOW, PROMPT = "fewer compressible heads", "bigger window", "prompt"
Setting = tuple[Sizes, float]  # with the sparsity


@dataclass(frozen=True)
class Step:
    """The bytes that a protected prompt adds to the base sizes at a sparsity, spent in several
    ways.

    ``ways``: None where not one more head or token fits.
    """

    sparsity: float
    ways: dict[str, Setting | None]


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
        """Every sinks x window x prompt once: a protected prompt makes sinks within it the same
        setting.
        """
        shortest = min(min(task.prompt_tokens) for task in self.measurements.tasks.values())
        every = product((False, True), self.sinks, self.windows)
        return tuple(
            dict.fromkeys(Sizes(0 if on and s <= shortest else s, w, on) for on, s, w in every)
        )

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
        """For each sparsity the ways to spend the bytes that the prompt takes there."""
        found = []
        for sparsity in self.sparsities:
            prompt = (Sizes(0, self.base.window, protect_prompt=True), sparsity)
            budget = self.share(task, *prompt)
            ways = {
                HEADS: self._most_heads(task, sparsity, budget),
                WINDOW: self._widest(task, sparsity, budget),
            }
            found.append(Step(sparsity, {PROMPT: prompt, **ways}))
        return found

    def _most_heads(self, task: str, sparsity: float, budget: float) -> Setting | None:
        """The base sizes with as many full heads as hold at most ``budget``."""
        total = self.gates.alpha.numel()
        for compressible in range(self.allocation(sparsity).num_compressible):
            if self.share(task, self.base, compressible / total) <= budget:
                return self.base, compressible / total
        return None

    def _widest(self, task: str, sparsity: float, budget: float) -> Setting | None:
        """The base sinks with the longest window that holds at most ``budget``."""
        longest = max(tokens for _, tokens in self.measurements.text_lengths(task, self.full(task)))
        sizes = [
            self.base._replace(window=window) for window in range(self.base.window + 1, longest + 1)
        ]
        fitting = bisect_right(sizes, budget, key=lambda of: self.share(task, of, sparsity))
        return (sizes[fitting - 1], sparsity) if fitting else None

    def conditions(self) -> ConditionRequests:
        """All that must be measured in addition to the full cache, which must have been measured."""
        for task in self.measurements.tasks:
            for sparsity, sizes in product(self.sparsities, self.sizes):
                yield f"{sizes} @ {sparsity:g}", self.condition(task, sizes, sparsity)
            for step in self.steps(task):
                for name, way in step.ways.items():
                    if way is not None:
                        yield (
                            f"{name} for the bytes of the prompt at {step.sparsity:g}",
                            self.condition(task, *way),
                        )
