"""Conditions, each measured once: the decodings that all analyses of a study share.

Greedy decoding is deterministic, so seeds that keep the same heads share one measurement.  Its rows are in one file; a
study that was stopped resumes from the files.  Of several processes each takes conditions that no other one is at.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.run.runner import Problem, RunSettings, run_method
from rlkv.evaluation.study.outcomes import Outcome, outcome_of
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.provenance import digest
from rlkv.utils.store import StoreInUseError

POLL_SECONDS = 2.0  # between two looks at a condition that another process measures


@dataclass(frozen=True)
class Condition:
    """A task under an allocation; compressible heads keep sinks and a window, or what ``policy`` chooses."""

    task: str
    allocation: HeadAllocation
    policy: EvictionPolicy | None = None

    def __post_init__(self) -> None:
        if self.allocation.num_compressible == 0:
            object.__setattr__(self, "policy", None)  # nothing to evict from

    @property
    def key(self) -> str:
        """A short name of all that the condition is."""
        policy = None if self.policy is None else self.policy.describe()
        content = json.dumps([self.allocation.full.int().tolist(), policy], sort_keys=True)
        return f"{self.task.replace(':', '_')}-{digest(content.encode())[:12]}"


ConditionRequests = Iterable[tuple[str, Condition]]


@dataclass(frozen=True)
class StudyTask:
    """A task as it is decoded: its problems, the tokens of their prompts, and how."""

    name: str
    problems: list[Problem]
    prompt_tokens: list[int]
    settings: RunSettings


class Measurements:
    """Measures conditions, with rows in ``folder``, and hands out what was measured; rows depend on ``facts`` too."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[StudyTask],
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.folder, self.facts = model, tokenizer, folder, facts
        self.tasks = {task.name: task for task in tasks}
        self.labels: dict[Condition, list[str]] = {}
        self._outcomes: dict[Condition, Outcome] = {}

    def measure(self, title: str, requests: ConditionRequests) -> None:
        """Measure the (name, condition) ``requests`` that were not measured yet, with a progress bar."""
        requested = dict.fromkeys(requests)
        for label, condition in requested:
            self.labels.setdefault(condition, []).append(label)
        missing = dict.fromkeys(condition for _, condition in requested if condition not in self._outcomes)
        total = sum(len(self.tasks[condition.task].problems) for condition in missing)
        before = in_use = 0
        waiting = deque(missing)
        with progress_bar(title, "problems", total) as bar:
            while waiting:
                condition = waiting.popleft()
                try:
                    self._outcomes[condition] = self._measure(condition, bar, before)
                except StoreInUseError:
                    waiting.append(condition)
                    in_use += 1
                    if in_use >= len(waiting):  # no other condition is free
                        time.sleep(POLL_SECONDS)
                    continue
                in_use = 0
                before += len(self.tasks[condition.task].problems)

    def _measure(self, condition: Condition, bar: ProgressBar, before: int) -> Outcome:
        task, heads = self.tasks[condition.task], condition.allocation
        label = f"{task.name}: {self.labels[condition][0]}"

        def on_rows(done: int, _: int, accuracy: float) -> None:
            bar.update(before + done, title=label, note=f"accuracy {accuracy:.3f}")

        settings = replace(task.settings, cache=replace(task.settings.cache, eviction=condition.policy))
        file = self.folder / f"rows-{condition.key}.jsonl"
        rows = run_method(self.model, self.tokenizer, task.problems, heads, settings, file, self.facts, on_rows)
        found = {row["key"]: row for row in rows}
        return outcome_of(condition.key, [found[problem.key] for problem in task.problems])

    def outcome(self, condition: Condition) -> Outcome:
        """What was measured of a condition, which :meth:`measure` must have been asked for."""
        return self._outcomes[condition]

    def full_condition(self, task: str, shape: tuple[int, int]) -> Condition:
        """The full cache."""
        return Condition(task, HeadAllocation(torch.ones(shape, dtype=torch.bool)))

    def text_lengths(self, task: str, outcome: Outcome) -> list[tuple[int, int]]:
        """(prompt, all) tokens that the cache holds when a text ends: its last token is never fed."""
        texts = zip(self.tasks[task].prompt_tokens, outcome.tokens, strict=True)
        return [(prompt, prompt + len(ids) - 1) for prompt, ids in texts]

    def describe(self) -> list[dict[str, Any]]:
        """Every condition that was measured, for ``results.json``."""
        return [
            {
                "task": condition.task,
                "requested_as": self.labels[condition],
                "rows": f"rows-{condition.key}.jsonl",
                "full_heads": condition.allocation.full.int().tolist(),
                "policy": None if condition.policy is None else condition.policy.describe(),
                "accuracy": float(outcome.correct.mean()),
                "n": int(outcome.correct.size),
                "kv_share": outcome.kv_share,
                "seconds": round(outcome.seconds, 2),
            }
            for condition, outcome in self._outcomes.items()
        ]
