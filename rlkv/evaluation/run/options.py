"""What evaluations and studies share: which problems are decoded, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlkv.evaluation.stats.metrics import RepetitionRule
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.evaluation.tasks.registry import find_tasks, load_task, trained_template
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import CacheOptions, ModelOptions, check_positive


@dataclass(frozen=True, kw_only=True)
class TaskOptions(CacheOptions, ModelOptions):
    """Tasks, and how far their texts go."""

    tasks: tuple[str, ...] = ("tiny",)
    """such as math500 aime24 tiny"""
    data: Path | None = None
    """file or folder with the tasks' problems; default: the hub"""
    limit: int | None = None
    """first problems of each task"""
    seed: int = 0
    """of everything that is drawn"""
    max_new_tokens: int | None = None
    """default: the task's published limit"""
    template: str | None = None
    """prompt template of maths tasks: rlkv, boxed or plain; default: the one of all gates, else the task's"""
    repetition: tuple[int, int] = (400, 40)
    """WINDOW DISTINCT: a text is repetitive if a window holds fewer distinct tokens"""
    batch_size: int = 16
    """texts decoded together"""

    def check(self) -> None:
        """Raise ValueError for values that no run can have."""
        check_positive(self, "limit", "max_new_tokens", "batch_size")
        _ = self.rule

    @property
    def rule(self) -> RepetitionRule:
        """What counts as repetitive."""
        return RepetitionRule(*self.repetition)

    def chosen_template(self, gates: Iterable[HeadGates]) -> str | None:
        """The template as given, else the one of all gates; None: the tasks' own, which are the published ones."""
        return self.template or trained_template(gates)

    def problems(self, template: str | None) -> list[tuple[EvalTask, list[EvalProblem]]]:
        """Every task with its problems."""
        tasks = find_tasks(self.tasks, self.data)
        return [(task, load_task(task.name, self.data, self.limit, self.seed, template)) for task in tasks]
