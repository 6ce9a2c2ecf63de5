"""Response lengths (RLKV, figure 10) and how much texts repeat themselves (RPC, equation 1), per ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rlkv.evaluation.report.html_page import Cell, Page
from rlkv.evaluation.stats.metrics import bootstrap_mean, ngram_entropy, ngram_frequency, repetition_rate
from rlkv.evaluation.study.base import FULL, Analysis, Figures, Study, Wanted
from rlkv.evaluation.study.outcomes import Floats, Outcome
from rlkv.evaluation.study.pictures import Panel, curves_picture, point
from rlkv.evaluation.study.text import estimate, interval, levels

NGRAMS = (1, 2, 3)
MEASURES = {"entropy": ngram_entropy, "repetition": repetition_rate, "frequency": ngram_frequency}
REPETITION = tuple(f"{n}-gram {what}" for what in MEASURES for n in NGRAMS)


def repetition_figures(tokens: Sequence[NDArray[np.int32]]) -> Floats:
    """For each text what :data:`MEASURES` say of its n-grams, n = 1 to 3: float ``[texts, 9]``."""
    texts = [ids.tolist() for ids in tokens]
    return np.array([[measure(text, n) for measure in MEASURES.values() for n in NGRAMS] for text in texts])


def both_right(runs: Sequence[Outcome], full: Outcome) -> Figures | None:
    """Output tokens where a run and the full cache are both right; None if there is no such problem.

    A problem counts once, with the mean over the seeds that solve it, so that a method that solves only easy problems
    is compared with the full cache on those.
    """
    right = np.stack([run.correct for run in runs]) * full.correct
    kept = right.sum(axis=0) > 0
    if not kept.any():
        return None
    own = (right * np.stack([run.lengths for run in runs])).sum(axis=0)[kept] / right.sum(axis=0)[kept]
    return {
        "own": asdict(bootstrap_mean(own)),
        "full": asdict(bootstrap_mean(full.lengths[kept])),
        "difference": asdict(bootstrap_mean(own - full.lengths[kept])),
    }


class Lengths(Analysis):
    """Output tokens, n-gram entropies, repetition rates and frequencies per ranking and sparsity."""

    name: ClassVar[str] = "lengths"
    title: ClassVar[str] = "Lengths and repetition"

    def cells(self, study: Study) -> Wanted:
        return study.cells(study.rankings, study.options.sparsities)

    def figures(self, study: Study) -> Figures:
        repetition: dict[str, Floats] = {}  # by cell: seeds with the same heads have the same texts

        def of(runs: Sequence[Outcome], full: Outcome) -> Figures:
            for run in runs:
                if run.key not in repetition:
                    repetition[run.key] = repetition_figures(run.tokens)
            texts = np.mean([repetition[run.key] for run in runs], axis=0)
            return {
                "all": asdict(bootstrap_mean(np.mean([run.lengths for run in runs], axis=0))),
                "both_right": both_right(runs, full),
                "repetition": {
                    name: asdict(bootstrap_mean(column)) for name, column in zip(REPETITION, texts.T, strict=True)
                },
            }

        tasks = {}
        for task in study.tasks:
            full = study.full(task)
            tasks[task] = {
                "full": of([full], full),
                "methods": {
                    ranking.name: [of(study.runs(task, ranking, s), full) for s in study.options.sparsities]
                    for ranking in study.rankings
                },
            }
        return {"sparsities": list(study.options.sparsities), "tasks": tasks}

    def write(self, figures: Figures, page: Page, folder: Path) -> None:
        for task, found in figures["tasks"].items():
            full = found["full"]
            n = full["all"]["n"]
            rows = [(FULL, full)] + [
                (f"{name}, s = {sparsity:g}", of)
                for name, lengths in found["methods"].items()
                for sparsity, of in zip(figures["sparsities"], lengths, strict=True)
            ]
            page.table(
                ["heads", *levels(figures["sparsities"])],
                [
                    [FULL, *[_length_cell(full)] * len(figures["sparsities"])],
                    *([name, *map(_length_cell, of)] for name, of in found["methods"].items()),
                ],
                f"{task}: output tokens, mean over {n} problems and seeds; below, on the problems that the method and "
                "the full cache both solve, the mean, its difference to the full cache's, and their number. Brackets: "
                "95% bootstrap intervals over problems. A length does not say whether the answer was right, so compare "
                "'both right' first.",
            )
            page.table(
                ["heads, sparsity", *REPETITION],
                [[label, *(estimate(of["repetition"][name]) for name in REPETITION)] for label, of in rows],
                f"{task}: entropy of the n-grams of a text (bits), share of its n-grams that occurred in it before, "
                "and how often the n-gram at a random position occurs in the text (our reading of R-KV's figure 2, "
                f"which has no formula), mean over the {n} texts; brackets: 95% bootstrap intervals over problems. "
                "Longer texts have more n-grams: all figures grow with length, so compare them beside it.",
            )
            self._picture(task, figures["sparsities"], found, page, folder)

    def _picture(self, task: str, sparsities: list[float], found: Figures, page: Page, folder: Path) -> None:
        label = "sparsity (share of KV heads that are compressible)"
        every = {
            name: [point(s, of["all"]) for s, of in zip(sparsities, lengths, strict=True)]
            for name, lengths in found["methods"].items()
        }
        common = {
            name: [
                point(s, of["both_right"]["difference"])
                for s, of in zip(sparsities, lengths, strict=True)
                if of["both_right"] is not None
            ]
            for name, lengths in found["methods"].items()
        }
        panels = [
            Panel(f"{task}: all problems", label, "output tokens", every, reference=found["full"]["all"]["mean"]),
            Panel(f"{task}: both right", label, "output tokens, minus the full cache's", common),
        ]
        picture = folder / f"lengths-{task.replace(':', '_')}.png"
        curves_picture(picture, panels)
        page.picture(picture, f"{task}: output tokens with 95% intervals, of all problems and where both are right.")


def _length_cell(figures: Figures) -> Cell:
    both = figures["both_right"]
    lines = [interval(figures["all"], 1)]
    if both is None:
        lines.append("both right: none")
    else:
        test = both["difference"]
        lines.append(f"both right: {estimate(both['own'], 1)}")
        lines.append(f"{test['mean']:+.1f} [{test['low']:+.1f}, {test['high']:+.1f}], n = {test['n']}")
    return Cell(f"{figures['all']['mean']:.1f}", "", "\n".join(lines))
