"""Cells, each measured once: the decodings that all analyses of a study share.

Greedy decoding is deterministic, so seeds that keep the same heads, and analyses that ask for the same cell, share one
measurement.  Its rows are in one file, named by what was measured; a study that was stopped goes on from the files.
Several processes may measure the same study: each takes the cells that no other one is at, and reads what those leave.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.run.runner import Problem, RunSettings, run_method, task_problems
from rlkv.evaluation.study.outcomes import Outcome, outcome_of
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.utils.store import StoreInUseError

POLL_SECONDS = 2.0  # between two looks at a cell that another process measures
OnProgress = Callable[[str, int, int, float], None]


@dataclass(frozen=True)
class Cell:
    """A task under an allocation; compressible heads keep sinks and a window, or what ``policy`` chooses."""

    task: str
    allocation: HeadAllocation
    policy: EvictionPolicy | None = None

    def __post_init__(self) -> None:
        if self.allocation.num_compressible == 0:
            object.__setattr__(self, "policy", None)  # nothing to evict from

    @property
    def key(self) -> str:
        """A short name of all that the cell is."""
        policy = None if self.policy is None else self.policy.describe()
        content = json.dumps([self.allocation.full.int().tolist(), policy], sort_keys=True)
        return f"{self.task.replace(':', '_')}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class StudyTask:
    """A task as it is decoded: its problems, their tokens, and how."""

    name: str
    problems: list[Problem]
    prompt_tokens: list[int]
    settings: RunSettings


def study_task(
    name: str,
    data: Path | None,
    limit: int | None,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    settings: RunSettings,
) -> StudyTask:
    """The problems of a task (:func:`rlkv.evaluation.tasks.load_task`), rendered for the model, with their lengths."""
    problems = task_problems(name, data, limit, seed, tokenizer)
    tokens = [len(ids) for ids in tokenizer([p.prompt for p in problems], add_special_tokens=False).input_ids]
    return StudyTask(name, problems, tokens, settings)


class Bench:
    """Measures cells and hands out what was measured."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[StudyTask],
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        """``folder`` takes the rows; ``facts`` is what they depend on beside the settings of the tasks."""
        self.model, self.tokenizer, self.folder, self.facts = model, tokenizer, folder, facts
        self.tasks = {task.name: task for task in tasks}
        self.labels: dict[Cell, list[str]] = {}
        self._outcomes: dict[Cell, Outcome] = {}

    def full_cell(self, task: str, shape: tuple[int, int]) -> Cell:
        """The full cache."""
        return Cell(task, HeadAllocation(torch.ones(shape, dtype=torch.bool)))

    def measure(self, wanted: Iterable[tuple[str, Cell]], on_progress: OnProgress) -> None:
        """Measure the cells that were not measured yet.

        Args:
            wanted: what to call a cell, and the cell; the same cell may come under several names.
            on_progress: called with the name of a cell, problems done and problems to do in all cells of this call,
                and the accuracy so far of the cell.

        Raises:
            ValueError: if the file of a cell was written with other settings.
        """
        missing: dict[Cell, None] = {}
        for label, cell in wanted:
            names = self.labels.setdefault(cell, [])
            if label not in names:
                names.append(label)
            if cell not in self._outcomes:
                missing[cell] = None
        total = sum(len(self.tasks[cell.task].problems) for cell in missing)
        before = in_use = 0
        waiting = deque(missing)
        while waiting:
            cell = waiting.popleft()
            label = f"{cell.task}: {self.labels[cell][0]}"

            def on_rows(done: int, _: int, accuracy: float, label: str = label, before: int = before) -> None:
                on_progress(label, before + done, total, accuracy)

            try:
                self._outcomes[cell] = self._measure(cell, on_rows)
            except StoreInUseError:
                waiting.append(cell)
                in_use += 1
                if in_use >= len(waiting):  # no other cell is free
                    time.sleep(POLL_SECONDS)
                continue
            in_use = 0
            before += len(self.tasks[cell.task].problems)

    def _measure(self, cell: Cell, on_rows: Callable[[int, int, float], None]) -> Outcome:
        task = self.tasks[cell.task]
        settings = replace(task.settings, cache=replace(task.settings.cache, eviction=cell.policy))
        file = self.folder / f"rows-{cell.key}.jsonl"
        rows = run_method(
            self.model, self.tokenizer, task.problems, cell.allocation, settings, file, self.facts, on_rows
        )
        found = {row["key"]: row for row in rows}
        return outcome_of(cell.key, [found[problem.key] for problem in task.problems])

    def outcome(self, cell: Cell) -> Outcome:
        """What was measured of a cell, which :meth:`measure` must have been asked for."""
        return self._outcomes[cell]

    def text_lengths(self, task: str, outcome: Outcome) -> list[tuple[int, int]]:
        """(prompt, all) tokens that the cache holds when a text ends: its last token is never fed."""
        return [
            (prompt, prompt + len(ids) - 1)
            for prompt, ids in zip(self.tasks[task].prompt_tokens, outcome.tokens, strict=True)
        ]

    def describe(self) -> list[dict[str, Any]]:
        """Every cell that was measured, for ``results.json``."""
        return [
            {
                "task": cell.task,
                "asked_for_as": self.labels[cell],
                "rows": f"rows-{cell.key}.jsonl",
                "full_heads": cell.allocation.full.int().tolist(),
                "policy": None if cell.policy is None else cell.policy.describe(),
                "accuracy": float(outcome.correct.mean()),
                "n": int(outcome.correct.size),
                "kv_share": outcome.kv_share,
                "seconds": round(outcome.seconds, 2),
            }
            for cell, outcome in self._outcomes.items()
        ]
