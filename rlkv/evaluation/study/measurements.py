"""Conditions, each measured once.

Greedy decoding is deterministic, so seeds that keep the same heads share one measurement.  Its rows are in one file; a
study that was stopped resumes from the files.  Of several processes each takes conditions that no other one is at.
Random draws share the problems: each decodes a part of them, and the parts are joined into one outcome.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.run.runner import Problem, RunSettings, run_method
from rlkv.evaluation.study.outcomes import Outcome, join, outcome_of
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.provenance import digest
from rlkv.utils.store import StoreInUseError

POLL_SECONDS = 2.0  # between two looks at a condition that another process measures


class Sizes(NamedTuple):
    """What compressible heads keep without a policy, as :class:`rlkv.cache.CacheSettings` has it."""

    sink: int
    window: int
    protect_prompt: bool = False

    def __str__(self) -> str:
        """``16 + 64``, ``prompt + 64``, or ``prompt (at least 16) + 64``."""
        at_least = f" (at least {self.sink})" if self.sink else ""
        return f"{f'prompt{at_least}' if self.protect_prompt else self.sink} + {self.window}"


@dataclass(frozen=True)
class Condition:
    """A task under an allocation; compressible heads keep sinks and a window, or what ``policy`` chooses.

    ``planned``: for each problem the length of a text, of which the policy's ratio is taken from the start.
    ``sizes``: in place of the task's own sinks and window.
    ``part``: (i, k), only the problems i, i + k, i + 2k and so on; None: all.
    """

    task: str
    allocation: HeadAllocation
    policy: EvictionPolicy | None = None
    planned: tuple[int, ...] | None = None
    sizes: Sizes | None = None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.allocation.num_compressible == 0:
            for name in ("policy", "planned", "sizes"):  # nothing to evict from
                object.__setattr__(self, name, None)

    @property
    def key(self) -> str:
        """A short name of all that the condition is."""
        policy = None if self.policy is None else self.policy.describe()
        further = [self.planned, None if self.sizes is None else self.sizes._asdict(), self.part]
        while further and further[-1] is None:  # keys, which name files, stay what they were before there was a field
            further.pop()
        content = json.dumps([self.allocation.full.int().tolist(), policy, *further], sort_keys=True)
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
        for label, condition in dict.fromkeys(requests):
            self.labels.setdefault(condition, []).append(label)
        waiting = deque(condition for condition in self.labels if condition not in self._outcomes)
        total = sum(len(self._problems(condition)) for condition in waiting)
        before = in_use = 0
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
                before += len(self._problems(condition))

    def _problems(self, condition: Condition) -> list[Problem]:
        first, step = condition.part or (0, 1)
        return self.tasks[condition.task].problems[first::step]

    def _measure(self, condition: Condition, bar: ProgressBar, before: int) -> Outcome:
        task, heads = self.tasks[condition.task], condition.allocation
        label = f"{task.name}: {self.labels[condition][0]}"

        def on_rows(done: int, _: int, accuracy: float) -> None:
            bar.update(before + done, title=label, note=f"accuracy {accuracy:.3f}")

        sizes = {} if condition.sizes is None else condition.sizes._asdict()
        cache = replace(task.settings.cache, **sizes).with_policy(condition.policy)
        rank, ranks = condition.part or (0, 1)
        settings = replace(task.settings, cache=cache, planned=condition.planned, rank=rank, ranks=ranks)
        file = self.folder / f"rows-{condition.key}.jsonl"
        rows = run_method(self.model, self.tokenizer, task.problems, heads, settings, file, self.facts, on_rows)
        found = {row["key"]: row for row in rows}
        return outcome_of(condition.key, [found[problem.key] for problem in self._problems(condition)])

    def outcome(self, condition: Condition) -> Outcome:
        """What was measured of a condition, which :meth:`measure` must have been asked for."""
        return self._outcomes[condition]

    def outcomes(self, conditions: Sequence[Condition]) -> list[Outcome]:
        """An outcome per condition; of conditions that are parts of a task, one of all problems."""
        found = [self.outcome(condition) for condition in conditions]
        return found if conditions[0].part is None else [join(found)]

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
                "planned": condition.planned,
                "sizes": None if condition.sizes is None else condition.sizes._asdict(),
                "part": condition.part,
                "accuracy": float(outcome.correct.mean()),
                "n": int(outcome.correct.size),
                "kv_share": outcome.kv_share,
                "seconds": round(outcome.seconds, 2),
            }
            for condition, outcome in self._outcomes.items()
        ]
