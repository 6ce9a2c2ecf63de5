"""Near-lossless threshold: how far a ranking can go until accuracy is below the full cache's by more than a margin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlkv.evaluation.report.page import Page
from rlkv.evaluation.report.published import find_published
from rlkv.evaluation.stats.metrics import AT_ONCE, RESAMPLES, ROUNDING, Floats, wilson_interval
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.outcomes import Metrics, mean_scores
from rlkv.evaluation.study.text import NOT_AVAILABLE


def near_lossless(full: Floats, scores: Floats, sparsities: Sequence[float], margin: float) -> Metrics:
    """The largest sparsity up to which no measured one loses more than ``margin``, 0 if all do.

    Args:
        full: accuracy of the full cache on each problem, ``[problems]``.
        scores: of the method, ``[sparsities, problems]``; ``sparsities`` ascend.

    Returns:
        ``sparsity`` with its 95% interval, ``low`` and ``high``, by bootstrap over problems, the same for both runs.
        ``support``: share of resamples with the same threshold; near 1 where methods tie, however few the problems.
        ``not_excluded``: the largest loss in accuracy that ``n`` problems do not exclude at the sparsities up to this
        one: Wilson's upper bound (95%) of the share of problems that got worse, each counted as wholly lost and none
        compensated by a gain; None where the sparsity is 0.
    """
    values = np.array([0.0, *sparsities])
    losses = full - scores
    steps = int(_steps(losses.mean(axis=1)[:, None], margin)[0])
    found = values[steps]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(0, RESAMPLES, AT_ONCE):
        rows = rng.integers(0, full.size, (AT_ONCE, full.size))
        drawn.append(values[_steps(losses[:, rows].mean(axis=2), margin)])
    thresholds = np.concatenate(drawn)
    # inverted_cdf: an end of the interval is a measured sparsity too
    low, high = np.quantile(thresholds, [0.025, 0.975], method="inverted_cdf")
    support = float(np.mean(thresholds == found))
    worse = int((losses[:steps] > ROUNDING).sum(axis=1).max(initial=0))
    not_excluded = wilson_interval(worse, full.size)[1] if steps else None
    interval = {"low": float(low), "high": float(high), "support": support, "not_excluded": not_excluded}
    return {"sparsity": float(found), **interval, "margin": margin, "n": full.size}


def _steps(losses: Floats, margin: float) -> np.ndarray:
    """How many sparsities from the first one on lose at most the margin: ``[S, R]`` -> int ``[R]``."""
    return np.cumprod(losses <= margin + ROUNDING, axis=0).sum(axis=0)


class NearLossless(Analysis):
    """The threshold of every ranking."""

    name = "threshold"
    title = "Near-lossless sparsity"

    def settings(self, study: Study) -> Metrics:
        return {**super().settings(study), "margin": study.config.margin}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full, methods = study.full(task).correct, {}
        for ranking in study.rankings:
            scores = np.stack([mean_scores(study.runs(task, ranking, s)) for s in study.sparsities])
            methods[ranking.name] = near_lossless(full, scores, study.sparsities, study.config.margin)
        model = study.published
        published = find_published(model, task, metric="near_lossless_sparsity") if model else []
        return {"methods": methods, "published": [[n.source.where, n.method, n.value] for n in published]}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        thresholds = found["methods"].items()
        return [
            f"{task}: near-lossless (at most {100 * metrics['margin']:g} points below the full cache at every measured "
            f"sparsity) up to {', '.join(f'{name} {_text(threshold)}' for name, threshold in thresholds)}.",
            *(f"{task}: {name}: {excluded_text(of)}." for name, of in thresholds if not _shows_margin(of)),
        ]

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        measured = ", ".join(f"{s:g}" for s in metrics["sparsities"])
        rows = [
            [name, _text(of), f"{of['support']:.0%}", str(of["n"]), excluded_text(of) or NOT_AVAILABLE]
            for name, of in found["methods"].items()
        ]
        page.table(
            ["heads", "largest near-lossless sparsity", "resamples that agree", "problems", "what they exclude"],
            rows,
            f"{task}: the largest sparsity up to which no measured one is below the full cache by more than "
            f"{100 * metrics['margin']:g} points (margin {metrics['margin']:g}), on the mean over seeds; brackets: 95% "
            f"interval by bootstrap over problems. It can only be one of the measured sparsities ({measured}) or 0. "
            "Where methods tie the interval has no width, however few the problems. What they exclude is the last "
            "column: the loss above Wilson's bound (95%) on the share of problems that got worse at any of the "
            "sparsities up to the threshold, gains not counted.",
        )
        for where, method, value in found["published"]:
            page.paragraph(f"Published for {task} ({where}, {method}; without a stated rule): {value:g}.")


def _shows_margin(threshold: Metrics) -> bool:
    return (threshold["not_excluded"] or 0) <= threshold["margin"] + ROUNDING


def excluded_text(threshold: Metrics) -> str:
    """What the problems exclude, and that it is not the margin where it is not; empty for a threshold of 0."""
    if threshold["not_excluded"] is None:
        return ""
    text = f"n = {threshold['n']} excludes a loss of more than {100 * threshold['not_excluded']:.1f} points"
    if not _shows_margin(threshold):
        text += f", which is above the margin of {100 * threshold['margin']:g}: near-lossless is not shown"
    return text


def _text(threshold: Metrics) -> str:
    return f"{threshold['sparsity']:g} [{threshold['low']:g}, {threshold['high']:g}]"
