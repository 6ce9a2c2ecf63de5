"""What every analysis has in common: the study that it is a part of, and the steps from cells to the report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.report.html_page import Page
from rlkv.evaluation.study.bench import Bench, Cell
from rlkv.evaluation.study.outcomes import Outcome
from rlkv.evaluation.study.rankings import Ranking
from rlkv.eviction.base import EvictionPolicy

Figures = dict[str, Any]
Wanted = Iterator[tuple[str, Cell]]
FULL = "full cache"


@dataclass(frozen=True)
class StudyOptions:
    """What the analyses are asked for.

    Attributes:
        sparsities: of the sweep, ascending.
        compare_at, ablate_at: sparsities at which methods are compared in pairs.
        margin: accuracy that near-lossless may lose.
        top_heads: numbers of heads, the most needed ones, that the sensitivity compresses.
        policies: templates of the eviction policies whose budgets are compared; savings: at these shares of bytes.
        truth: content of a ground-truth file, to compare gates with; None if there is none.
        published: model whose published numbers stand beside the measured ones; None if it has none.
    """

    sparsities: tuple[float, ...]
    compare_at: tuple[float, ...]
    ablate_at: tuple[float, ...]
    margin: float
    top_heads: tuple[int, ...]
    policies: dict[str, EvictionPolicy]
    savings: tuple[float, ...]
    truth: dict[str, Any] | None
    published: str | None


@dataclass(frozen=True)
class Study:
    """The methods, the measurements, and what is asked of them.

    Attributes:
        rankings: what is compared; the first one with every other.
        ablations: variants of the first one, compared with it alone.
        entry_size: of the model, to count bytes.
    """

    rankings: tuple[Ranking, ...]
    ablations: tuple[Ranking, ...]
    options: StudyOptions
    bench: Bench
    entry_size: EntrySize

    @property
    def first(self) -> Ranking:
        return self.rankings[0]

    @property
    def tasks(self) -> list[str]:
        return list(self.bench.tasks)

    def full_cells(self) -> Wanted:
        """The full cache on every task: measured first, since matched budgets are computed from its texts."""
        for task in self.tasks:
            yield FULL, self.bench.full_cell(task, self.first.shape)

    def cells(self, rankings: Iterable[Ranking], sparsities: Iterable[float]) -> Wanted:
        """All seeds of ``rankings`` at ``sparsities``, on every task."""
        levels = list(sparsities)
        for ranking in rankings:
            for task in self.tasks:
                for sparsity in levels:
                    for allocation in ranking.allocations(sparsity):
                        yield f"{ranking.name} @ {sparsity:g}", Cell(task, allocation)

    def full(self, task: str) -> Outcome:
        return self.bench.outcome(self.bench.full_cell(task, self.first.shape))

    def runs(self, task: str, ranking: Ranking, sparsity: float) -> list[Outcome]:
        """One outcome per seed; seeds with the same heads have the same one."""
        return [self.bench.outcome(Cell(task, allocation)) for allocation in ranking.allocations(sparsity)]


class Analysis(ABC):
    """From cells to figures, sentences, tables and pictures.

    ``figures`` hold JSON-able values only; what is written to the report is made from them alone, so that every number
    of the report stands in ``results.json`` too.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def cells(self, study: Study) -> Wanted:
        """What must be measured."""
        return iter(())

    @abstractmethod
    def figures(self, study: Study) -> Figures:
        """All numbers of the analysis."""

    def findings(self, figures: Figures) -> list[str]:
        """What stands at the top of the report, sentences made from the figures."""
        return []

    @abstractmethod
    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        """Add to the page, behind the heading; pictures go to ``folder``."""
