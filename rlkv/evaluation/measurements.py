"""Conditions of a study, their outcomes over seeds, and rankings of heads.

Greedy decoding is deterministic, so seeds that keep the same heads share one measurement.  Random
draws share the problems: each decodes a part of them, and the parts are joined into one outcome.
Methods are compared at the same bytes of KV: each gets the largest budget that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes, kv_nbytes
from rlkv.evaluation.metrics import Floats, error_mode, mean_with_interval, paired_difference
from rlkv.evaluation.report import FULL_CACHE, ORACLE, RANDOM, Metrics
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation, compression_order, random_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import gated_places
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import share_held
from rlkv.utils.files import read_json
from rlkv.utils.runtime import digest_of

Order = tuple[tuple[int, int], ...]
RESERVED = (ORACLE, RANDOM, FULL_CACHE)
STEPS = 2**14  # ratios are multiples of 1/16384 of the text

# --- outcomes


class Answer(NamedTuple):
    """One greedy text: its verdict, 1.0 or 0.0, tokens, and bytes of KV in use at its end.

    ``mode``: how it failed (:data:`rlkv.evaluation.metrics.MODES`), None where it is right;
    ``kv_bytes_full``: of the full cache for the same tokens; ``kv_bytes_unchanged``: the part of
    both that is of layers without gates.
    """

    correct: float
    mode: str | None
    tokens: NDArray[np.int32]
    kv_bytes: int
    kv_bytes_full: int
    kv_bytes_unchanged: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """One greedy decoding of a task, with an answer per problem in the task's order.

    Attributes:
        key: of the condition; seeds that keep the same heads share one outcome.
        seconds: that decoding took.
        draws: random orders of the heads that share the problems; 1: all problems have the same
            heads.
    """

    key: str
    answers: tuple[Answer, ...]
    seconds: float
    draws: int = 1

    @classmethod
    def of_rows(cls, key: str, rows: Sequence[dict[str, Any]]) -> Outcome:
        """Take rows of :func:`rlkv.evaluation.runner.run_method`, in their order."""
        answers = []
        for row in rows:
            tokens = np.array(row["token_ids"], dtype=np.int32)  # a list takes several times more
            held = (row["kv_bytes"], row["kv_bytes_full"], row.get("kv_bytes_unchanged", 0))
            answers.append(Answer(float(row["correct"]), error_mode(row), tokens, *held))
        return cls(key, tuple(answers), sum(row["seconds"] for row in rows))

    @cached_property
    def correct(self) -> Floats:
        """Return the verdict on each problem, float ``[problems]``."""
        return np.array([answer.correct for answer in self.answers])

    @property
    def modes(self) -> list[str | None]:
        return [answer.mode for answer in self.answers]

    @cached_property
    def lengths(self) -> Floats:
        """Return the output tokens of each problem, float ``[problems]``."""
        return np.array([len(answer.tokens) for answer in self.answers], dtype=np.float64)


def join(parts: Sequence[Outcome]) -> Outcome:
    """Join k parts into one outcome; the i-th one has the problems i, i + k, i + 2k and so on."""
    in_turn = chain.from_iterable(zip_longest(*[part.answers for part in parts]))
    return Outcome(
        key="+".join(part.key for part in parts),
        answers=tuple(answer for answer in in_turn if answer is not None),
        seconds=sum(part.seconds for part in parts),
        draws=len(parts),
    )


def mean_scores(runs: Sequence[Outcome]) -> Floats:
    """Return the accuracy of each problem, mean over the seeds, float ``[problems]``."""
    return np.mean([run.correct for run in runs], axis=0)


def kv_shares(runs: Sequence[Outcome]) -> dict[str, float]:
    """Return bytes of KV in use over those of the full cache, both summed over all answers.

    ``kv_share``: of the whole model; ``kv_share_gated``: of the layers with gates, where there are
    others.
    """
    answers = list(chain.from_iterable(run.answers for run in runs))
    held = sum(answer.kv_bytes for answer in answers)
    full = sum(answer.kv_bytes_full for answer in answers)
    unchanged = sum(answer.kv_bytes_unchanged for answer in answers)
    found = {"kv_share": share_held(held, full)}
    if unchanged:
        found["kv_share_gated"] = share_held(held, full, unchanged)
    return found


def accuracy_of(runs: Sequence[Outcome], full: Outcome | None = None) -> Metrics:
    """Sum up a method in one setting over its seeds.

    Returns:
        ``mean, low, high, n`` over problems, of the mean over seeds; ``seeds``, the accuracy of
        each; ``distinct``, the different measurements among them (seeds with the same heads are
        one); ``draws``, the random orders that share the problems, else 1; those of
        :func:`kv_shares`; ``versus_full``, the paired difference to ``full``, None without it.
    """
    scores = mean_scores(runs)
    return {
        **asdict(mean_with_interval(scores)),
        "seeds": [float(run.correct.mean()) for run in runs],
        "distinct": len({run.key for run in runs}),
        "draws": runs[0].draws,
        **kv_shares(runs),
        "versus_full": None if full is None else asdict(paired_difference(full.correct, scores)),
    }


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Metrics:
    """Return both accuracies and the paired difference, first minus second."""
    first_scores = mean_scores(first)
    second_scores = mean_scores(second)
    test = paired_difference(second_scores, first_scores)
    same_keys = {run.key for run in first} == {run.key for run in second}
    return {
        "first": accuracy_of(first),
        "second": accuracy_of(second),
        "difference": asdict(test),
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": same_keys and not test.changed,
    }


# --- conditions


class Sizes(NamedTuple):
    """Sizes of compressible heads without a policy, as in :class:`rlkv.cache.CacheSettings`."""

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
        return f"{self.task.replace(':', '_')}-{digest_of(content)[:12]}"

    def describe(self) -> dict[str, Any]:
        """Return what compressible heads keep, and which problems are decoded."""
        return {
            "policy": None if self.policy is None else self.policy.describe(),
            "planned": self.planned,
            "sizes": None if self.sizes is None else self.sizes._asdict(),
            "part": self.part,
        }


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
        heads: how many heads of each layer can be compressed; None: all.
    """

    name: str
    shape: tuple[int, int]
    orders: tuple[Order, ...]
    gates: tuple[HeadGates, ...] = ()
    files: tuple[str, ...] = ()
    drawn: bool = False
    heads: Sequence[int] | None = None

    @property
    def num_heads(self) -> int:
        """Return how many heads can be compressed."""
        return len(self.orders[0])

    def allocations(self, sparsity: float) -> list[HeadAllocation]:
        """Return an allocation per seed: the first ``sparsity`` of its order is compressible."""
        return [self._allocation(order, sparsity) for order in self.orders]

    def without_top(self, heads: int) -> list[HeadAllocation]:
        """Return an allocation per seed: only the *last* ``heads`` of its order are compressible.

        Those are the heads that the ranking considers most needed.
        """
        share = heads / self.num_heads
        return [self._allocation(order[::-1], share) for order in self.orders]

    def _allocation(self, order: Order, sparsity: float) -> HeadAllocation:
        return HeadAllocation.from_order(order, *self.shape, sparsity, self.heads)


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
        found.append(Ranking(name, shape, orders, gates, tuple(paths), heads=gates[0].heads))
    return found


class GroundTruth(NamedTuple):
    """Measured need of a model's heads, one after the other and each alone.

    Attributes:
        elimination: (layer, head) of every head, first the one that can go first.
        lost: accuracy that each head costs alone, float ``[layers, KV heads]``.
    """

    elimination: Order
    lost: Tensor


def reference_rankings(
    shape: ModelShape,
    truth: GroundTruth | None,
    random_draws: int,
    heads: Sequence[int] | None = None,
) -> list[Ranking]:
    """Return the elimination order of a ground truth, where there is one, and random draws.

    heads: how many heads of each layer can be compressed; None: all.
    """
    size = (shape.num_layers, shape.num_kv_heads)
    found = []
    if truth is not None:
        found.append(Ranking(ORACLE, size, (truth.elimination,), heads=heads))
    if random_draws:
        draws = tuple(tuple(random_order(*size, seed, heads)) for seed in range(random_draws))
        found.append(Ranking(RANDOM, size, draws, drawn=True, heads=heads))
    return found


def read_truth(path: Path, shape: ModelShape, heads: Sequence[int] | None = None) -> GroundTruth:
    """Read a ground-truth file.

    heads: how many heads of each layer can be compressed; None: all.

    Raises:
        ValueError: if it is not such a file, does not name every head of a model of this shape
            once, or has no number for the accuracy lost by each head.
    """
    size = (shape.num_layers, shape.num_kv_heads)
    try:
        content = read_json(path)
        order = tuple((step["layer"], step["head"]) for step in content["elimination"])
        named = sorted(order)
        lost = np.array(content["accuracy_lost_by_single_head"], dtype=np.float64)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is not a ground-truth file ({error})") from None
    every = list(map(tuple, gated_places(heads, *size).nonzero().tolist()))
    if named != every or lost.shape != size or not np.isfinite(lost).all():
        raise ValueError(
            f"--oracle {path} must eliminate each head of a model with {size[0]} layers x "
            f"{size[1]} KV heads once and say what accuracy each one costs alone: measure it with "
            "inference/tiny_ground_truth.py"
        )
    return GroundTruth(order, torch.from_numpy(lost).float())


def agreement(gates: HeadGates, truth: GroundTruth) -> dict[str, float | None]:
    """Compare gates with a ground truth.

    Returns:
        Spearman correlations of alpha, None where all gates are equal, and the share of the
        oracle's full heads at 0.5 that the gates keep full too.
    """
    position = torch.zeros_like(gates.alpha)
    for place, head in enumerate(truth.elimination):
        position[head] = place
    size = (gates.num_layers, gates.num_kv_heads)
    oracle = HeadAllocation.from_order(truth.elimination, *size, 0.5, gates.heads)
    gated = gates.gated
    return {
        "spearman_single_head": _correlation(gates.alpha[gated], truth.lost[gated]),
        "spearman_elimination": _correlation(gates.alpha[gated], position[gated]),
        "overlap_at_0.5": HeadAllocation.from_gates(gates, 0.5).overlap(oracle),
    }


def _correlation(a: Tensor, b: Tensor) -> float | None:
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return None
    return float(spearmanr(a, b).statistic)


# --- the same bytes


@dataclass(frozen=True)
class Texts:
    """Texts of which methods may hold a share of the full cache's bytes.

    ``lengths``: (prompt, all) cached tokens of each; ``cache``: sinks and window, and how prompts
    are read.  ``match_ratio`` and ``match_heads`` return the largest budget that holds at most
    ``share``, or None; ``full`` is bool ``[layers, KV heads]``, the full heads.
    """

    lengths: list[tuple[int, int]]
    size: KVSizes
    cache: CacheSettings

    def held(self, policy: EvictionPolicy | None, full: Tensor, fixed: bool = False) -> float:
        """Return bytes in use over those of the full cache, both summed over texts.

        They are those of the layers with gates, which alone can hold less.

        fixed: a ratio is of each text's length from its start, not of the tokens read so far.
        """
        settings = replace(self.cache, eviction=policy)
        prompts, tokens = (torch.tensor(column) for column in zip(*self.lengths, strict=True))
        planned = tokens if fixed else None
        held, whole = kv_nbytes(settings, full, self.size, prompts, tokens, planned)
        return float(held.sum() / whole.sum())

    def match_ratio(
        self, share: float, policy: EvictionPolicy, full: Tensor, fixed: bool = False
    ) -> EvictionPolicy | None:
        """Return ``policy`` with the largest ratio of the text so far, or of all of it."""

        def sized(steps: int) -> EvictionPolicy:
            return replace(policy, budget=None, ratio=steps / STEPS)

        fitting = bisect_right(
            range(STEPS + 1), share, key=lambda steps: self.held(sized(steps), full, fixed)
        )
        return sized(fitting - 1) if fitting else None

    def match_heads(self, share: float, order: Order, shape: tuple[int, int]) -> Tensor | None:
        """Return the full heads when heads are compressed in ``order`` until the rest fits.

        Compressed heads keep sinks and a window.
        """
        full = torch.ones(shape, dtype=torch.bool)
        for head in order:
            if self.held(None, full) <= share:
                return full
            full[head] = False
        return full if self.held(None, full) <= share else None


def split_heads(
    order: Order, share: float, head_share: float, shape: tuple[int, int]
) -> Tensor | None:
    """Return full heads such that the others may keep ``head_share * share`` of a text.

    The smaller ``head_share``, the more heads stay full.  None if all heads would have to be
    compressible.
    """
    total = len(order)
    compressible = round(total * (1 - share) / (1 - head_share * share))
    if compressible >= total:
        return None
    full = torch.ones(shape, dtype=torch.bool)
    for head in order[:compressible]:
        full[head] = False
    return full
