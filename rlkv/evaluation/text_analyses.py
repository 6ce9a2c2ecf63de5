"""The analyses of texts: error modes, lengths and repetition, eviction at matched bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

import numpy as np

from rlkv.evaluation.measurements import Condition, Outcome, accuracy_of, compare
from rlkv.evaluation.metrics import (
    MODES,
    NGRAMS,
    Floats,
    bootstrap_mean,
    mean_with_interval,
    ngram_entropy,
    ngram_frequency,
    repetition_rate,
)
from rlkv.evaluation.report import (
    AGAINST_FULL,
    FULL_CACHE,
    INTERVALS,
    NOT_AVAILABLE,
    SPARSITY,
    Metrics,
    Page,
    Panel,
    Point,
    accuracy_cell,
    curve,
    difference_cell,
    estimate,
    levels,
    p_number,
    plot_curves,
    plot_stacked,
    point,
    table_rows,
)
from rlkv.evaluation.study import FIXED, Study, StudyConfig
from rlkv.rollout.base import completion_text

MODE_COLORS = {"repetitive": "#c44e52", "overlength": "#dd8452", "incorrect": "#8c8c8c"}
MEASURES = {"entropy": ngram_entropy, "repetition": repetition_rate, "frequency": ngram_frequency}
REPETITION = tuple(f"{n}-gram {what}" for what in MEASURES for n in NGRAMS)
SHOWN = 400  # characters of either end of a text that failed
BINS = 20


def modes(study: Study, task: str, page: Page) -> Metrics:
    """Count how answers fail where the full cache is right (RLKV, figures 9 and 13)."""
    full = study.full(task)
    solved = int(full.correct.sum())
    methods = study.sweep(task, mode_shares)
    examples = failed_texts(study, task)
    numbers = {"solved": solved, "n": full.correct.size, "methods": methods, "examples": examples}
    if not solved:
        page.paragraph(f"{task}: the full cache solves no problem.")
        return numbers
    rows = []
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_sparsity in methods.items():
        rows.append([name])
        for level, shares in zip(levels(study.sparsities), by_sparsity, strict=True):
            means = {mode: shares[mode]["mean"] for mode in MODES}
            parts = [f"{mode} {estimate(shares[mode])}" for mode in MODES]
            rows[-1].append(f"{sum(means.values()):.3f} {'; '.join(parts)}")
            panels.setdefault(level, {})[name] = means
    page.table(
        ["heads", *levels(study.sparsities)],
        rows,
        f"{task}: share that fails of the {solved} problems that the full cache solves, then how "
        f"it fails (the first mode that fits); {INTERVALS}.",
    )
    path = plot_stacked(study.plot_file("modes", task), panels, MODE_COLORS)
    page.picture(path, f"{task}: error modes of problems that the full cache solves.")
    for mode, example in examples.items():
        page.paragraph(
            f"{mode}: {example['problem']} under {study.first.name} at {example['sparsity']:g}, "
            f"first seed, {example['tokens']} tokens:"
        )
        page.code(example["text"])
    return numbers


def mode_shares(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """Return the share of each error mode among the problems that the full cache solves.

    None if it solves none.
    """
    solved = full.correct == 1
    if not solved.any():
        return None
    shares = {}
    for mode in MODES:
        occurs = np.mean([[found == mode for found in run.modes] for run in runs], axis=0)
        shares[mode] = asdict(mean_with_interval(occurs[solved]))
    return shares


def failed_texts(study: Study, task: str) -> dict[str, Metrics]:
    """Find for each mode a text of the first ranking that fails so, at the lowest sparsity.

    Only problems that the full cache solves; the middle of a long text is left out.
    """
    found: dict[str, Metrics] = {}
    right = study.full(task).correct
    for sparsity in study.sparsities:
        answers = study.runs(task, study.first, sparsity)[0].answers
        for problem, answer, solved in zip(study.problems[task], answers, right, strict=True):
            if answer.mode is None or answer.mode in found or not solved:
                continue
            tokens = answer.tokens.tolist()
            text = completion_text(study.tokenizer, tokens)
            if len(text) > 2 * SHOWN:
                text = f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}"
            example = {"problem": problem.key, "sparsity": sparsity}
            found[answer.mode] = {**example, "tokens": len(tokens), "text": text}
    return found


def lengths(study: Study, task: str, page: Page) -> Metrics:
    """Measure output tokens and repetition (RLKV, figures 10 and 15; RPC, equation 1)."""
    full = study.full(task)
    known: dict[str, Floats] = {}  # seeds with the same heads have the same texts

    def of(runs: Sequence[Outcome], full: Outcome) -> Metrics:
        for run in runs:
            if run.key not in known:
                known[run.key] = repetition_of(run)
        columns = np.mean([known[run.key] for run in runs], axis=0).T
        repetition = zip(REPETITION, columns, strict=True)
        return {
            "all": asdict(bootstrap_mean(np.mean([run.lengths for run in runs], axis=0))),
            "both_right": both_right(runs, full),
            "repetition": {name: asdict(bootstrap_mean(column)) for name, column in repetition},
        }

    numbers: Metrics = {"full": of([full], full), "methods": study.sweep(task, of)}
    last = study.sparsities[-1]
    by_method = {ranking.name: study.runs(task, ranking, last) for ranking in study.rankings}
    numbers["histogram"] = length_shares({FULL_CACHE: [full], **by_method})
    shown = {FULL_CACHE: [numbers["full"]] * len(study.sparsities), **numbers["methods"]}
    page.table(
        ["heads", *levels(study.sparsities)],
        table_rows(shown, _length_cell),
        f"{task}: output tokens of all texts; then, where the method and the full cache are both "
        f"right, of the method, the difference to the full cache, and n problems; {INTERVALS}.",
    )
    repetition = {FULL_CACHE: numbers["full"]["repetition"].values()}
    for name, by_sparsity in numbers["methods"].items():
        for level, found in zip(levels(study.sparsities), by_sparsity, strict=True):
            repetition[f"{name}, {level}"] = found["repetition"].values()
    page.table(
        ["heads, sparsity", *REPETITION],
        table_rows(repetition, estimate),
        f"{task}: means over texts of n-gram entropy (bits), of the share of n-grams that occurred "
        "before, and of how often the n-gram at a random position occurs; all grow with length.",
    )
    path = plot_curves(study.plot_file("lengths", task), *_length_panels(study, task, numbers))
    page.picture(path, f"{task}: output tokens with 95% intervals; shares of texts by length.")
    return numbers


def _length_panels(study: Study, task: str, numbers: Metrics) -> list[Panel]:
    every = {}
    common: dict[str, list[Point]] = {}
    for name, by_sparsity in numbers["methods"].items():
        every[name] = curve(study.sparsities, [of["all"] for of in by_sparsity])
        common[name] = []
        for sparsity, of in zip(study.sparsities, by_sparsity, strict=True):
            if of["both_right"] is not None:
                common[name].append(point(sparsity, of["both_right"]["difference"]))
    shares = {}
    histogram = numbers["histogram"]
    for name, values in histogram["shares"].items():
        shares[name] = [(x, y, y, y) for x, y in zip(histogram["centres"], values, strict=True)]
    tokens = "output tokens"
    minus = "output tokens, minus the full cache's"
    by_length = f"{task}: lengths at s = {study.sparsities[-1]:g}"
    mean = numbers["full"]["all"]["mean"]
    return [
        Panel(f"{task}: all problems", SPARSITY, every, tokens, reference=mean, limits=None),
        Panel(f"{task}: both right", SPARSITY, common, minus, limits=None),
        Panel(by_length, tokens, shares, "share of texts", limits=None, ticks=False),
    ]


def repetition_of(run: Outcome) -> Floats:
    """Apply :data:`MEASURES` to the n-grams of each text, n = 1 to 3: float ``[texts, 9]``."""
    found = []
    for answer in run.answers:
        text = answer.tokens.tolist()
        found.append([measure(text, n) for measure, n in product(MEASURES.values(), NGRAMS)])
    return np.array(found)


def both_right(runs: Sequence[Outcome], full: Outcome) -> Metrics | None:
    """Compare output tokens where a run and the full cache are both right; None if nowhere.

    A problem counts once, with the mean over the seeds that solve it.
    """
    right = np.stack([run.correct for run in runs]) * full.correct
    kept = right.sum(axis=0) > 0
    if not kept.any():
        return None
    total = (right * np.stack([run.lengths for run in runs])).sum(axis=0)
    own = total[kept] / right.sum(axis=0)[kept]
    return {
        "own": asdict(bootstrap_mean(own)),
        "full": asdict(bootstrap_mean(full.lengths[kept])),
        "difference": asdict(bootstrap_mean(own - full.lengths[kept])),
    }


def length_shares(texts: dict[str, list[Outcome]]) -> Metrics:
    """Return ``centres`` of :data:`BINS` bins of lengths, and ``shares`` of texts for each name."""
    found = {name: np.concatenate([run.lengths for run in runs]) for name, runs in texts.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(found.values())), BINS)
    shares = {}
    for name, values in found.items():
        shares[name] = (np.histogram(values, edges)[0] / values.size).tolist()
    return {"centres": ((edges[1:] + edges[:-1]) / 2).tolist(), "shares": shares}


def _length_cell(metrics: Metrics) -> str:
    text = f"{estimate(metrics['all'], 1)}; both right: "
    both = metrics["both_right"]
    if both is None:
        return text + "none"
    test = both["difference"]
    change = f"{test['mean']:+.1f} [{test['low']:+.1f}, {test['high']:+.1f}], n = {test['n']}"
    return f"{text}{estimate(both['own'], 1)}; {change}"


def budget(study: Study, task: str, page: Page) -> Metrics:
    """Compare policies alone and under rankings at the same bytes (RLKV, figure 16)."""
    full = study.full(task)
    savings = study.config.levels("savings")
    outcomes: dict[float, dict[str, Outcome]] = {saved: {} for saved in savings}
    methods: dict[str, Metrics] = {}
    for match in study.matches(task):
        row = methods.setdefault(match.method, {"heads": match.heads, "savings": []})
        if not match.conditions:
            row["savings"].append(None)
            continue
        (outcome,) = study.outcomes_of(match.conditions)
        outcomes[match.saved][match.method] = outcome
        row["savings"].append(_budget_numbers(match.conditions[0], outcome, full))
    differences = _dynamic_minus_fixed(study.config, outcomes)
    numbers: Metrics = {
        "full": accuracy_of([full]),
        "methods": methods,
        "dynamic_minus_fixed": differences,
    }
    titles = [f"{saved:.0%} saved" for saved in savings]
    by_saving = {name: row["savings"] for name, row in methods.items()}
    page.table(
        ["method", *titles],
        table_rows(by_saving, _budget_cell),
        f"{task}: greedy accuracy at matched bytes, {AGAINST_FULL}; {INTERVALS}; then what the own "
        f"texts held, and the budget. {NOT_AVAILABLE}: what must stay is more than that.",
    )
    page.table(
        ["method", *titles],
        table_rows(by_saving, _failure_cell),
        f"{task}: problems that the full cache solves and the method does not "
        f"({' / '.join(MODES)}), and mean output tokens.",
    )
    rows = []
    for of in differences:
        cells = [NOT_AVAILABLE] * 2
        if of["difference"] is not None:
            cells = [difference_cell(of["difference"]), p_number(of["difference"]["p_value"])]
        rows.append([f"{of['policy']}, {of['saved']:.0%} saved", *cells])
    if rows:
        page.table(
            ["policy in all heads", "dynamic minus fixed", "p"],
            rows,
            f"{task}: paired difference between budgets that grow with the text and fixed ones.",
        )
    panels = [
        _budget_panel(f"{task}: tokens dropped in all heads", numbers, some_full=False),
        _budget_panel(f"{task}: some heads full", numbers, some_full=True),
    ]
    path = plot_curves(study.plot_file("budget", task), *panels)
    page.picture(path, f"{task}: accuracy over bytes held; dashed: fixed budgets.")
    return numbers


def _budget_numbers(condition: Condition, outcome: Outcome, full: Outcome) -> Metrics:
    policy = condition.policy
    answers = zip(outcome.modes, full.correct, strict=True)
    found = [mode for mode, right in answers if right]  # where the full cache is right
    return {
        "full_heads": condition.allocation.num_full,
        "budget": None if policy is None else policy.describe(),
        "fixed": condition.planned is not None,
        "accuracy": accuracy_of([outcome], full),
        "modes": {mode: found.count(mode) for mode in MODES} if found else None,
        "mean_output_tokens": float(np.mean(outcome.lengths)),
    }


def _dynamic_minus_fixed(
    config: StudyConfig, outcomes: dict[float, dict[str, Outcome]]
) -> list[Metrics]:
    """Compare the budgets of each policy at each saving; None where one of them does not fit."""
    found: list[Metrics] = []
    policies = config.policies if config.fixed_budgets else ()
    for policy, (saved, measured) in product(policies, outcomes.items()):
        dynamic = measured.get(policy)
        fixed = measured.get(f"{policy}, {FIXED}")
        test = None
        if dynamic is not None and fixed is not None:
            test = compare([dynamic], [fixed])["difference"]
        found.append({"policy": policy, "saved": saved, "difference": test})
    return found


def _budget_cell(of: Metrics | None) -> str:
    if of is None:
        return NOT_AVAILABLE
    kept = f"{of['full_heads']} heads full"
    if of["budget"] is not None:
        text = "full-cache text" if of["fixed"] else "text"
        entries = f"{of['budget']['ratio']:.3f} of the {text} + {of['budget']['extra']}"
        kept = f"{kept}, {entries}" if of["full_heads"] else entries
    held = f"{of['accuracy']['kv_share']:.0%} held"
    if "kv_share_gated" in of["accuracy"]:
        held += f" ({of['accuracy']['kv_share_gated']:.0%} in layers with gates)"
    return f"{accuracy_cell(of['accuracy'])}; {held}: {kept}"


def _failure_cell(of: Metrics | None) -> str:
    if of is None:
        return NOT_AVAILABLE
    counts = NOT_AVAILABLE
    if of["modes"] is not None:
        counts = " / ".join(str(of["modes"][mode]) for mode in MODES)
    return f"{counts}, {of['mean_output_tokens']:.0f}"


def _budget_panel(title: str, numbers: Metrics, some_full: bool) -> Panel:
    """Return accuracy over bytes held of the methods with some, or without any, full heads."""
    curves = {}
    for name, row in numbers["methods"].items():
        if bool(row["heads"]) == some_full:
            measured = [of["accuracy"] for of in row["savings"] if of is not None]
            curves[name] = [point(accuracy["kv_share"], accuracy) for accuracy in measured]
    styles = {name: {"linestyle": "--" if name.endswith(FIXED) else "-"} for name in curves}
    held = "bytes of KV in use / bytes of the full cache"
    reference = numbers["full"]["mean"]
    return Panel(title, held, curves, styles=styles, reference=reference, ticks=False)
