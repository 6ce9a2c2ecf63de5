"""What texts are like: error modes (RLKV, figures 9, 13), lengths (figures 10, 15), repetition (RPC, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkv.evaluation.report.page import Cell, Page
from rlkv.evaluation.report.plots import FULL_CACHE, SPARSITY, Panel, curve, plot_stacked, point
from rlkv.evaluation.stats.metrics import (
    MODES,
    NGRAMS,
    Floats,
    bootstrap_mean,
    mean_with_interval,
    ngram_entropy,
    ngram_frequency,
    repetition_rate,
)
from rlkv.evaluation.study.base import Analysis, Study
from rlkv.evaluation.study.outcomes import Metrics, Outcome
from rlkv.evaluation.study.text import estimate, interval, levels

COLOURS = {"repetitive": "#c44e52", "overlength": "#dd8452", "incorrect": "#8c8c8c"}
MEASURES = {"entropy": ngram_entropy, "repetition": repetition_rate, "frequency": ngram_frequency}
SHOWN = 400  # characters of either end of a text that failed
BINS = 20
REPETITION = tuple(f"{n}-gram {what}" for what in MEASURES for n in NGRAMS)


def mode_shares(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """The share of each error mode among the problems that the full cache solves, with intervals; None without any."""
    solved = full.correct == 1
    if not solved.any():
        return None
    occurs = {mode: np.mean([[found == mode for found in run.modes] for run in runs], axis=0) for mode in MODES}
    return {mode: asdict(mean_with_interval(scores[solved])) for mode, scores in occurs.items()}


class ErrorModes(Analysis):
    """Repetitive, overlength and incorrect answers per ranking and sparsity."""

    name = "modes"
    title = "Error modes"

    def settings(self, study: Study) -> Metrics:
        return {**super().settings(study), "rule": asdict(study.config.rule)}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        right, methods = study.full(task).correct, study.sweep(task, mode_shares)
        return {
            "solved": int(right.sum()),
            "n": int(right.size),
            "methods": methods,
            "examples": failed_texts(study, task),
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        if not found["solved"]:
            return []
        shares = found["methods"][metrics["first"]][-1]
        parts = ", ".join(f"{mode} {estimate(shares[mode])}" for mode in MODES)
        return [
            f"{task}: of the {found['solved']} problems that the full cache solves, {metrics['first']} at "
            f"{metrics['sparsities'][-1]:g} fails as follows (shares): {parts}."
        ]

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        if not found["solved"]:
            page.paragraph(f"{task}: the full cache solves no problem, so there are no error modes to count.")
            return
        rule, solved = metrics["rule"], f"the {found['solved']} of {found['n']} problems that the full cache solves"
        page.table(
            ["heads", *levels(metrics["sparsities"])],
            [[name, *map(_modes_cell, of)] for name, of in found["methods"].items()],
            f"{task}: share that fails, of {solved} (mean over seeds); then how it fails, with 95% intervals over "
            f"problems. Repetitive: fewer than {rule['distinct']} distinct tokens in a stretch of {rule['window']} "
            "(not the first); overlength: cut at the limit; incorrect: the rest. The first that fits counts.",
        )
        panels = {
            f"s = {sparsity:g}": {
                name: {mode: of[i][mode]["mean"] for mode in MODES} for name, of in found["methods"].items()
            }
            for i, sparsity in enumerate(metrics["sparsities"])
        }
        plot = plot_stacked(self.plot_file(folder, task), panels, COLOURS)
        page.picture(plot, f"{task}: error modes among {solved}, per sparsity.")
        for mode, example in found["examples"].items():
            page.paragraph(
                f"{mode}: {example['problem']} under {metrics['first']} at {example['sparsity']:g}, first seed, "
                f"{example['tokens']} tokens:"
            )
            page.code(example["text"])


def failed_texts(study: Study, task: str) -> dict[str, Metrics]:
    """For each mode the first text of the first ranking that fails so, at the lowest sparsity at which one does.

    Only problems that the full cache solves; the middle of a long text is left out.
    """
    right, found = study.full(task).correct, {}
    problems, tokenizer = study.measurements.tasks[task].problems, study.measurements.tokenizer
    for sparsity in study.sparsities:
        run = study.runs(task, study.first, sparsity)[0]
        for problem, mode, tokens, solved in zip(problems, run.modes, run.tokens, right, strict=True):
            if not solved or mode is None or mode in found:
                continue
            text = str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
            if len(text) > 2 * SHOWN:
                text = f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}"
            found[mode] = {"problem": problem.key, "sparsity": sparsity, "tokens": len(tokens), "text": text}
    return found


def _modes_cell(shares: Metrics) -> Cell:
    failing = sum(shares[mode]["mean"] for mode in MODES)
    return Cell(f"{failing:.3f}", "", "\n".join(f"{mode} {estimate(shares[mode])}" for mode in MODES))


def repetition_of(tokens: Sequence[NDArray[np.int32]]) -> Floats:
    """For each text what :data:`MEASURES` say of its n-grams, n = 1 to 3: float ``[texts, 9]``."""
    texts = [ids.tolist() for ids in tokens]
    return np.array([[measure(text, n) for measure in MEASURES.values() for n in NGRAMS] for text in texts])


def both_right(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """Output tokens where a run and the full cache are both right; None if there is no such problem.

    A problem counts once, with the mean over the seeds that solve it.
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

    name = "lengths"
    title = "Lengths and repetition"

    def __init__(self) -> None:
        self._repetition: dict[str, Floats] = {}  # by condition: seeds with the same heads have the same texts

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        methods, last = study.sweep(task, self._of), study.sparsities[-1]
        texts = {FULL_CACHE: [full], **{ranking.name: study.runs(task, ranking, last) for ranking in study.rankings}}
        return {"full": self._of([full], full), "methods": methods, "histogram": length_shares(texts)}

    def _of(self, runs: Sequence[Outcome], full: Outcome) -> Metrics:
        for run in runs:
            if run.key not in self._repetition:
                self._repetition[run.key] = repetition_of(run.tokens)
        columns = np.mean([self._repetition[run.key] for run in runs], axis=0).T
        return {
            "all": asdict(bootstrap_mean(np.mean([run.lengths for run in runs], axis=0))),
            "both_right": both_right(runs, full),
            "repetition": {name: asdict(bootstrap_mean(c)) for name, c in zip(REPETITION, columns, strict=True)},
        }

    def write_task(self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path) -> None:
        full, sparsities = found["full"], metrics["sparsities"]
        n, rows = full["all"]["n"], [(FULL_CACHE, full)]
        for name, lengths in found["methods"].items():
            rows += [(f"{name}, {level}", of) for level, of in zip(levels(sparsities), lengths, strict=True)]
        page.table(
            ["heads", *levels(sparsities)],
            [
                [FULL_CACHE, *[_length_cell(full)] * len(sparsities)],
                *([name, *map(_length_cell, of)] for name, of in found["methods"].items()),
            ],
            f"{task}: output tokens, mean over {n} problems and seeds; then, on the problems that the method and the "
            "full cache both solve, the mean, its difference to the full cache's, and their number. Brackets: 95% "
            "bootstrap intervals over problems. A length does not say whether the answer was right, so compare 'both "
            "right' first.",
        )
        page.table(
            ["heads, sparsity", *REPETITION],
            [[label, *(estimate(of["repetition"][name]) for name in REPETITION)] for label, of in rows],
            f"{task}: entropy of the n-grams of a text (bits), share of its n-grams that occurred in it before, and "
            "how often the n-gram at a random position occurs in the text (our reading of R-KV's figure 2, which has "
            f"no formula), mean over the {n} texts; brackets: 95% bootstrap intervals over problems. Longer texts have "
            "more n-grams: all of these grow with length.",
        )
        every, common = {}, {}
        for name, lengths in found["methods"].items():
            every[name] = curve(sparsities, [of["all"] for of in lengths])
            both = [(s, of["both_right"]) for s, of in zip(sparsities, lengths, strict=True)]
            common[name] = [point(s, of["difference"]) for s, of in both if of is not None]
        tokens, mean = "output tokens", full["all"]["mean"]
        panels = [
            Panel(f"{task}: all problems", SPARSITY, every, tokens, reference=mean, limits=None),
            Panel(f"{task}: both right", SPARSITY, common, f"{tokens}, minus the full cache's", limits=None),
        ]
        histogram = found["histogram"]
        shares = {
            name: [(x, y, y, y) for x, y in zip(histogram["centres"], of, strict=True)]
            for name, of in histogram["shares"].items()
        }
        by_length = f"{task}: lengths at s = {sparsities[-1]:g}"
        panels.append(Panel(by_length, tokens, shares, "share of texts", limits=None, ticks=False))
        caption = (
            f"{task}: output tokens with 95% intervals, of all problems and where both are right; shares of texts by "
            f"length, {len(histogram['centres'])} bins."
        )
        self.add_plot(page, folder, task, caption, *panels)


def length_shares(texts: dict[str, list[Outcome]]) -> Metrics:
    """Shares of texts by length: ``centres`` of :data:`BINS` bins of equal width, and ``shares`` for each name."""
    lengths = {name: np.concatenate([run.lengths for run in runs]) for name, runs in texts.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(lengths.values())), BINS)
    shares = {name: (np.histogram(of, edges)[0] / of.size).tolist() for name, of in lengths.items()}
    return {"centres": ((edges[1:] + edges[:-1]) / 2).tolist(), "shares": shares}


def _length_cell(metrics: Metrics) -> Cell:
    both = metrics["both_right"]
    note = "none"
    if both is not None:
        test = both["difference"]
        change = f"{test['mean']:+.1f} [{test['low']:+.1f}, {test['high']:+.1f}], n = {test['n']}"
        note = f"{estimate(both['own'], 1)}\n{change}"
    return Cell(f"{metrics['all']['mean']:.1f}", "", f"{interval(metrics['all'], 1)}\nboth right: {note}")
