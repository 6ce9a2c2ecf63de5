"""What evaluations and studies share: which problems are decoded, and how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkv.evaluation.stats.metrics import RepetitionRule
from rlkv.evaluation.tasks.base import EvalProblem, EvalTask
from rlkv.evaluation.tasks.registry import find_task, find_tasks, load_task, trained_template
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
    """of samples and random heads; the drawn problems of tiny and smol are always the same"""
    max_new_tokens: tuple[str, ...] = ()
    """N, or TASK=N for single tasks; default: the tasks' published limits"""
    template: str | None = None
    """prompt template of maths tasks: rlkv, boxed or plain; default: the one of all gates, else the task's"""
    repetition: tuple[int, int] = (400, 40)
    """WINDOW DISTINCT: a text is repetitive if a window holds fewer distinct tokens"""
    batch_size: int = 16
    """texts decoded together"""

    def check(self) -> None:
        """Raise ValueError for values that no run can have."""
        check_positive(self, "limit", "batch_size")
        number_for("", self.max_new_tokens, "--max-new-tokens")
        _ = self.rule

    @property
    def rule(self) -> RepetitionRule:
        """What counts as repetitive."""
        return RepetitionRule(*self.repetition)

    def token_limit(self, task: EvalTask) -> int:
        """Most new tokens of a text of ``task``."""
        return number_for(task.name, self.max_new_tokens, "--max-new-tokens") or task.max_new_tokens

    def chosen_template(self, gates: Iterable[HeadGates]) -> str | None:
        """The template as given, else the one of all gates; None: the tasks' own, which are the published ones."""
        return self.template or trained_template(gates)

    def problems(self, template: str | None) -> list[tuple[EvalTask, list[EvalProblem]]]:
        """Every task with its problems."""
        tasks = find_tasks(self.tasks, self.data)
        return [(task, load_task(task.name, self.data, self.limit, template)) for task in tasks]


def number_for(task: str, values: Sequence[str], option: str) -> int | None:
    """The number of ``task`` in values such as ``4 math500=2``: its own, else that of all tasks, else None.

    Raises:
        ValueError: for a value of another form, a number below 1, a task that is unknown or named twice.
    """
    found: dict[str, int] = {}
    for value in values:
        name, _, number = value.rpartition("=")
        if name:
            find_task(name)
        if not number.isdecimal() or int(number) < 1 or name in found:
            raise ValueError(
                f"{option} {' '.join(values)}: {value!r} is wrong or a second value for the same tasks: give N for all "
                "tasks and TASK=N for single ones, N at least 1"
            )
        found[name] = int(number)
    return found.get(task, found.get(""))
