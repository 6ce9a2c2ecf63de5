"""What every analysis has in common: the study that it is a part of, and the steps from conditions to the report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.report.page import Page
from rlkv.evaluation.report.plots import Panel, plot_curves
from rlkv.evaluation.study.config import StudyConfig
from rlkv.evaluation.study.measurements import Condition, ConditionRequests, Measurements
from rlkv.evaluation.study.outcomes import Metrics, Outcome
from rlkv.evaluation.study.rankings import Ranking
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation


@dataclass(frozen=True)
class Study:
    """The methods, the measurements, and what is asked of them.

    Attributes:
        rankings: what is compared; the first one with every other.
        ablations: variants of the first one, compared with it alone.
        policies: templates of the eviction policies whose budgets are compared.
        top_heads: numbers of heads, the most needed ones, that the sensitivity compresses.
        truth: content of a ground-truth file, to compare gates with.
        published: model whose published numbers are shown.
    """

    rankings: tuple[Ranking, ...]
    ablations: tuple[Ranking, ...]
    measurements: Measurements
    entry_size: EntrySize
    config: StudyConfig
    policies: dict[str, EvictionPolicy]
    top_heads: tuple[int, ...]
    truth: dict[str, Any] | None
    published: str | None

    @property
    def first(self) -> Ranking:
        return self.rankings[0]

    @property
    def variants(self) -> tuple[Ranking, ...]:
        """The first ranking and its ablations."""
        return self.first, *self.ablations

    @property
    def tasks(self) -> list[str]:
        return list(self.measurements.tasks)

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Of the sweep, ascending."""
        return self.config.ascending("sparsities")

    def conditions(self, rankings: Iterable[Ranking], sparsities: Iterable[float]) -> ConditionRequests:
        """All seeds of ``rankings`` on every task, one of the ``sparsities`` after the other."""
        for sparsity, ranking, task in product(sparsities, rankings, self.tasks):
            for condition in self.seeds(task, ranking, ranking.allocations(sparsity)):
                yield f"{ranking.name} @ {sparsity:g}", condition

    def seeds(self, task: str, ranking: Ranking, allocations: Sequence[HeadAllocation]) -> list[Condition]:
        """A condition per seed of ``ranking``, whose heads are ``allocations``.

        Random draws share the problems, at most one draw per problem; where all have the same heads they are one.
        """
        if not ranking.drawn:
            return [Condition(task, allocation) for allocation in allocations]
        draws = allocations[: len(self.measurements.tasks[task].problems)]
        if len(set(draws)) == 1:
            return [Condition(task, draws[0])]
        return [Condition(task, allocation, part=(i, len(draws))) for i, allocation in enumerate(draws)]

    def full_condition(self, task: str) -> Condition:
        return Condition(task, HeadAllocation(torch.ones(self.first.shape, dtype=torch.bool)))

    def full(self, task: str) -> Outcome:
        return self.measurements.outcome(self.full_condition(task))

    def runs(self, task: str, ranking: Ranking, sparsity: float) -> list[Outcome]:
        """One outcome per seed; seeds with the same heads have the same one, random draws have one together."""
        return self.measurements.outcomes(self.seeds(task, ranking, ranking.allocations(sparsity)))

    def sweep(self, task: str, of: Callable[[list[Outcome], Outcome], Any]) -> dict[str, list[Any]]:
        """For each ranking ``of(runs, full)`` at every sparsity."""
        full = self.full(task)
        return {
            ranking.name: [of(self.runs(task, ranking, sparsity), full) for sparsity in self.sparsities]
            for ranking in self.rankings
        }


class Analysis(ABC):
    """From conditions to metrics, sentences, tables and plots.

    Metrics are JSON-able; the report is made from them alone, so that every number of it is in ``results.json`` too.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def conditions(self, study: Study) -> ConditionRequests:
        """What must be measured; by default every ranking at every sparsity."""
        return study.conditions(study.rankings, study.config.levels("sparsities"))

    def settings(self, study: Study) -> Metrics:
        """What all tasks have in common."""
        return {"sparsities": list(study.sparsities), "first": study.first.name}

    @abstractmethod
    def task_metrics(self, study: Study, task: str) -> Metrics:
        """The numbers of one task."""

    def metrics(self, study: Study) -> Metrics:
        """All numbers of the analysis: its settings, and ``tasks``."""
        return {**self.settings(study), "tasks": {task: self.task_metrics(study, task) for task in study.tasks}}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        """Sentences for the top of the report, made from the metrics of a task."""
        return []

    def findings(self, metrics: Metrics) -> list[str]:
        """The sentences of all tasks."""
        return [line for task, found in metrics["tasks"].items() for line in self.task_findings(task, found, metrics)]

    @abstractmethod
    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        """Add the tables and plots of a task; files of plots go to ``folder``."""

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        """Add to the page, below the heading."""
        for task, found in metrics["tasks"].items():
            self.write_task(task, found, metrics, page, folder)

    def plot_file(self, folder: Path, task: str) -> Path:
        return folder / f"{self.name}-{task.replace(':', '_')}.png"

    def add_plot(self, page: Page, folder: Path, task: str, caption: str, *panels: Panel) -> None:
        """Add curves, which go to a file of ``folder``."""
        page.picture(plot_curves(self.plot_file(folder, task), *panels), caption)
