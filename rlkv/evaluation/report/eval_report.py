"""The report of an evaluation: results.json, and a page with a table per task in the layout of RLKV's tables 6 to 8."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

from rlkv.evaluation.report.eval_summary import Summary, summarize
from rlkv.evaluation.report.page import MARKS_LEGEND, Cell, Page, provenance_facts, sign_of
from rlkv.evaluation.report.plots import FULL_CACHE
from rlkv.evaluation.report.published import write_published
from rlkv.evaluation.run.evaluation import RESULTS, Evaluation
from rlkv.evaluation.run.methods import FULL, RANDOM_HEADS, CompressionMethod
from rlkv.evaluation.stats.metrics import FEW_CHANGED, MODES, NGRAMS
from rlkv.utils.atomic import write_json
from rlkv.utils.provenance import provenance

COARSE = 0.05  # a task whose smallest provable difference is larger proves little: the report says so in bold
HOW_TO_READ = (
    "Accuracy is pass@1 in percent, with its 95% interval for the full cache. For a method, in parentheses: the "
    "difference to the full cache in points, with its 95% interval (bootstrap over problems, paired); * where a paired "
    f"permutation test gives p < 0.05 ({MARKS_LEGEND}). {FEW_CHANGED} "
    "The p values are not corrected for the number of comparisons. KV: bytes of KV in use at the end of each text, "
    "over the bytes of the full cache for the same tokens. s: share of KV heads that are compressible."
)


def write_report(folder: Path, done: Evaluation) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html``."""
    full, baseline = (
        {task: rows for (task, method), rows in done.rows.items() if method == name}
        for name in (FULL, done.config["baseline"])
    )
    summaries = [
        summarize(task, method, rows, full.get(task), None if rows is baseline.get(task) else baseline.get(task))
        for (task, method), rows in done.rows.items()
    ]
    origin = provenance()
    write_json(folder / RESULTS, {"config": done.config, **origin, "results": summaries})
    evaluation_page(done.methods, summaries, origin, done.config).write_report(folder)


def evaluation_page(
    methods: list[CompressionMethod], summaries: list[Summary], origin: dict[str, Any], config: dict[str, Any]
) -> Page:
    """The whole report, from :func:`summarize` of every task with every method.

    ``origin`` is of :func:`rlkv.utils.provenance.provenance`; published numbers are those of the model in ``config``.
    """
    page = Page(f"Evaluation of {config['model']}")
    page.paragraph(HOW_TO_READ)
    if any(method.ranking == RANDOM_HEADS for method in methods):
        page.paragraph(
            f"{RANDOM_HEADS} is one draw of heads (seed {config['seed']}): its intervals are over problems and say "
            "nothing about other draws."
        )
    for task in dict.fromkeys(s["task"] for s in summaries):
        found = {s["method"]: s for s in summaries if s["task"] == task}
        page.heading(task)
        _what_it_proves(page, next(iter(found.values())))
        _accuracy_table(page, task, methods, found)
        _samples_table(page, found)
        _paired_table(page, "the full cache", {name: s for name, s in found.items() if "difference" in s})
        versus = {name: {**s, **s["versus_baseline"]} for name, s in found.items() if "versus_baseline" in s}
        _paired_table(page, config["baseline"], versus)
        write_published(page, config["model"], task)
        _mode_table(page, found)
        _cost_table(page, found)
        _text_table(page, found)
    page.heading("How it was run")
    page.code(origin["command"])
    page.bullets([*_settings(config), *provenance_facts(origin)])
    return page


def _what_it_proves(page: Page, summary: Summary) -> None:
    n, least = summary["n"], summary["smallest_provable_difference"]
    if least is None:
        text = f"{n} problems prove nothing: no difference between two methods could be called significant."
        return page.paragraph(text, strong=True)
    text = (
        f"{n} problems: at least {round(least * n)} must change, all in one direction, for a difference between two "
        "methods to be called significant (sign test, p < 0.05)"
    )
    if summary["samples"] == 1:
        text += f", which is a difference of {100 * least:.1f} points"
    page.paragraph(text + (": this task proves little." if least > COARSE else "."), strong=least > COARSE)


def _accuracy_table(page: Page, task: str, methods: list[CompressionMethod], found: dict[str, Summary]) -> None:
    """Rankings of heads down, sparsities across; methods without a sparsity get a table of their own."""
    others = [m.name for m in methods if m.sparsity is None and m.name != FULL]
    full: list[list[Cell | str]] = [[FULL_CACHE, _cell(found[FULL])]] if FULL in found else []
    groups: dict[str, dict[float, Cell]] = defaultdict(dict)
    for method in methods:
        if method.sparsity is not None:
            groups[_group(method)][method.sparsity] = _cell(found[method.name])
    if groups or not others:
        levels = sorted({0.0, *chain(*groups.values())})
        rows = [[*row, *[""] * (len(levels) - 1)] for row in full]
        rows += [[group, *(own.get(s, "") for s in levels)] for group, own in groups.items()]
        columns = ["heads", *(f"s = {s:g}" for s in levels)]
        page.table(columns, rows, f"{task}, measured: which heads stay full, by sparsity.")
    if others:
        rows = full + [[name, _cell(found[name])] for name in others]
        page.table(["method", "accuracy"], rows, f"{task}, measured: policies in all heads.")


def _group(method: CompressionMethod) -> str:
    """The row of a method: its name without the sparsity."""
    policies = [part for part in method.name.split("+") if part.partition("@")[0] != method.ranking]
    return "+".join([str(method.ranking), *policies])


def _percent(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _cell(summary: Summary) -> Cell:
    share = summary["kv_bytes"] / summary["kv_bytes_full"]
    if "difference" not in summary:
        text = _percent(summary["accuracy"], summary["ci_low"], summary["ci_high"])
        return Cell(text if summary["method"] == FULL else f"{text} KV {share:.0%}")
    change, low, high = (100 * summary[name] for name in ("difference", "difference_low", "difference_high"))
    sign = sign_of(change, summary["p_value"])
    mark = "" if sign == "same" else "*"
    text = f"{100 * summary['accuracy']:.1f} ({change:+.1f}{mark} [{low:+.1f}, {high:+.1f}]) KV {share:.0%}"
    return Cell(text, sign)


def _samples_table(page: Page, found: dict[str, Summary]) -> None:
    def cell(interval: dict[str, float] | None) -> str:
        return _percent(**interval) if interval else "none"

    first = next(iter(found.values()))
    several = first["samples"] > 1
    page.table(
        [
            *("method", *(f"pass@{k}" for k in first["pass_at_k"])),
            *([f"all {first['samples']} right"] if several else []),
            *("terminated texts", "right of these"),
        ],
        [
            [
                *(name, *map(cell, s["pass_at_k"].values())),
                *([cell(s["strict"])] if several else []),
                *(f"{100 * s['share_terminated']:.1f}", cell(s["right_of_terminated"])),
            ]
            for name, s in found.items()
        ],
        f"In percent, from {first['samples']} samples of each problem, with 95% intervals over problems (Wilson where "
        "all scores are 0 or 1, else bootstrap). pass@1 is the mean over problems of the mean over samples, pass@k the "
        "probability that one of k is right, without bias (arXiv 2107.03374, equation 1). All right: strict accuracy. "
        "Terminated: texts that end by themselves, neither at the limit nor for repetition; the last column is the "
        "accuracy among these alone.",
    )


def _paired_table(page: Page, reference: str, tested: dict[str, Summary]) -> None:
    if not tested:
        return
    page.table(
        ["method", "difference in points", "problems better, worse", "p, sign test", "p, flip test"],
        [
            [
                s["method"],
                f"{_points(s['difference'])} [{_points(s['difference_low'])}, {_points(s['difference_high'])}]",
                f"{s['problems_better']}, {s['problems_worse']} of {s['n']}",
                f"{s['sign_p_value']:.3g}",
                f"{s['p_value']:.3g}",
            ]
            for s in tested.values()
        ],
        f"Against {reference}, on the scores (means over samples) of the same problems: paired bootstrap; exact sign "
        "test, which ignores how much a problem changed; sign-flip permutation test, which does not.",
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _cost_table(page: Page, found: dict[str, Summary]) -> None:
    columns = {
        **{"method": "{method}", "output tokens": "{mean_output_tokens:.0f}", "times full": "{tokens_times_full:.2f}"},
        **{"seconds per text": "{seconds_per_text:.2f}", "seconds": "{seconds:.0f}"},
        **{"seconds, times full": "{seconds_times_full:.2f}", "tokens/s": "{tokens_per_second:.1f}"},
    }
    page.records(
        found.values(),
        columns,
        "Mean output tokens of a text; wall-clock time of decoding, per text and in all (the sum over processes); "
        "tokens per second. A method with more tokens per second takes longer if its texts are longer.",
    )


def _mode_table(page: Page, found: dict[str, Summary]) -> None:
    caption = (
        "Error modes on the samples that the full cache solves (their number is in the first column): repetitive, else "
        "cut at the limit (overlength), else incorrect. Ended early: texts that were stopped for repetition. Mean "
        "output tokens of the method and the full cache over the samples that both solve."
    )
    if any(s["samples"] > 1 for s in found.values()):
        caption += " Sample i of a problem is paired with the full cache's sample i, another draw: chance counts too."
    columns = {
        **{"method": "{method}", "solved by full": "{solved_in_full}", **{mode: f"{{{mode}}}" for mode in MODES}},
        "ended early": "{stopped_for_repetition}",
        "tokens, both right": "{tokens_both_right:.0f}, full {full_tokens_both_right:.0f} (n = {n_both_right})",
    }
    page.records(found.values(), columns, caption)


def _text_table(page: Page, found: dict[str, Summary]) -> None:
    columns = {
        "method": "{method}",
        **{f"entropy, {n}-grams": f"{{entropy_{n}_gram:.2f}}" for n in NGRAMS},
        **{f"repeated {n}-grams": f"{{repeated_{n}_grams:.3f}}" for n in NGRAMS},
        "repeated sentences": "{sentence_redundancy:.3f}",
        "repetitive texts": "{share_repetitive:.3f}",
    }
    page.records(
        found.values(),
        columns,
        "Means over texts: entropy of n-grams of tokens in bits (arXiv 2505.13866, equation 1; it grows with the "
        "length of a text), share of n-grams and of sentences that occurred before in their text; share of repetitive "
        "texts.",
    )


def _settings(config: dict[str, Any]) -> list[str]:
    """The options, one sentence each."""
    limits = ", ".join(f"{task} {tokens:,}" for task, tokens in config["max_new_tokens"].items())
    samples = ", ".join(f"{task} {number}" for task, number in config["num_samples"].items())
    how = "Greedy decoding"
    if config["temperature"] > 0:
        how = (
            f"Samples of each problem: {samples}; temperature {config['temperature']:g}, top-p "
            f"{config['top_p']:g}, top-k {config['top_k'] or 'unlimited'}, seed {config['seed']}"
        )
    first = f"the prompt (at least {config['sink']})" if config["protect_prompt"] else config["sink"]
    window, distinct = config["repetition"]
    prompts = {
        "full": "in full by all heads",
        "local": "through them, as in training",
        "published": "in full by all heads, their last 50 tokens decoded through them, as in the evaluation of RLKV",
    }
    stopped = "such texts are ended there" if config["stop_repetitive"] else "such texts continue"
    return [
        f"{how}; new tokens at most: {limits}; {config['batch_size']} texts at once; {config['dtype']}.",
        f"Without a policy, compressible heads keep {first} + {config['window']} entries. Prompts are read "
        f"{prompts[config['prefill']]}; template of maths tasks: {config['template'] or 'their own'}.",
        f"Repetitive: {window} tokens hold fewer than {distinct} distinct ones; {stopped}.",
        f"{config['processes']} process{'es' if config['processes'] > 1 else ''}.",
        *([f"Programs were shut in by {config['sandbox']}."] if "sandbox" in config else []),
    ]
