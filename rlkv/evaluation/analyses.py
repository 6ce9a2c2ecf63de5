"""What texts are like: error modes (RLKV, figures 9, 13), lengths (figures 10, 15), repetition
(RPC, equation 1).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.measurements import (
    Condition,
    ConditionRequests,
    Measurements,
    Metrics,
    Outcome,
    Ranking,
    accuracy_of,
    agreement,
    compare,
    gates_rankings,
    mean_scores,
    read_truth,
    reference_rankings,
)
from rlkv.evaluation.metrics import (
    AT_ONCE,
    FEW_CHANGED,
    MODES,
    NGRAMS,
    RESAMPLES,
    ROUNDING,
    Floats,
    bootstrap_mean,
    mean_with_interval,
    ngram_entropy,
    ngram_frequency,
    paired_difference,
    repetition_rate,
    wilson_interval,
)
from rlkv.evaluation.report import (
    FULL_CACHE,
    LEVEL,
    SPARSITY,
    Cell,
    Page,
    Panel,
    curve,
    find_published,
    plot_curves,
    plot_stacked,
    point,
    provenance_facts,
    published_name,
    write_published,
)
from rlkv.evaluation.study import (
    FIXED,
    Analysis,
    Match,
    Study,
    StudyConfig,
    default_extra,
    matched_methods,
    policy_templates,
    study_tasks,
)
from rlkv.evaluation.study_text import (
    BYTES_NOTE,
    INTERVAL_NOTE,
    LEGEND,
    NOT_AVAILABLE,
    SAME,
    SEEDS_FIXED,
    accuracy_cell,
    against,
    difference_cell,
    estimate,
    interval,
    levels,
    p_number,
    p_text,
    plural,
    verdict,
)
from rlkv.evaluation.tasks.registry import find_tasks
from rlkv.gates.publish import COLORS
from rlkv.models.shape import ModelShape
from rlkv.utils.files import TEXT_SIZE, TITLE_SIZE, read_log, save_figure, write_json
from rlkv.utils.runtime import provenance
from rlkv.utils.store import check_results

COLOURS = {"repetitive": "#c44e52", "overlength": "#dd8452", "incorrect": "#8c8c8c"}
MEASURES = {"entropy": ngram_entropy, "repetition": repetition_rate, "frequency": ngram_frequency}
SHOWN = 400  # characters of either end of a text that failed
BINS = 20
REPETITION = tuple(f"{n}-gram {what}" for what in MEASURES for n in NGRAMS)


def mode_shares(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """The share of each error mode among the problems that the full cache solves, with intervals.

    None without any.
    """
    solved = full.correct == 1
    if not solved.any():
        return None
    occurs = {
        mode: np.mean([[found == mode for found in run.modes] for run in runs], axis=0)
        for mode in MODES
    }
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
            f"{task}: of the {found['solved']} problems that the full cache solves, "
            f"{metrics['first']} at "
            f"{metrics['sparsities'][-1]:g} fails as follows (shares): {parts}."
        ]

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        if not found["solved"]:
            page.paragraph(
                f"{task}: the full cache solves no problem, so there are no error modes to count."
            )
            return
        rule, solved = (
            metrics["rule"],
            f"the {found['solved']} of {found['n']} problems that the full cache solves",
        )
        page.table(
            ["heads", *levels(metrics["sparsities"])],
            [[name, *map(_modes_cell, of)] for name, of in found["methods"].items()],
            f"{task}: share that fails, of {solved} (mean over seeds); then how it fails, with 95% "
            "intervals over "
            f"problems. Repetitive: fewer than {rule['distinct']} distinct tokens in a stretch of "
            f"{rule['window']} "
            "(not the first); overlength: cut at the limit; incorrect: the rest. The first that "
            "fits counts.",
        )
        panels = {
            f"s = {sparsity:g}": {
                name: {mode: of[i][mode]["mean"] for mode in MODES}
                for name, of in found["methods"].items()
            }
            for i, sparsity in enumerate(metrics["sparsities"])
        }
        plot = plot_stacked(self.plot_file(folder, task), panels, COLOURS)
        page.picture(plot, f"{task}: error modes among {solved}, per sparsity.")
        for mode, example in found["examples"].items():
            page.paragraph(
                f"{mode}: {example['problem']} under {metrics['first']} at "
                f"{example['sparsity']:g}, first seed, "
                f"{example['tokens']} tokens:"
            )
            page.code(example["text"])


def failed_texts(study: Study, task: str) -> dict[str, Metrics]:
    """For each mode the first text of the first ranking that fails so, at the lowest sparsity at
    which one does.

    Only problems that the full cache solves; the middle of a long text is left out.
    """
    right, found = study.full(task).correct, {}
    problems, tokenizer = study.measurements.tasks[task].problems, study.measurements.tokenizer
    for sparsity in study.sparsities:
        run = study.runs(task, study.first, sparsity)[0]
        for problem, mode, tokens, solved in zip(
            problems, run.modes, run.tokens, right, strict=True
        ):
            if not solved or mode is None or mode in found:
                continue
            text = str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
            if len(text) > 2 * SHOWN:
                text = f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}"
            found[mode] = {
                "problem": problem.key,
                "sparsity": sparsity,
                "tokens": len(tokens),
                "text": text,
            }
    return found


def _modes_cell(shares: Metrics) -> Cell:
    failing = sum(shares[mode]["mean"] for mode in MODES)
    return Cell(
        f"{failing:.3f}", "", "\n".join(f"{mode} {estimate(shares[mode])}" for mode in MODES)
    )


def repetition_of(tokens: Sequence[NDArray[np.int32]]) -> Floats:
    """For each text what :data:`MEASURES` say of its n-grams, n = 1 to 3: float ``[texts, 9]``."""
    texts = [ids.tolist() for ids in tokens]
    return np.array(
        [[measure(text, n) for measure in MEASURES.values() for n in NGRAMS] for text in texts]
    )


def both_right(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """Output tokens where a run and the full cache are both right.

    None if there is no such problem.

    A problem counts once, with the mean over the seeds that solve it.
    """
    right = np.stack([run.correct for run in runs]) * full.correct
    kept = right.sum(axis=0) > 0
    if not kept.any():
        return None
    own = (right * np.stack([run.lengths for run in runs])).sum(axis=0)[kept] / right.sum(axis=0)[
        kept
    ]
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
        self._repetition: dict[
            str, Floats
        ] = {}  # by condition: seeds with the same heads have the same texts

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        methods, last = study.sweep(task, self._of), study.sparsities[-1]
        texts = {
            FULL_CACHE: [full],
            **{ranking.name: study.runs(task, ranking, last) for ranking in study.rankings},
        }
        return {
            "full": self._of([full], full),
            "methods": methods,
            "histogram": length_shares(texts),
        }

    def _of(self, runs: Sequence[Outcome], full: Outcome) -> Metrics:
        for run in runs:
            if run.key not in self._repetition:
                self._repetition[run.key] = repetition_of(run.tokens)
        columns = np.mean([self._repetition[run.key] for run in runs], axis=0).T
        return {
            "all": asdict(bootstrap_mean(np.mean([run.lengths for run in runs], axis=0))),
            "both_right": both_right(runs, full),
            "repetition": {
                name: asdict(bootstrap_mean(c)) for name, c in zip(REPETITION, columns, strict=True)
            },
        }

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        full, sparsities = found["full"], metrics["sparsities"]
        n, rows = full["all"]["n"], [(FULL_CACHE, full)]
        for name, lengths in found["methods"].items():
            rows += [
                (f"{name}, {level}", of)
                for level, of in zip(levels(sparsities), lengths, strict=True)
            ]
        page.table(
            ["heads", *levels(sparsities)],
            [
                [FULL_CACHE, *[_length_cell(full)] * len(sparsities)],
                *([name, *map(_length_cell, of)] for name, of in found["methods"].items()),
            ],
            f"{task}: output tokens, mean over {n} problems and seeds; then, on the problems that "
            "the method and the "
            "full cache both solve, the mean, its difference to the full cache's, and their "
            "number. Brackets: 95% "
            "bootstrap intervals over problems. A length does not say whether the answer was "
            "right, so compare 'both "
            "right' first.",
        )
        page.table(
            ["heads, sparsity", *REPETITION],
            [
                [label, *(estimate(of["repetition"][name]) for name in REPETITION)]
                for label, of in rows
            ],
            f"{task}: entropy of the n-grams of a text (bits), share of its n-grams that occurred "
            "in it before, and "
            "how often the n-gram at a random position occurs in the text (our reading of R-KV's "
            "figure 2, which has "
            f"no formula), mean over the {n} texts; brackets: 95% bootstrap intervals over "
            "problems. Longer texts have "
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
            Panel(
                f"{task}: both right",
                SPARSITY,
                common,
                f"{tokens}, minus the full cache's",
                limits=None,
            ),
        ]
        histogram = found["histogram"]
        shares = {
            name: [(x, y, y, y) for x, y in zip(histogram["centres"], of, strict=True)]
            for name, of in histogram["shares"].items()
        }
        by_length = f"{task}: lengths at s = {sparsities[-1]:g}"
        panels.append(Panel(by_length, tokens, shares, "share of texts", limits=None, ticks=False))
        caption = (
            f"{task}: output tokens with 95% intervals, of all problems and where both are right; "
            "shares of texts by "
            f"length, {len(histogram['centres'])} bins."
        )
        self.add_plot(page, folder, task, caption, *panels)


def length_shares(texts: dict[str, list[Outcome]]) -> Metrics:
    """Shares of texts by length:

    ``centres`` of :data:`BINS` bins of equal width, and ``shares`` for each name.
    """
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
    return Cell(
        f"{metrics['all']['mean']:.1f}", "", f"{interval(metrics['all'], 1)}\nboth right: {note}"
    )


HELD = "bytes of KV in use / bytes of the full cache"


class Budget(Analysis):
    """Accuracy, bytes, error modes and lengths of every method at each saving."""

    name = "budget"
    title = "Eviction at matched bytes"

    def __init__(self) -> None:
        self._matches: dict[str, list[Match]] = {}

    def _matched(self, study: Study, task: str) -> list[Match]:
        if task not in self._matches:
            self._matches[task] = matched_methods(
                study, task
            )  # walks all texts for each budget: once
        return self._matches[task]

    def conditions(self, study: Study) -> ConditionRequests:
        for task in study.tasks:
            for match in self._matched(study, task):
                for condition in match.conditions:
                    yield f"{match.method}, {match.saved:.0%} saved", condition

    def settings(self, study: Study) -> Metrics:
        config = study.config
        sizes = {
            name: getattr(config, name) for name in ("head_share", "buffer", "observation", "extra")
        }
        return {
            "first": study.first.name,
            "savings": config.each("savings"),
            "policies": list(config.policies),
            **sizes,
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        outcomes: dict[float, dict[str, Outcome]] = {
            saved: {} for saved in study.config.each("savings")
        }
        rows: dict[str, Metrics] = {}
        for match in self._matched(study, task):
            row = rows.setdefault(match.method, {"heads": match.heads, "savings": []})
            if not match.conditions:
                row["savings"].append(None)
            else:
                (outcome,) = study.measurements.outcomes(match.conditions)
                outcomes[match.saved][match.method] = outcome
                row["savings"].append(_of(match.conditions[0], outcome, full))
        return {
            "full": accuracy_of([full]),
            "methods": rows,
            "dynamic_minus_fixed": _differences(outcomes, study.config.policies)
            if study.config.fixed_budgets
            else [],
            "best": [_best(measured) for measured in outcomes.values()],
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines = []
        for saved, best in zip(metrics["savings"], found["best"], strict=True):
            if best is None:
                lines.append(f"{task}, {saved:.0%} of the bytes saved: no method fits.")
                continue
            alike = (
                f"; {SAME} (p >= {LEVEL:g}): {', '.join(best['alike'])}" if best["alike"] else ""
            )
            accuracy = f"{best['accuracy']:.3f} (n = {found['full']['n']})"
            lines.append(
                f"{task}, {saved:.0%} of the bytes saved: best is {best['method']} with "
                f"{accuracy}{alike}."
            )
        tested = [row for row in found["dynamic_minus_fixed"] if row["difference"] is not None]
        parts = [
            f"{row['policy']} at {row['saved']:.0%} saved {verdict(row['difference'])}"
            for row in tested
        ]
        if parts:
            lines.append(
                f"{task}: dynamic minus fixed budget at the same bytes, accuracy: "
                f"{'; '.join(parts)}."
            )
        return lines

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        titles, full = [f"{saved:.0%} saved" for saved in metrics["savings"]], found["full"]
        differences, shares = found["dynamic_minus_fixed"], "each is a share of the text so far"
        if differences:
            shares = (
                "a fixed one is a share of the problem's text there, a dynamic one of the "
                "text so far"
            )
        page.table(
            ["method", *titles],
            _rows(found, _accuracy_cell),
            f"{task}: greedy accuracy on {full['n']} problems, in parentheses the difference to "
            "the full cache "
            f"({full['mean']:.3f}); then its 95% interval over problems, what the method's own "
            "texts held, and its "
            f"budget. {LEGEND} Budgets are the largest that hold at most the rest of the full "
            "cache's bytes over the "
            f"texts of the full-cache run; {shares}. {BYTES_NOTE}. A policy alone evicts in all "
            "heads; 'ranking + "
            f"policy' keeps heads full and gives the others about {metrics['head_share']:g} of the "
            "mean budget. "
            f"Rankings are their first seeds, random heads all draws. {NOT_AVAILABLE}: what must "
            "stay (the prompt, "
            f"{metrics['extra']} entries) is more than that.",
        )
        page.table(
            ["method", *titles],
            _rows(found, _failure_cell),
            f"{task}: problems that the full cache solves and the method does not "
            f"({' / '.join(MODES)}), and mean "
            "output tokens.",
        )
        if differences:
            page.table(
                ["policy in all heads", "dynamic minus fixed", "p"],
                [
                    [
                        f"{of['policy']}, {of['saved']:.0%} saved",
                        *_difference_cells(of["difference"]),
                    ]
                    for of in differences
                ],
                f"{task}: paired difference in accuracy between a dynamic and a fixed budget of "
                "the same bytes (▲: "
                "dynamic is better, ▼: fixed is).",
            )
        panels = [
            _panel(f"{task}: {title}", found, some_full)
            for title, some_full in (
                ("tokens dropped in all heads", False),
                ("some heads full", True),
            )
        ]
        caption = (
            f"{task}: accuracy over bytes held, 95% "
            f"intervals{'; dashed: fixed budgets' if differences else ''}."
        )
        self.add_plot(page, folder, task, caption, *panels)


def _panel(title: str, found: Metrics, some_full: bool) -> Panel:
    """Accuracy over bytes held of the methods with some, or without any, full heads."""
    curves = {}
    for name, row in found["methods"].items():
        if bool(row["heads"]) == some_full:
            measured = [of["accuracy"] for of in row["savings"] if of is not None]
            curves[name] = [point(accuracy["kv_share"], accuracy) for accuracy in measured]
    styles = {name: {"linestyle": "--" if name.endswith(FIXED) else "-"} for name in curves}
    return Panel(title, HELD, curves, styles=styles, reference=found["full"]["mean"], ticks=False)


def _rows(found: Metrics, cell: Callable[[Metrics], Cell | str]) -> list[list[Cell | str]]:
    return [
        [name, *(NOT_AVAILABLE if of is None else cell(of) for of in row["savings"])]
        for name, row in found["methods"].items()
    ]


def _of(condition: Condition, outcome: Outcome, full: Outcome) -> Metrics:
    policy, shares = condition.policy, mode_shares([outcome], full)
    solved = int(full.correct.sum())
    return {
        "full_heads": condition.allocation.num_full,
        "budget": None if policy is None else policy.describe(),
        "fixed": condition.planned is not None,
        "accuracy": accuracy_of([outcome], full),
        "modes": None
        if shares is None
        else {mode: round(of["mean"] * solved) for mode, of in shares.items()},
        "mean_output_tokens": float(np.mean(outcome.lengths)),
    }


def _best(outcomes: dict[str, Outcome]) -> Metrics | None:
    """The most accurate method, and those that a paired test does not separate from it."""
    if not outcomes:
        return None
    method = max(outcomes, key=lambda name: float(outcomes[name].correct.mean()))
    best = outcomes[method]
    tests = {
        name: paired_difference(best.correct, of.correct)
        for name, of in outcomes.items()
        if name != method
    }
    alike = [name for name, test in tests.items() if test.p_value >= LEVEL]
    return {"method": method, "accuracy": float(best.correct.mean()), "alike": alike}


def _differences(
    outcomes: dict[float, dict[str, Outcome]], policies: Sequence[str]
) -> list[Metrics]:
    """Dynamic minus fixed budget of each policy at each saving.

    None where one of them does not fit.
    """
    found: list[Metrics] = []
    for policy, (saved, measured) in product(policies, outcomes.items()):
        pair = [measured[name] for name in (policy, f"{policy}, {FIXED}") if name in measured]
        test = compare(pair[:1], pair[1:])["difference"] if len(pair) == 2 else None
        found.append({"policy": policy, "saved": saved, "difference": test})
    return found


def _accuracy_cell(of: Metrics) -> Cell:
    cell, budget = accuracy_cell(of["accuracy"]), of["budget"]
    if budget is None:
        kept = f"{of['full_heads']} heads full"
    else:
        heads = f"{of['full_heads']} heads full, " if of["full_heads"] else ""
        kept = (
            f"{heads}{budget['ratio']:.3f} of the "
            f"{'full-cache text' if of['fixed'] else 'text'} + {budget['extra']}"
        )
    return Cell(cell.text, cell.sign, f"{cell.note}\n{of['accuracy']['kv_share']:.0%} held: {kept}")


def _failure_cell(of: Metrics) -> str:
    modes = (
        NOT_AVAILABLE
        if of["modes"] is None
        else " / ".join(str(of["modes"][mode]) for mode in MODES)
    )
    return f"{modes}, {of['mean_output_tokens']:.0f}"


def _difference_cells(test: Metrics | None) -> list[Cell | str]:
    return (
        [NOT_AVAILABLE] * 2 if test is None else [difference_cell(test), p_number(test["p_value"])]
    )


# fields of the training log and of the re-ranking's summary, the better unit first: CPU time does
# not depend on what else the machine does
COST_FIELDS = {
    "training": (("CPU", "time/step_cpu_s"), ("wall", "time/step_s")),
    "re-ranking": (("CPU", "cpu_seconds"),),
}
COST_NOTE = (
    "Seconds of all optimizer steps (from the log next to the gates file), mean over seeds; CPU: "
    "processor time of the "
    "process without the verifier's helpers, wall: time on the clock, which other work on the "
    "machine makes longer. "
    "What came before (a curriculum, which DuoAttention does not need, gates to start from) is not "
    "included."
)


class Comparison(Analysis):
    """Paired differences at chosen sparsities."""

    name = "comparison"
    title = "Paired comparison"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions(study.rankings, study.config.levels("compare_at"))

    def settings(self, study: Study) -> Metrics:
        costs = {ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files}
        return {"first": study.first.name, "costs": costs}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        rows = []
        for sparsity in study.config.ascending("compare_at"):
            first = study.runs(task, study.first, sparsity)
            for other in study.rankings[1:]:
                found = compare(first, study.runs(task, other, sparsity))
                rows.append({"sparsity": sparsity, "other": other.name, **found})
        return {"rows": rows}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines = []
        for sparsity in dict.fromkeys(row["sparsity"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["sparsity"] == sparsity]
            name, first = metrics["first"], rows[0]["first"]
            others = "; ".join(
                f"{row['other']} {against(row, 'second', name, row['other'])}" for row in rows
            )
            lines.append(
                f"{task} at {sparsity:g}, n = {first['n']}: {name} {first['mean']:.3f} against "
                f"{others}."
            )
        return lines

    def findings(self, metrics: Metrics) -> list[str]:
        known = [
            f"{name} {text}" for name, cost in metrics["costs"].items() if (text := cost_text(cost))
        ]
        return super().findings(metrics) + (
            [f"Finding the heads took: {'; '.join(known)}."] if known else []
        )

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        first = metrics["first"]
        rows: list[list[Cell | str]] = [
            [
                f"s = {row['sparsity']:g}: {row['other']}",
                accuracy_cell(row["first"]),
                accuracy_cell(row["second"]),
                difference_cell(row["difference"]),
                p_number(row["difference"]["p_value"]),
                f"{row['difference']['changed']} of {row['difference']['n']}",
                "yes" if row["same_heads"] else "no",
            ]
            for row in found["rows"]
        ]
        page.table(
            [
                "against",
                first,
                "the other",
                f"{first} minus the other",
                "p",
                "problems that differ",
                "same heads",
            ],
            rows,
            f"{task}: accuracy, mean over seeds; difference with its 95% interval (paired "
            "bootstrap over problems) "
            f"and a two-sided sign-flip test. ▲: {first} is better, ▼: worse (p < 0.05), no mark: "
            f"{SAME}. "
            f"The table makes {len(rows)} tests, whose p values are not corrected for their "
            "number.",
        )

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        write_costs(page, metrics["costs"])


class Ablations(Analysis):
    """Training ablations (RLKV, figure 8): each variant minus the first method, and what it cost."""

    name = "ablations"
    title = "Training ablations"

    def conditions(self, study: Study) -> ConditionRequests:
        return study.conditions(study.variants, study.config.levels("ablate_at"))

    def settings(self, study: Study) -> Metrics:
        return {
            "first": study.first.name,
            "sparsities": list(study.config.ascending("ablate_at")),
            "costs": {variant.name: cost_metrics(variant) for variant in study.variants},
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        levels = study.config.ascending("ablate_at")
        first = [study.runs(task, study.first, sparsity) for sparsity in levels]
        return {
            of.name: [
                compare(study.runs(task, of, s), base)
                for s, base in zip(levels, first, strict=True)
            ]
            for of in study.variants
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        lines, first = [], metrics["first"]
        for i, sparsity in enumerate(metrics["sparsities"]):
            variants = [
                f"{name} {against(rows[i], 'first', name, first)}" for name, rows in found.items()
            ][1:]
            base = found[first][i]["first"]
            measured = f"n = {base['n']}, variants of {first} ({base['mean']:.3f})"
            lines.append(f"{task} at {sparsity:g}, {measured}: {'; '.join(variants)}.")
        return lines

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        first, sparsities = metrics["first"], metrics["sparsities"]
        rows: list[list[Cell | str]] = []
        for name, compared in found.items():
            rows.append([name])
            for of in compared:
                last = "same heads" if of["same_heads"] else p_text(of["difference"]["p_value"])
                rows[-1] += [
                    accuracy_cell(of["first"]),
                    difference_cell(of["difference"], last) if name != first else "",
                ]
        n = found[first][0]["first"]["n"]
        page.table(
            [
                "variant",
                *(
                    text
                    for level in levels(sparsities)
                    for text in (f"{level}: accuracy", f"minus {first}")
                ),
            ],
            rows,
            f"{task}: greedy accuracy on {n} problems and the paired difference to {first} with "
            "its 95% interval. "
            f"{INTERVAL_NOTE} ▲: better than {first}, ▼: worse (paired permutation test, p < 0.05, "
            "not "
            f"corrected), no mark: {SAME}.",
        )
        curves = {
            name: curve(sparsities, [of["first"] for of in compared])
            for name, compared in found.items()
        }
        panel = Panel(f"{task}: training ablations, 95% intervals", SPARSITY, curves)
        self.add_plot(
            page, folder, task, f"{task}: greedy accuracy on {n} problems, of each variant.", panel
        )

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        super().write(metrics, page, folder)
        write_costs(page, metrics["costs"])


def cost_metrics(ranking: Ranking) -> Metrics:
    """Known seconds of each step and unit, mean and range over the seeds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file, gates in zip(ranking.files, ranking.gates, strict=True):
        log = Path(file).parent / "log.jsonl"
        training = read_log(log) if log.is_file() else []
        records = {"training": training, "re-ranking": [gates.training.get("reranked") or {}]}
        for step, fields in COST_FIELDS.items():
            for unit, field in fields:
                seconds: list[Any] = [record.get(field) for record in records[step]]
                if seconds and None not in seconds:
                    found[step, unit].append(float(sum(seconds)))
                    break
    steps = [
        {"step": step, "unit": unit, "mean": fmean(v), "low": min(v), "high": max(v), "n": len(v)}
        for (step, unit), v in found.items()
    ]
    return {"seeds": len(ranking.orders), "steps": steps}


def cost_text(metrics: Metrics) -> str:
    """One phrase, such as ``370 s CPU (350 to 390, 3 seeds) + 55 s wall re-ranking``.

    Empty if nothing is known.
    """
    parts = []
    for step in metrics["steps"]:
        several = (
            f" ({step['low']:.0f} to {step['high']:.0f}, {step['n']} seeds)"
            if step["n"] > 1
            else ""
        )
        what = "" if step["step"] == "training" else f" {step['step']}"
        parts.append(f"{step['mean']:.0f} s {step['unit']}{what}{several}")
    return " + ".join(parts)


def write_costs(page: Page, costs: dict[str, Metrics]) -> None:
    """Add the costs of each method as a table."""
    page.heading("What finding the heads took", level=3)
    rows = [[name, str(of["seeds"]), cost_text(of) or "unknown"] for name, of in costs.items()]
    page.table(["method", "seeds", "seconds"], rows, COST_NOTE)


HEAT_MAPS = 4  # side by side
BETWEEN = (0.1, 0.9)  # gates in here are neither closed nor open


def seeds_metrics(ranking: Ranking, study: Study) -> list[Metrics]:
    """For each seed: mean, shares, the heads shared with the first method's first seed, agreement
    with the oracle.
    """
    levels, rows = study.config.ascending("compare_at"), []
    for seed, gates in enumerate(ranking.gates):
        alpha = gates.alpha
        shared = {
            s: ranking.allocations(s)[seed].overlap(study.first.allocations(s)[0]) for s in levels
        }
        rows.append(
            {
                "file": Path(ranking.files[seed]).name,
                "alpha": [[round(value, 6) for value in row] for row in alpha.tolist()],
                "mean": alpha.mean().item(),
                "at_0": int((alpha == 0).sum()),
                "at_1": int((alpha == 1).sum()),
                "between": int(((alpha > BETWEEN[0]) & (alpha < BETWEEN[1])).sum()),
                "heads": alpha.numel(),
                "overlap_with_first": [
                    {"sparsity": s, "share": share} for s, share in shared.items()
                ],
                "agreement": None if study.truth is None else agreement(gates, study.truth),
            }
        )
    return rows


class GateDistribution(Analysis):
    """The gates of every method, variant and seed; nothing is decoded for them."""

    name = "gates"
    title = "Gates"

    def conditions(self, study: Study) -> ConditionRequests:
        return ()

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {}

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        """Gates do not depend on a task."""

    def metrics(self, study: Study) -> Metrics:
        methods = {
            ranking.name: seeds_metrics(ranking, study)
            for ranking in study.rankings
            if ranking.gates
        }
        variants = {ranking.name: seeds_metrics(ranking, study) for ranking in study.ablations}
        return {"first": study.first.name, "methods": methods, "variants": variants, "tasks": {}}

    def write(self, metrics: Metrics, page: Page, folder: Path) -> None:
        rows = [
            _row(name if len(seeds) == 1 else f"{name}, seed {i}", seed)
            for name, seeds in [*metrics["methods"].items(), *metrics["variants"].items()]
            for i, seed in enumerate(seeds)
        ]
        first = metrics["methods"][metrics["first"]][0]
        overlaps = [f"full heads shared at {o['sparsity']:g}" for o in first["overlap_with_first"]]
        agreements = [
            "oracle's full heads at 0.5",
            "correlation with elimination",
            "correlation with single heads",
        ]
        page.table(
            [
                "gates",
                "mean",
                "at 0",
                f"{BETWEEN[0]:g} to {BETWEEN[1]:g}",
                "at 1",
                *overlaps,
                *agreements,
            ],
            rows,
            f"The gates of {first['heads']} KV heads: mean, and numbers of heads at exactly 0, in "
            "between, and at "
            f"exactly 1. Shared: share of the full heads that {metrics['first']} (first seed) "
            "keeps full too. Oracle: "
            "the measured elimination; the share of its full heads at sparsity 0.5 that the gates "
            "keep too, and "
            "Spearman correlations of the gates with the order of elimination and with the "
            "accuracy that each head "
            "alone costs.",
        )
        first_alphas = {name: seeds[0]["alpha"] for name, seeds in metrics["methods"].items()}
        caption = "Gates in ascending order and their histogram: first seed of each method."
        page.picture(plot_distributions(first_alphas, folder / "gates.png"), caption)
        plot_heat_maps(first_alphas, folder / "heat-maps.png")
        page.picture(
            folder / "heat-maps.png", "Gates by layer and KV head: first seed of each method."
        )


def _row(label: str, seed: Metrics) -> list[str]:
    shared = [f"{overlap['share']:.0%}" for overlap in seed["overlap_with_first"]]
    agrees, shown = seed["agreement"], [NOT_AVAILABLE] * 3
    if agrees is not None:
        values = (agrees["spearman_elimination"], agrees["spearman_single_head"])
        shown = [
            f"{agrees['overlap_at_0.5']:.0%}",
            *(NOT_AVAILABLE if v is None else f"{v:.2f}" for v in values),
        ]
    return [
        label,
        f"{seed['mean']:.3f}",
        *(str(seed[name]) for name in ("at_0", "between", "at_1")),
        *shared,
        *shown,
    ]


def plot_distributions(alphas: dict[str, list[list[float]]], path: Path) -> Path:
    """Sorted gates and a histogram in ten bins, a curve per method."""
    ordered, histogram = {}, {}
    for name, alpha in alphas.items():
        values = sorted(chain(*alpha))
        ordered[name] = [(rank, value, value, value) for rank, value in enumerate(values, start=1)]
        counts = np.histogram(values, bins=10, range=(0, 1))[0].tolist()
        histogram[name] = [((place + 0.5) / 10, n, n, n) for place, n in enumerate(counts)]
    lines = {name: {"marker": ""} for name in alphas}
    steps = {name: {"marker": "", "drawstyle": "steps-mid"} for name in alphas}
    return plot_curves(
        path,
        Panel("Gates in ascending order", "KV heads, by gate", ordered, "gate", lines, ticks=False),
        Panel("Histogram", "gate", histogram, "KV heads", steps, limits=None, ticks=False),
    )


def plot_heat_maps(alphas: dict[str, list[list[float]]], path: Path) -> None:
    """A heat map per method: layers across, KV heads down, colours from 0 to 1."""
    from matplotlib.figure import Figure

    columns = min(HEAT_MAPS, len(alphas))
    lines = -(-len(alphas) // columns)
    first = next(iter(alphas.values()))
    width, height = max(2.2, 0.16 * len(first) + 0.8), max(1.8, 0.16 * len(first[0]) + 0.9)
    figure = Figure(figsize=(columns * width + 1.2, lines * height), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    image: Any = None
    for axes, (name, alpha) in zip(grid, alphas.items(), strict=False):
        by_head = list(zip(*alpha, strict=True))
        image = axes.imshow(
            by_head, vmin=0, vmax=1, cmap=COLORS, aspect="auto", interpolation="nearest"
        )
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.set_xlabel("layer", fontsize=TEXT_SIZE)
        axes.set_ylabel("KV head", fontsize=TEXT_SIZE)
        axes.tick_params(labelsize=TEXT_SIZE)
    for axes in grid[len(alphas) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, label="gate", ticks=[0, 0.5, 1], shrink=0.8)
    save_figure(figure, path)


FEW_HEADS = 64  # up to which single heads are counted, above it shares of all heads
NUMBERS = (1, 2, 3, 4, 6, 8)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)


class Sweep(Analysis):
    """Accuracy under every ranking at every sparsity."""

    name = "sweep"
    title = "Accuracy against sparsity"

    def settings(self, study: Study) -> Metrics:
        return {
            **super().settings(study),
            "published": study.published,
            "costs": {
                ranking.name: cost_metrics(ranking) for ranking in study.rankings if ranking.files
            },
        }

    def task_metrics(self, study: Study, task: str) -> Metrics:
        return {"full": accuracy_of([study.full(task)]), "methods": study.sweep(task, accuracy_of)}

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        write_table(page, task, found, metrics)
        full, sparsities = found["full"], metrics["sparsities"]
        curves = {
            name: curve(sparsities, accuracies) for name, accuracies in found["methods"].items()
        }
        panel = Panel(f"{task}: accuracy, 95% intervals", SPARSITY, curves, reference=full["mean"])
        caption = (
            f"{task}: greedy accuracy against sparsity on {full['n']} problems, 95% intervals."
        )
        self.add_plot(page, folder, task, caption, panel)
        if metrics["published"]:
            write_published(page, metrics["published"], task)


def write_table(page: Page, task: str, found: Metrics, metrics: Metrics) -> None:
    """Methods down, sparsities across, and what finding the heads took."""
    full, methods = accuracy_cell(found["full"]), found["methods"]
    rows = [
        [
            name,
            full,
            *map(accuracy_cell, accuracies),
            cost_text(metrics["costs"].get(name, {"steps": []})),
        ]
        for name, accuracies in methods.items()
    ]
    held = [
        _share_range([of["kv_share"] for of in column])
        for column in zip(*methods.values(), strict=True)
    ]
    page.table(
        ["heads", "s = 0", *levels(metrics["sparsities"]), "seconds to find"],
        [*rows, ["KV held, of full", "100%", *held, ""]],
        f"{task}: greedy accuracy on {found['full']['n']} problems (1 = all right), in parentheses "
        "the difference to "
        f"the full cache (s = 0). {INTERVAL_NOTE} {LEGEND} {BYTES_NOTE}, from the lowest to the "
        "highest row.",
    )


def _share_range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def top_heads(values: tuple[float, ...], total: int) -> tuple[int, ...]:
    """How many of ``total`` heads to compress from the top: whole numbers, or shares of all heads
    if below 1.

    By default 1 to 8 heads of a small model, 1% to 20% of a large one.
    """
    found = set()
    for value in values or (NUMBERS if total <= FEW_HEADS else SHARES):
        if not 0 <= value <= total and values:
            raise ValueError(f"--top-heads {value:g} is outside 0 to {total}")
        if value == 0:
            raise ValueError(
                "--top-heads: 0 heads are the full cache: give 1 or more, or a share above 0"
            )
        if value >= 1 and value != int(value):
            raise ValueError(
                f"--top-heads: {value:g} is neither a whole number nor a share below 1"
            )
        found.add(int(value) if value >= 1 else max(1, round(value * total)))
    return tuple(sorted(n for n in found if values or n < total))


class Sensitivity(Analysis):
    """Accuracy when only the most needed heads of each ranking are compressible."""

    name = "sensitivity"
    title = "Head sensitivity"

    def conditions(self, study: Study) -> ConditionRequests:
        for ranking, task, heads in product(study.rankings, study.tasks, study.top_heads):
            for condition in study.seeds(task, ranking, ranking.without_top(heads)):
                yield f"{ranking.name}, top {heads} gone", condition

    def settings(self, study: Study) -> Metrics:
        total = study.first.shape[0] * study.first.shape[1]
        return {**super().settings(study), "top_heads": list(study.top_heads), "total_heads": total}

    def task_metrics(self, study: Study, task: str) -> Metrics:
        full = study.full(task)
        runs = {
            ranking.name: [
                study.measurements.outcomes(study.seeds(task, ranking, ranking.without_top(heads)))
                for heads in study.top_heads
            ]
            for ranking in study.rankings
        }
        # of each problem, mean over seeds and numbers of heads
        scores = {
            name: np.mean([mean_scores(of) for of in by_heads], axis=0)
            for name, by_heads in runs.items()
        }
        methods = {
            name: {
                "by_heads": [accuracy_of(of, full) for of in by_heads],
                "mean_over_heads": asdict(mean_with_interval(scores[name])),
                "versus_first": asdict(paired_difference(scores[study.first.name], scores[name])),
            }
            for name, by_heads in runs.items()
        }
        return {"full": accuracy_of([full]), "methods": methods}

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        means = sorted(
            (of["mean_over_heads"]["mean"], name) for name, of in found["methods"].items()
        )
        counts = ", ".join(map(str, metrics["top_heads"]))
        return [
            f"{task}: mean accuracy when only the most needed {counts} of {metrics['total_heads']} "
            "heads are "
            "compressed (lower: the ranking knows better which heads are needed; tests below): "
            f"{', '.join(f'{name} {mean:.3f}' for mean, name in means)}."
        ]

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        first, counts, total = metrics["first"], metrics["top_heads"], metrics["total_heads"]
        rows: list[list[Cell | str]] = []
        for name, of in found["methods"].items():
            test, mean = of["versus_first"], of["mean_over_heads"]
            # a ranking whose accuracy falls less than the first one's is the worse one
            against = (
                "" if name == first else difference_cell(test, p_text(test["p_value"]), sign=-1)
            )
            cells = map(accuracy_cell, of["by_heads"])
            rows.append([name, *cells, Cell(f"{mean['mean']:.3f}", "", interval(mean)), against])
        page.table(
            ["heads", *(plural(n, "head") for n in counts), "mean", f"mean minus {first}'s"],
            rows,
            f"{task}: greedy accuracy on {found['full']['n']} problems when only so many of the "
            f"{total} heads are "
            f"compressed, those that the ranking puts last. {INTERVAL_NOTE} {LEGEND} Last column: "
            "▲ where accuracy "
            f"falls faster than under {first}, ▼ where it falls slower.",
        )
        curves = {name: curve(counts, of["by_heads"]) for name, of in found["methods"].items()}
        label = f"compressed heads of {total}, the most needed ones first"
        title = f"{task}: the faster it falls, the better the ranking"
        panel = Panel(title, label, curves, reference=found["full"]["mean"])
        caption = f"{task}: accuracy when only the most needed heads are compressed, 95% intervals."
        self.add_plot(page, folder, task, caption, panel)


NOT_SAID = "its file does not say"


def write_report(
    title: str,
    study: Study,
    analyses: Sequence[Analysis],
    metrics: dict[str, Metrics],
    seconds: float,
) -> None:
    """All files of a study but its rows; ``seconds``: wall-clock time of this run."""
    folder, conditions = study.config.output_dir, study.measurements.describe()
    measured = sum(condition["seconds"] for condition in conditions)
    settings = next(iter(study.measurements.tasks.values())).settings
    content = {
        "config": asdict(study.config),
        "resolved": {
            "cache": {
                name: getattr(settings.cache, name) for name in ("sink", "window", "protect_prompt")
            },
            "max_new_tokens": [
                task.settings.sampling.max_new_tokens for task in study.measurements.tasks.values()
            ],
            "top_heads": study.top_heads,
            "policies": {name: policy.describe() for name, policy in study.policies.items()},
            "dtype": str(study.measurements.model.dtype),
            "device": str(study.measurements.model.device),
        },
        **provenance(),
        "seconds": {
            "this run, wall": round(seconds, 1),
            "decoding of all conditions, wall": round(measured, 1),
        },
        "full_cache": {
            task: {
                "accuracy": float(study.full(task).correct.mean()),
                "n": int(study.full(task).correct.size),
            }
            for task in study.tasks
        },
        "training": _training(study),
        "findings": {
            analysis.name: analysis.findings(metrics[analysis.name]) for analysis in analyses
        },
        "findings_note": SEEDS_FIXED,
        "analyses": metrics,
        "conditions": conditions,
    }
    write_json(folder / "results.json", content)
    page = Page(title)
    _write_findings(page, content)
    for analysis in analyses:
        page.heading(analysis.title)
        analysis.write(metrics[analysis.name], page, folder)
    page.heading("How it was measured")
    page.code(content["command"])
    took = (
        f"This run took {seconds:.0f} s of wall time; decoding all conditions, also those of "
        "earlier runs and of other "
        f"processes, {measured:.0f} s."
    )
    page.bullets([*provenance_facts(content), took])
    options = {**content["config"], **content["resolved"]}
    page.table(
        ["option", "value"],
        [[name, _value(value)] for name, value in options.items()],
        "Configuration",
    )
    _write_training(page, content["training"])
    page.write_report(folder)
    if Sweep.name in metrics:
        table = Page(title)
        for task, found in metrics[Sweep.name]["tasks"].items():
            write_table(table, task, found, metrics[Sweep.name])
        table.bullets(provenance_facts(content))
        table.write(folder / "table.md")


def _write_findings(page: Page, content: dict[str, Any]) -> None:
    page.heading("What the study finds")
    for task, full in content["full_cache"].items():
        measured = sum(condition["task"] == task for condition in content["conditions"])
        page.paragraph(
            f"{task}: {full['n']} problems, of which the full cache solves "
            f"{round(full['accuracy'] * full['n'])} "
            f"({full['accuracy']:.3f}), decoded greedily. {measured} different conditions were "
            "measured, each draw of "
            "random heads counted as one."
        )
    lines = [line for lines in content["findings"].values() for line in lines]
    page.bullets(lines or ["The requested analyses have no findings."])
    page.paragraph(
        "Every sentence above is made from the numbers below by fixed rules: 'better' and 'worse' "
        "are used where a "
        f"paired permutation test gives p < 0.05 (not corrected for the number of tests), '{SAME}' "
        "everywhere else. "
        f"{FEW_CHANGED} {SEEDS_FIXED}"
    )


def _training(study: Study) -> dict[str, list[dict[str, Any]]]:
    """For each name and seed what its gates file says about its training, without lists."""
    return {
        ranking.name: [
            {
                key: value
                for key, value in gates.training.items()
                if not isinstance(value, list | dict)
            }
            for gates in ranking.gates
        ]
        for ranking in [*study.rankings, *study.ablations]
        if ranking.gates
    }


def _write_training(page: Page, training: dict[str, list[dict[str, Any]]]) -> None:
    """The first name's settings, and where each other one's differ."""
    (first, base), *others = ((name, seeds[0]) for name, seeds in training.items())
    rows = [[first, _settings(base) or NOT_SAID]]
    for name, settings in others:
        shown = _settings(settings) or NOT_SAID
        if settings and settings.get("method") == base.get("method"):
            differing = {key: value for key, value in settings.items() if base.get(key) != value}
            shown = _settings(differing) or f"as {first}"
        rows.append([name, shown])
    page.table(
        ["gates", "training"],
        rows,
        "How the heads were found, according to the gates files of the first seeds; for methods "
        "trained like "
        f"{first}, what differs.",
    )


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_value(of)}" for name, of in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def near_lossless(
    full: Floats, scores: Floats, sparsities: Sequence[float], margin: float
) -> Metrics:
    """The largest sparsity up to which no measured one loses more than ``margin``, 0 if all do.

    Args:
        full: accuracy of the full cache on each problem, ``[problems]``.
        scores: of the method, ``[sparsities, problems]``; ``sparsities`` ascend.

    Returns:
        ``sparsity`` with its 95% interval, ``low`` and ``high``, by bootstrap over problems, the
        same for both runs. ``support``: share of resamples with the same threshold; near 1 where
        methods tie, however few the problems. ``not_excluded``: the largest loss in accuracy that
        ``n`` problems do not exclude at the sparsities up to this
        one: Wilson's upper bound (95%) of the share of problems that got worse, each counted as
        wholly lost and none compensated by a gain; None where the sparsity is 0.
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
    interval = {
        "low": float(low),
        "high": float(high),
        "support": support,
        "not_excluded": not_excluded,
    }
    return {"sparsity": float(found), **interval, "margin": margin, "n": full.size}


def _steps(losses: Floats, margin: float) -> np.ndarray:
    """How many sparsities from the first one on lose at most the margin:

    ``[S, R]`` -> int ``[R]``.
    """
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
            methods[ranking.name] = near_lossless(
                full, scores, study.sparsities, study.config.margin
            )
        model = study.published
        published = find_published(model, task, metric="near_lossless_sparsity") if model else []
        return {
            "methods": methods,
            "published": [[n.source.where, n.method, n.value] for n in published],
        }

    def task_findings(self, task: str, found: Metrics, metrics: Metrics) -> list[str]:
        thresholds = found["methods"].items()
        return [
            f"{task}: near-lossless (at most {100 * metrics['margin']:g} points below the full "
            "cache at every measured "
            "sparsity) up to "
            f"{', '.join(f'{name} {_text(threshold)}' for name, threshold in thresholds)}.",
            *(
                f"{task}: {name}: {excluded_text(of)}."
                for name, of in thresholds
                if not _shows_margin(of)
            ),
        ]

    def write_task(
        self, task: str, found: Metrics, metrics: Metrics, page: Page, folder: Path
    ) -> None:
        measured = ", ".join(f"{s:g}" for s in metrics["sparsities"])
        rows = [
            [
                name,
                _text(of),
                f"{of['support']:.0%}",
                str(of["n"]),
                excluded_text(of) or NOT_AVAILABLE,
            ]
            for name, of in found["methods"].items()
        ]
        page.table(
            [
                "heads",
                "largest near-lossless sparsity",
                "resamples that agree",
                "problems",
                "what they exclude",
            ],
            rows,
            f"{task}: the largest sparsity up to which no measured one is below the full cache by "
            "more than "
            f"{100 * metrics['margin']:g} points (margin {metrics['margin']:g}), on the mean over "
            "seeds; brackets: 95% "
            "interval by bootstrap over problems. It can only be one of the measured sparsities "
            f"({measured}) or 0. "
            "Where methods tie the interval has no width, however few the problems. What they "
            "exclude is the last "
            "column: the loss above Wilson's bound (95%) on the share of problems that got worse "
            "at any of the "
            "sparsities up to the threshold, gains not counted.",
        )
        for where, method, value in found["published"]:
            page.paragraph(
                f"Published for {task} ({where}, {method}; without a stated rule): {value:g}."
            )


def _shows_margin(threshold: Metrics) -> bool:
    return (threshold["not_excluded"] or 0) <= threshold["margin"] + ROUNDING


def excluded_text(threshold: Metrics) -> str:
    """What the problems exclude, and that it is not the margin where it is not.

    Empty for a threshold of 0.
    """
    if threshold["not_excluded"] is None:
        return ""
    text = (
        f"n = {threshold['n']} excludes a loss of more than "
        f"{100 * threshold['not_excluded']:.1f} points"
    )
    if not _shows_margin(threshold):
        text += (
            f", which is above the margin of {100 * threshold['margin']:g}: near-lossless is "
            "not shown"
        )
    return text


def _text(threshold: Metrics) -> str:
    return f"{threshold['sparsity']:g} [{threshold['low']:g}, {threshold['high']:g}]"


_KINDS = (
    Sweep,
    Comparison,
    NearLossless,
    Sensitivity,
    ErrorModes,
    Lengths,
    Budget,
    GateDistribution,
    Ablations,
)
ANALYSES: dict[str, type[Analysis]] = {
    kind.name: kind for kind in _KINDS
}  # in the order of the report


def choose_analyses(names: Sequence[str], has_ablations: bool) -> list[Analysis]:
    """The analyses ``names`` in the order of the report; none named: all that can be done."""
    names = names or [name for name in ANALYSES if has_ablations or name != Ablations.name]
    for name in names:
        if name not in ANALYSES:
            raise ValueError(
                f"--analyses: there is no analysis {name!r}: choose from {', '.join(ANALYSES)}"
            )
    if Ablations.name in names and not has_ablations:
        raise ValueError(
            "--analyses names ablations, but there are no gates for them: add --ablation NAME=FILE"
        )
    return [kind() for name, kind in ANALYSES.items() if name in names]


def load_study(config: StudyConfig) -> Study:
    """Everything that the options name, read and checked before anything is written."""
    find_tasks(config.tasks, config.data)  # a wrong name is refused before the model is loaded
    published = published_name(config.published or config.model)
    if config.published and published is None:
        raise ValueError(
            f"--published {config.published!r}: nothing is known to be published for a model of "
            "this name"
        )
    model, tokenizer = config.load()
    shape = ModelShape.from_config(model.config)
    truth = read_truth(config.oracle, shape) if config.oracle else None
    methods = gates_rankings(config.gates_files, model.config)
    variants = gates_rankings(config.ablation_files, model.config)
    cache = config.cache_settings({"first": methods[0].gates[0]})
    extra = config.extra
    if extra is None:
        extra = default_extra(
            config.policies, config.observation, cache.sink, cache.sink + cache.window
        )
    config = replace(config, extra=extra)
    sizes = (config.buffer, config.observation, extra, cache.sink)
    policies = policy_templates(config.policies, *sizes, config.prompt_variants)
    every_gates = [gates for method in (*methods, *variants) for gates in method.gates]
    prepared = study_tasks(config, cache, every_gates, tokenizer)
    return Study(
        rankings=(*methods, *reference_rankings(shape, truth, config.random_draws)),
        ablations=tuple(variants),
        measurements=Measurements(
            model, tokenizer, prepared, config.output_dir / "rows", {"model": config.model}
        ),
        entry_size=EntrySize.of(model),
        config=config,
        policies=policies,
        top_heads=top_heads(config.top_heads, shape.num_layers * shape.num_kv_heads),
        truth=truth,
        published=published,
    )


def run_study(config: StudyConfig) -> list[str] | None:
    """Measure and report; the findings, or None with ``measure_only``."""
    started = time.monotonic()
    check_results(
        config.output_dir, "results.json", ("report.html", "report.md", "table.md"), ("analyses",)
    )
    check_results(config.output_dir, "measured.json", (), ("conditions",))
    analyses = choose_analyses(config.analyses, bool(config.ablation))
    study = load_study(config)
    # the full cache first: matched budgets need its texts
    study.measurements.measure(
        FULL_CACHE, [(FULL_CACHE, study.full_condition(task)) for task in study.tasks]
    )
    requests = (request for analysis in analyses for request in analysis.conditions(study))
    study.measurements.measure("conditions", requests)
    if config.measure_only:
        content = {"conditions": study.measurements.describe(), **provenance()}
        write_json(config.output_dir / "measured.json", content)
        return None
    metrics = {analysis.name: analysis.metrics(study) for analysis in analyses}
    title = f"Study of KV heads: {ModelShape.from_config(study.measurements.model.config).model_id}"
    write_report(title, study, analyses, metrics, time.monotonic() - started)
    return [line for analysis in analyses for line in analysis.findings(metrics[analysis.name])]
