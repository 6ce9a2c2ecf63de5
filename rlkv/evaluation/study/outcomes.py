"""What was measured of a condition, problem by problem, and how outcomes are summed up and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkv.evaluation.stats.metrics import Floats, error_mode, mean_with_interval, paired_difference

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
        draws: random orders of the heads that share the problems; 1: all problems have the same heads.
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


def join(parts: Sequence[Outcome]) -> Outcome:
    """One outcome of all problems; of k ``parts`` the i-th one has the problems i, i + k, i + 2k and so on."""
    count, total = len(parts), sum(part.correct.size for part in parts)
    order = np.argsort([problem for i in range(count) for problem in range(i, total, count)])
    modes, tokens = ([value for part in parts for value in getattr(part, name)] for name in ("modes", "tokens"))
    return Outcome(
        "+".join(part.key for part in parts),
        np.concatenate([part.correct for part in parts])[order],
        tuple(modes[place] for place in order),
        tuple(tokens[place] for place in order),
        np.concatenate([part.kv_bytes for part in parts])[order],
        np.concatenate([part.kv_bytes_full for part in parts])[order],
        sum(part.seconds for part in parts),
        count,
    )


def mean_scores(runs: Sequence[Outcome]) -> Floats:
    """Accuracy of each problem, mean over the seeds, float ``[problems]``."""
    return np.mean([run.correct for run in runs], axis=0)


def accuracy_of(runs: Sequence[Outcome], full: Outcome | None = None) -> Metrics:
    """A method in one setting, over its seeds ``runs``.

    Returns:
        ``mean, low, high, n`` over problems, of the mean over seeds; ``seeds``, the accuracy of each; ``distinct``, the
        different measurements among them (seeds with the same heads are one); ``draws``, the random orders that share
        the problems, else 1; ``kv_share``, bytes of KV in use over those of the full cache; ``versus_full``, the paired
        difference to ``full``, None without it.
    """
    scores = mean_scores(runs)
    held, whole = (sum(int(getattr(run, name).sum()) for run in runs) for name in ("kv_bytes", "kv_bytes_full"))
    return {
        **asdict(mean_with_interval(scores)),
        "seeds": [float(run.correct.mean()) for run in runs],
        "distinct": len({run.key for run in runs}),
        "draws": runs[0].draws,
        "kv_share": held / whole,
        "versus_full": None if full is None else asdict(paired_difference(full.correct, scores)),
    }


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Metrics:
    """Both accuracies and the paired difference, first minus second.

    ``per_seed`` has the difference of each set of heads to the other's mean over seeds, seeds with the same heads once;
    empty for draws that share the problems, of which none has decoded all of them.
    """
    means = [float(mean_scores(runs).mean()) for runs in (first, second)]
    distinct = [{run.key: float(run.correct.mean()) for run in runs} for runs in (first, second)]
    whole = [[] if runs[0].draws > 1 else list(of.values()) for runs, of in zip((first, second), distinct, strict=True)]
    test = paired_difference(mean_scores(second), mean_scores(first))
    return {
        "first": accuracy_of(first),
        "second": accuracy_of(second),
        "difference": asdict(test),
        "per_seed": {
            "first": [accuracy - means[1] for accuracy in whole[0]],
            "second": [means[0] - accuracy for accuracy in whole[1]],
        },
        # means over seeds may differ where the same sets of heads occur, but not equally often
        "same_heads": distinct[0].keys() == distinct[1].keys() and not test.changed,
    }
