"""Conditions, each measured once, and what was measured of them, problem by problem.

Greedy decoding is deterministic, so seeds that keep the same heads share one measurement.  Its rows are in one file; a
study that was stopped resumes from the files.  Of several processes each takes conditions that no other one is at.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.run.runner import Problem, RunSettings, run_method
from rlkv.evaluation.stats.metrics import error_mode, mean_with_interval, paired_difference
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.provenance import digest
from rlkv.utils.store import StoreInUseError

POLL_SECONDS = 2.0  # between two looks at a condition that another process measures
Floats = NDArray[np.float64]
Metrics = dict[str, Any]  # JSON-able


@dataclass(frozen=True, eq=False)
class Outcome:
    """One greedy decoding of a task, with an entry per problem in the task's order.

    Attributes:
        key: of the condition; seeds that keep the same heads share one outcome.
        correct: 1.0 or 0.0.
        modes: how the answer failed (:data:`rlkv.evaluation.stats.metrics.MODES`), None where it is right.
        tokens: the output tokens.
        kv_bytes, kv_bytes_full: bytes of KV in use at the end of each text, and of the full cache for the same tokens.
        seconds: that decoding took.
    """

    key: str
    correct: Floats
    modes: tuple[str | None, ...]
    tokens: tuple[NDArray[np.int32], ...]
    kv_bytes: NDArray[np.int64]
    kv_bytes_full: NDArray[np.int64]
    seconds: float

    @property
    def lengths(self) -> Floats:
        """Output tokens of each problem."""
        return np.array([len(ids) for ids in self.tokens], dtype=np.float64)

    @property
    def kv_share(self) -> float:
        """Bytes of KV in use over those of the full cache, both summed over the problems."""
        return float(self.kv_bytes.sum() / self.kv_bytes_full.sum())


def outcome_of(key: str, rows: Sequence[dict[str, Any]]) -> Outcome:
    """The rows of :func:`rlkv.evaluation.run.runner.run_method`, in the order in which they are given."""
    return Outcome(
        key,
        np.array([float(row["correct"]) for row in rows]),
        tuple(map(error_mode, rows)),
        tuple(np.array(row["token_ids"], dtype=np.int32) for row in rows),
        np.array([row["kv_bytes"] for row in rows], dtype=np.int64),
        np.array([row["kv_bytes_full"] for row in rows], dtype=np.int64),
        sum(row["seconds"] for row in rows),
    )


def mean_scores(runs: Sequence[Outcome]) -> Floats:
    """Accuracy of each problem, mean over the seeds, float ``[problems]``."""
    return np.mean([run.correct for run in runs], axis=0)


def accuracy_of(runs: Sequence[Outcome], full: Outcome | None = None) -> Metrics:
    """A method in one setting, over its seeds ``runs``.

    Returns:
        ``mean, low, high, n`` over problems, of the mean over seeds; ``seeds``, the accuracy of each; ``distinct``, the
        different measurements among them (seeds with the same heads are one); ``kv_share``, bytes of KV in use over
        those of the full cache; ``versus_full``, the paired difference to ``full``, None without it.
    """
    scores = mean_scores(runs)
    held, whole = (sum(int(getattr(run, name).sum()) for run in runs) for name in ("kv_bytes", "kv_bytes_full"))
    return {
        **asdict(mean_with_interval(scores)),
        "seeds": [float(run.correct.mean()) for run in runs],
        "distinct": len({run.key for run in runs}),
        "kv_share": held / whole,
        "versus_full": None if full is None else asdict(paired_difference(full.correct, scores)),
    }


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Metrics:
    """Both accuracies and the paired difference, first minus second.

    ``per_seed`` has the difference of each set of heads to the other's mean over seeds, seeds with the same heads once.
    """
    means = [float(mean_scores(runs).mean()) for runs in (first, second)]
    distinct = [{run.key: float(run.correct.mean()) for run in runs} for runs in (first, second)]
    test = paired_difference(mean_scores(second), mean_scores(first))
    return {
        "first": accuracy_of(first),
        "second": accuracy_of(second),
        "difference": asdict(test),
        "per_seed": {
            "first": [accuracy - means[1] for accuracy in distinct[0].values()],
            "second": [means[0] - accuracy for accuracy in distinct[1].values()],
        },
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": distinct[0].keys() == distinct[1].keys() and not test.changed,
    }


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
    """

    task: str
    allocation: HeadAllocation
    policy: EvictionPolicy | None = None
    planned: tuple[int, ...] | None = None
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        if self.allocation.num_compressible == 0:
            for name in ("policy", "planned", "sizes"):  # nothing to evict from
                object.__setattr__(self, name, None)

    @property
    def key(self) -> str:
        """A short name of all that the condition is."""
        policy = None if self.policy is None else self.policy.describe()
        further = [self.planned, None if self.sizes is None else self.sizes._asdict()]
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
        total = sum(len(self.tasks[condition.task].problems) for condition in waiting)
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
                before += len(self.tasks[condition.task].problems)

    def _measure(self, condition: Condition, bar: ProgressBar, before: int) -> Outcome:
        task, heads = self.tasks[condition.task], condition.allocation
        label = f"{task.name}: {self.labels[condition][0]}"

        def on_rows(done: int, _: int, accuracy: float) -> None:
            bar.update(before + done, title=label, note=f"accuracy {accuracy:.3f}")

        sizes = {} if condition.sizes is None else condition.sizes._asdict()
        cache = replace(task.settings.cache, **sizes).with_policy(condition.policy)
        settings = replace(task.settings, cache=cache, planned=condition.planned)
        file = self.folder / f"rows-{condition.key}.jsonl"
        rows = run_method(self.model, self.tokenizer, task.problems, heads, settings, file, self.facts, on_rows)
        found = {row["key"]: row for row in rows}
        return outcome_of(condition.key, [found[problem.key] for problem in task.problems])

    def outcome(self, condition: Condition) -> Outcome:
        """What was measured of a condition, which :meth:`measure` must have been asked for."""
        return self._outcomes[condition]

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
                "accuracy": float(outcome.correct.mean()),
                "n": int(outcome.correct.size),
                "kv_share": outcome.kv_share,
                "seconds": round(outcome.seconds, 2),
            }
            for condition, outcome in self._outcomes.items()
        ]
