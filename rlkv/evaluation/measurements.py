"""Rankings of heads, conditions that are measured once, and their outcomes over seeds.

Greedy decoding is deterministic, so seeds that keep the same heads share one measurement.  Its rows
are in one file; a study that was stopped resumes from the files.  Of several processes each takes
conditions that no other one is at.  Random draws share the problems: each decodes a part of them,
and the parts are joined into one outcome.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.evaluation.metrics import Floats, error_mode, mean_with_interval, paired_difference
from rlkv.evaluation.report import FULL_CACHE, ORACLE, RANDOM, Metrics
from rlkv.evaluation.runner import Problem, RunSettings, run_method
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation, compression_order, random_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.files import read_json
from rlkv.utils.progress import ProgressBar, progress_bar
from rlkv.utils.runtime import digest
from rlkv.utils.store import StoreInUseError

POLL_SECONDS = 2.0  # between two looks at a condition that another process measures
Order = tuple[tuple[int, int], ...]
RESERVED = (ORACLE, RANDOM, FULL_CACHE)

# --- outcomes


@dataclass(frozen=True, eq=False)
class Outcome:
    """One greedy decoding of a task, with an entry per problem in the task's order.

    Attributes:
        key: of the condition; seeds that keep the same heads share one outcome.
        correct: 1.0 or 0.0.
        modes: how the answer failed (:data:`rlkv.evaluation.metrics.MODES`), None where it is
            right.
        tokens: the output tokens.
        kv_bytes, kv_bytes_full: bytes of KV in use at the end of each text, and of the full cache
            for the same tokens.
        seconds: that decoding took.
        draws: random orders of the heads that share the problems; 1: all problems have the same
            heads.
    """

    key: str
    correct: Floats
    modes: tuple[str | None, ...]
    tokens: tuple[NDArray[np.int32], ...]
    kv_bytes: NDArray[np.int64]
    kv_bytes_full: NDArray[np.int64]
    seconds: float
    draws: int = 1

    @property
    def lengths(self) -> Floats:
        """Return the output tokens of each problem."""
        return np.array([len(ids) for ids in self.tokens], dtype=np.float64)

    @property
    def kv_share(self) -> float:
        """Return bytes of KV in use over those of the full cache, both summed over the problems."""
        return float(self.kv_bytes.sum() / self.kv_bytes_full.sum())


def outcome_of(key: str, rows: Sequence[dict[str, Any]]) -> Outcome:
    """Return rows of :func:`rlkv.evaluation.runner.run_method` as an outcome, in their order."""
    return Outcome(
        key=key,
        correct=np.array([float(row["correct"]) for row in rows]),
        modes=tuple(map(error_mode, rows)),
        tokens=tuple(np.array(row["token_ids"], dtype=np.int32) for row in rows),
        kv_bytes=np.array([row["kv_bytes"] for row in rows], dtype=np.int64),
        kv_bytes_full=np.array([row["kv_bytes_full"] for row in rows], dtype=np.int64),
        seconds=sum(row["seconds"] for row in rows),
    )


def join(parts: Sequence[Outcome]) -> Outcome:
    """Join k parts into one outcome; the i-th one has the problems i, i + k, i + 2k and so on."""
    total = sum(part.correct.size for part in parts)
    problems = [np.arange(first, total, len(parts)) for first in range(len(parts))]
    order = np.argsort(np.concatenate(problems))
    modes = list(chain.from_iterable(part.modes for part in parts))
    tokens = list(chain.from_iterable(part.tokens for part in parts))
    return Outcome(
        key="+".join(part.key for part in parts),
        correct=np.concatenate([part.correct for part in parts])[order],
        modes=tuple(modes[place] for place in order),
        tokens=tuple(tokens[place] for place in order),
        kv_bytes=np.concatenate([part.kv_bytes for part in parts])[order],
        kv_bytes_full=np.concatenate([part.kv_bytes_full for part in parts])[order],
        seconds=sum(part.seconds for part in parts),
        draws=len(parts),
    )


def mean_scores(runs: Sequence[Outcome]) -> Floats:
    """Return the accuracy of each problem, mean over the seeds, float ``[problems]``."""
    return np.mean([run.correct for run in runs], axis=0)


def accuracy_of(runs: Sequence[Outcome], full: Outcome | None = None) -> Metrics:
    """Sum up a method in one setting over its seeds.

    Returns:
        ``mean, low, high, n`` over problems, of the mean over seeds; ``seeds``, the accuracy of
        each; ``distinct``, the different measurements among them (seeds with the same heads are
        one); ``draws``, the random orders that share the problems, else 1; ``kv_share``, bytes of
        KV in use over those of the full cache; ``versus_full``, the paired difference to ``full``,
        None without it.
    """
    scores = mean_scores(runs)
    held = sum(int(run.kv_bytes.sum()) for run in runs)
    whole = sum(int(run.kv_bytes_full.sum()) for run in runs)
    return {
        **asdict(mean_with_interval(scores)),
        "seeds": [float(run.correct.mean()) for run in runs],
        "distinct": len({run.key for run in runs}),
        "draws": runs[0].draws,
        "kv_share": held / whole,
        "versus_full": None if full is None else asdict(paired_difference(full.correct, scores)),
    }


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Metrics:
    """Return both accuracies and the paired difference, first minus second.

    ``per_seed`` has the difference of each set of heads to the other's mean over seeds, seeds with
    the same heads once; empty for draws that share the problems, of which none has decoded all of
    them.
    """
    first_by_heads = {run.key: float(run.correct.mean()) for run in first if run.draws == 1}
    second_by_heads = {run.key: float(run.correct.mean()) for run in second if run.draws == 1}
    first_scores = mean_scores(first)
    second_scores = mean_scores(second)
    test = paired_difference(second_scores, first_scores)
    same_keys = {run.key for run in first} == {run.key for run in second}
    return {
        "first": accuracy_of(first),
        "second": accuracy_of(second),
        "difference": asdict(test),
        "per_seed": {
            "first": [own - float(second_scores.mean()) for own in first_by_heads.values()],
            "second": [float(first_scores.mean()) - own for own in second_by_heads.values()],
        },
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": same_keys and not test.changed,
    }


# --- conditions


class Sizes(NamedTuple):
    """What compressible heads keep without a policy, as in :class:`rlkv.cache.CacheSettings`."""

    sink: int
    window: int
    protect_prompt: bool = False

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Read ``16+64``, or ``prompt+64`` for the whole prompt in place of the sinks.

        Raises:
            ValueError: for another form, or a window of 0.
        """
        first, _, window = text.partition("+")
        is_prompt = first == "prompt"
        if not (is_prompt or first.isdecimal()) or not window.isdecimal() or int(window) < 1:
            raise ValueError(
                f"--sizes {text!r} must be SINK+WINDOW or prompt+WINDOW, such as 16+64, with a "
                "window of at least 1"
            )
        return cls(0 if is_prompt else int(first), int(window), is_prompt)

    def __str__(self) -> str:
        return f"{'prompt' if self.protect_prompt else self.sink}+{self.window}"


@dataclass(frozen=True)
class Condition:
    """A task under an allocation; compressible heads keep sinks and a window, or a policy's choice.

    ``planned``: for each problem the length of a text, of which the policy's ratio is taken from
    the start.  ``sizes``: in place of the task's own sinks and window.  ``part``: (i, k), only the
    problems i, i + k, i + 2k and so on; None: all.
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
        """Return a short name of all that the condition is, by which its file of rows is called."""
        content = [self.allocation.full.int().tolist(), *self.describe().values()]
        text = json.dumps(content, sort_keys=True)
        return f"{self.task.replace(':', '_')}-{digest(text.encode())[:12]}"

    def describe(self) -> dict[str, Any]:
        """Return what compressible heads keep, and which problems are decoded."""
        return {
            "policy": None if self.policy is None else self.policy.describe(),
            "planned": self.planned,
            "sizes": None if self.sizes is None else self.sizes._asdict(),
            "part": self.part,
        }


@dataclass(frozen=True)
class StudyTask:
    """A task as it is decoded."""

    name: str
    problems: list[Problem]
    settings: RunSettings

    def share_of(self, condition: Condition) -> list[Problem]:
        """Return the problems of a condition."""
        first, step = condition.part or (0, 1)
        return self.problems[first::step]


class Measurements:
    """Measure conditions, with rows in ``folder``, and hand out what was measured."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[StudyTask],
        folder: Path,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.folder = folder
        self.tasks = {task.name: task for task in tasks}
        self.labels: dict[Condition, list[str]] = {}
        self._outcomes: dict[Condition, Outcome] = {}

    def measure(self, title: str, requests: Iterable[tuple[str, Condition]]) -> None:
        """Measure the (label, condition) ``requests`` that were not measured yet."""
        for label, condition in dict.fromkeys(requests):
            self.labels.setdefault(condition, []).append(label)
        waiting = deque(condition for condition in self.labels if condition not in self._outcomes)
        sizes = {of: len(self.tasks[of.task].share_of(of)) for of in waiting}
        before = 0
        in_use = 0  # conditions in a row that other processes are at
        with progress_bar(title, "problems", sum(sizes.values())) as bar:
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
                before += sizes[condition]

    def _measure(self, condition: Condition, bar: ProgressBar, before: int) -> Outcome:
        task = self.tasks[condition.task]
        label = f"{task.name}: {self.labels[condition][0]}"

        def on_rows(done: int, _: int, accuracy: float) -> None:
            bar.update(before + done, title=label, note=f"accuracy {accuracy:.3f}")

        sizes = {} if condition.sizes is None else condition.sizes._asdict()
        cache = replace(task.settings.cache, **sizes).with_policy(condition.policy)
        rows = run_method(
            self.model,
            self.tokenizer,
            task.share_of(condition),
            condition.allocation,
            replace(task.settings, cache=cache, planned=condition.planned),
            self.folder / f"rows-{condition.key}.jsonl",
            on_rows,
        )
        return outcome_of(condition.key, rows)

    def outcome(self, condition: Condition) -> Outcome:
        """Return what :meth:`measure` found under a condition."""
        return self._outcomes[condition]

    def outcomes(self, conditions: Sequence[Condition]) -> list[Outcome]:
        """Return an outcome per condition; a single one if they are parts of a task."""
        found = [self.outcome(condition) for condition in conditions]
        return found if conditions[0].part is None else [join(found)]

    def describe(self) -> list[dict[str, Any]]:
        """Return every condition that was measured, for ``results.json``."""
        found = []
        for condition, outcome in self._outcomes.items():
            described = {
                "task": condition.task,
                "requested_as": self.labels[condition],
                "rows": f"rows-{condition.key}.jsonl",
                "full_heads": condition.allocation.full.int().tolist(),
                **condition.describe(),
                "accuracy": float(outcome.correct.mean()),
                "n": int(outcome.correct.size),
                "kv_share": outcome.kv_share,
                "seconds": round(outcome.seconds, 2),
            }
            found.append(described)
        return found


# --- rankings


@dataclass(frozen=True)
class Ranking:
    """An order in which a method compresses the heads of a model.

    Attributes:
        name: what tables call it.
        shape: (layers, KV heads).
        orders: for each seed or draw (layer, head) from the first to compress to the last.
        gates, files: for each seed, where the order is that of a gates file; else empty.
        drawn: the orders are random draws, which share the problems of a task; else each one
            decodes all of them.
    """

    name: str
    shape: tuple[int, int]
    orders: tuple[Order, ...]
    gates: tuple[HeadGates, ...] = ()
    files: tuple[str, ...] = ()
    drawn: bool = False

    def allocations(self, sparsity: float) -> list[HeadAllocation]:
        """Return an allocation per seed: the first ``sparsity`` of its order is compressible."""
        return [HeadAllocation.from_order(order, *self.shape, sparsity) for order in self.orders]

    def without_top(self, heads: int) -> list[HeadAllocation]:
        """Return an allocation per seed: only the *last* ``heads`` of its order are compressible.

        Those are the heads that the ranking considers most needed.
        """
        share = heads / (self.shape[0] * self.shape[1])
        return [HeadAllocation.from_order(order[::-1], *self.shape, share) for order in self.orders]


def group_by_name(
    items: Sequence[str], option: str, taken: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return the files of ``NAME=FILE`` texts by name; several files are seeds of one method.

    Raises:
        ValueError: for a text of another form, or a name that is ``taken``.
    """
    files: dict[str, list[str]] = {}
    for item in items:
        name, separator, file = item.partition("=")
        if not separator or not name.strip() or not file:
            raise ValueError(
                f"{option} {item!r} must be NAME=FILE, such as RLKV=results/demo/gates.pt"
            )
        if name in taken:
            raise ValueError(f"{option}: the name {name!r} is taken: give these gates another one")
        files.setdefault(name, []).append(file)
    return files


def gates_rankings(files: dict[str, list[str]]) -> list[Ranking]:
    """Return a ranking per name with an order per gates file."""
    found = []
    for name, paths in files.items():
        gates = tuple(HeadGates.load(path) for path in paths)
        orders = tuple(tuple(compression_order(each)) for each in gates)
        shape = (gates[0].num_layers, gates[0].num_kv_heads)
        found.append(Ranking(name, shape, orders, gates, tuple(paths)))
    return found


def reference_rankings(
    shape: ModelShape, truth: dict[str, Any] | None, random_draws: int
) -> list[Ranking]:
    """Return the elimination order of a ground truth, where there is one, and random draws."""
    size = (shape.num_layers, shape.num_kv_heads)
    found = []
    if truth is not None:
        found.append(Ranking(ORACLE, size, (tuple(elimination_order(truth)),)))
    if random_draws:
        draws = tuple(tuple(random_order(*size, seed)) for seed in range(random_draws))
        found.append(Ranking(RANDOM, size, draws, drawn=True))
    return found


def elimination_order(truth: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (layer, head) of every head, first the one that can go first."""
    return [(step["layer"], step["head"]) for step in truth["elimination"]]


def read_truth(path: Path, shape: ModelShape) -> dict[str, Any]:
    """Read a ground-truth file.

    Raises:
        ValueError: if it is not such a file, does not name every head of a model of this shape
            once, or has no number for the accuracy lost by each head.
    """
    size = (shape.num_layers, shape.num_kv_heads)
    try:
        truth: dict[str, Any] = read_json(path)
        heads = sorted(elimination_order(truth))
        lost = np.array(truth["accuracy_lost_by_single_head"], dtype=np.float64)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is not a ground-truth file ({error})") from None
    if heads != list(np.ndindex(size)) or lost.shape != size or not np.isfinite(lost).all():
        raise ValueError(
            f"--oracle {path} must eliminate each head of a model with {size[0]} layers x "
            f"{size[1]} KV heads once and say what accuracy each one costs alone: measure it with "
            "inference/tiny_ground_truth.py"
        )
    return truth


def agreement(gates: HeadGates, truth: dict[str, Any]) -> dict[str, float | None]:
    """Compare gates with a ground-truth file.

    Returns:
        Spearman correlations of alpha, None where all gates are equal, and the share of the
        oracle's full heads at 0.5 that the gates keep full too.
    """
    order = elimination_order(truth)
    position = torch.zeros_like(gates.alpha)
    for place, head in enumerate(order):
        position[head] = place
    oracle = HeadAllocation.from_order(order, gates.num_layers, gates.num_kv_heads, 0.5)
    lost = torch.tensor(truth["accuracy_lost_by_single_head"])
    return {
        "spearman_single_head": _correlation(gates.alpha, lost),
        "spearman_elimination": _correlation(gates.alpha, position),
        "overlap_at_0.5": HeadAllocation.from_gates(gates, 0.5).overlap(oracle),
    }


def _correlation(a: Tensor, b: Tensor) -> float | None:
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return None
    return float(spearmanr(a.flatten(), b.flatten()).statistic)
