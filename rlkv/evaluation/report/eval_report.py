"""The report of an evaluation: results.json, and a page with a table per task in the layout of RLKV's tables 6 to 8."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rlkv.evaluation.report.page import MARKS_LEGEND, Cell, Page, provenance_facts, sign_of
from rlkv.evaluation.report.plots import FULL_CACHE
from rlkv.evaluation.report.published import write_published
from rlkv.evaluation.run.evaluation import Evaluation
from rlkv.evaluation.run.methods import FULL, RANDOM_HEADS, CompressionMethod
from rlkv.evaluation.stats.metrics import (
    FEW_CHANGED,
    MODES,
    error_mode,
    mean_with_interval,
    ngram_entropy,
    paired_difference,
    problem_scores,
    repetition_rate,
    sentence_redundancy,
    smallest_provable_difference,
)
from rlkv.utils.atomic import write_json
from rlkv.utils.provenance import provenance

NGRAMS = (1, 2, 3)
COARSE = 0.05  # a task whose smallest provable difference is larger proves little: the report says so in bold
HOW_TO_READ = (
    "Accuracy is pass@1 in percent, with its 95% interval for the full cache. For a method, in parentheses: the "
    "difference to the full cache in points, with its 95% interval (bootstrap over problems, paired); * where a paired "
    "permutation test gives p < 0.05, coloured by sign (grey: no significant difference; in Markdown "
    f"{MARKS_LEGEND}). {FEW_CHANGED} "
    "The p values are not corrected for the number of comparisons. KV: bytes of KV in use at the end of each text, "
    "over the bytes of the full cache for the same tokens. s: share of KV heads that are compressible."
)
Row = dict[str, Any]
Summary = dict[str, Any]


def by_problem(rows: list[Row]) -> dict[str, list[bool]]:
    """Verdicts on the samples of each problem, in the order of their keys."""
    groups = groupby(sorted(rows, key=itemgetter("key")), itemgetter("key"))
    return {key: [row["correct"] for row in samples] for key, samples in groups}


def summarize(task: str, method: str, rows: list[Row], full_rows: list[Row] | None) -> Summary:
    """pass@1 with its interval, the difference to the full cache with its own, pass@k, lengths, bytes, error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: no differences and error modes then.
    """
    verdicts = by_problem(rows)
    scores = problem_scores(list(verdicts.values()))
    estimate = mean_with_interval(scores)
    tokens, seconds = sum(len(row["token_ids"]) for row in rows), sum(row["seconds"] for row in rows)
    summary: Summary = {
        "task": task,
        "method": method,
        "n": len(scores),
        "samples": len(rows) // len(scores),
        "accuracy": estimate.mean,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "pass_at_k": pass_at(list(verdicts.values())),
        "mean_output_tokens": tokens / len(rows),
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        "seconds": round(seconds, 2),
        "tokens_per_second": tokens / max(1e-9, seconds),
        "smallest_provable_difference": smallest_provable_difference(len(scores)),
        **_texts(rows),
    }
    if full_rows is not None and method != FULL:
        full = by_problem(full_rows)
        if list(full) != list(verdicts):
            raise ValueError(f"{task}: {method} and the full cache were run on other problems: run both on the same")
        test = paired_difference(problem_scores(list(full.values())), scores)
        summary |= {"difference": test.difference, "difference_low": test.low, "difference_high": test.high}
        summary |= {"p_value": test.p_value, **_versus_full(rows, full_rows)}
    return summary


def pass_at(verdicts: list[list[bool]]) -> dict[str, dict[str, float]]:
    """pass@k for k = 1, 2, 4, ... up to the samples of each problem, with 95% intervals over problems."""
    powers = (2**i for i in range(min(map(len, verdicts)).bit_length()))
    estimates = {str(k): mean_with_interval(problem_scores(verdicts, k)) for k in powers}
    return {k: {"mean": of.mean, "low": of.low, "high": of.high} for k, of in estimates.items()}


def _texts(rows: list[Row]) -> Row:
    """How the texts repeat themselves, each a mean over texts, and how many were ended early for it."""
    return {
        "share_repetitive": fmean(row["repetitive"] for row in rows),
        "stopped_for_repetition": sum(row["finish_reason"] == "repetition" for row in rows),
        "share_at_limit": fmean(row["finish_reason"] == "length" for row in rows),
        "sentence_redundancy": fmean(sentence_redundancy(row["text"]) for row in rows),
        **{f"entropy_{n}_gram": fmean(ngram_entropy(row["token_ids"], n) for row in rows) for n in NGRAMS},
        **{f"repeated_{n}_grams": fmean(repetition_rate(row["token_ids"], n) for row in rows) for n in NGRAMS},
    }


def _versus_full(rows: list[Row], full_rows: list[Row]) -> Row:
    """On the samples that the full cache solves: error modes, and mean output tokens of both where both are right."""
    solved = {(row["key"], row["sample"]): len(row["token_ids"]) for row in full_rows if row["correct"]}
    common = [(row, solved[unit]) for row in rows if (unit := (row["key"], row["sample"])) in solved]
    both = [(len(row["token_ids"]), full) for row, full in common if row["correct"]]
    own, full = map(fmean, zip(*both, strict=True)) if both else (None, None)
    modes = [error_mode(row) for row, _ in common]
    return {
        **{"tokens_both_right": own, "full_tokens_both_right": full, "n_both_right": len(both)},
        "solved_in_full": len(solved),
        **{mode: modes.count(mode) for mode in MODES},
    }


def write_report(folder: Path, done: Evaluation) -> None:
    """``results.json``, ``report.html`` and ``report.md``."""
    full = {task: rows for (task, method), rows in done.rows.items() if method == FULL}
    summaries = [summarize(task, method, rows, full.get(task)) for (task, method), rows in done.rows.items()]
    origin = provenance()
    write_json(folder / "results.json", {"config": done.config, **origin, "results": summaries})
    page = evaluation_page(done.methods, summaries, origin, done.config)
    for name in ("report.html", "report.md"):
        page.write(folder / name)


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
        _pass_at_table(page, found)
        write_published(page, config["model"], task)
        _mode_table(page, found)
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
    if "difference" not in summary:
        return Cell(_percent(summary["accuracy"], summary["ci_low"], summary["ci_high"]))
    change, low, high = (100 * summary[name] for name in ("difference", "difference_low", "difference_high"))
    sign = sign_of(change, summary["p_value"])
    mark = "" if sign == "same" else "*"
    share = summary["kv_bytes"] / summary["kv_bytes_full"]
    text = f"{100 * summary['accuracy']:.1f} ({change:+.1f}{mark} [{low:+.1f}, {high:+.1f}]) KV {share:.0%}"
    return Cell(text, sign)


def _pass_at_table(page: Page, found: dict[str, Summary]) -> None:
    samples = sorted({s["samples"] for s in found.values()})
    if samples == [1]:
        return
    rows = [[name, *(_percent(**of) for of in s["pass_at_k"].values())] for name, s in found.items()]
    page.table(
        ["method", *(f"k = {k}" for k in next(iter(found.values()))["pass_at_k"])],
        rows,
        f"pass@k in percent from {', '.join(map(str, samples))} samples of each problem: the probability that one of "
        "k is right, without bias (arXiv 2107.03374, equation 1), with 95% intervals over problems (Wilson where all "
        "scores are 0 or 1, else bootstrap).",
    )


def _mode_table(page: Page, found: dict[str, Summary]) -> None:
    caption = (
        "Error modes on the samples that the full cache solves (their number is in the first column): repetitive, else "
        "cut at the limit (overlength), else incorrect. Ended early: texts that were stopped for repetition. Mean "
        "output tokens, over all and, for the method and the full cache, over the samples that both solve."
    )
    if any(s["samples"] > 1 for s in found.values()):
        caption += " Sample i of a problem is paired with the full cache's sample i, another draw: chance counts too."
    columns = {
        **{"method": "{method}", "solved by full": "{solved_in_full}", **{mode: f"{{{mode}}}" for mode in MODES}},
        **{"ended early": "{stopped_for_repetition}", "output tokens": "{mean_output_tokens:.0f}"},
        "where both are right": "{tokens_both_right:.0f}, full {full_tokens_both_right:.0f} (n = {n_both_right})",
    }
    page.records(found.values(), columns, caption)


def _text_table(page: Page, found: dict[str, Summary]) -> None:
    columns = {
        "method": "{method}",
        **{f"entropy, {n}-grams": f"{{entropy_{n}_gram:.2f}}" for n in NGRAMS},
        **{f"repeated {n}-grams": f"{{repeated_{n}_grams:.3f}}" for n in NGRAMS},
        "repeated sentences": "{sentence_redundancy:.3f}",
        "repetitive texts": "{share_repetitive:.3f}",
        "tokens/s": "{tokens_per_second:.1f}",
    }
    page.records(
        found.values(),
        columns,
        "Means over texts: entropy of n-grams of tokens in bits (arXiv 2505.13866, equation 1; it grows with the "
        "length of a text), share of n-grams and of sentences that occurred before in their text; share of repetitive "
        "texts; tokens per second of decoding.",
    )


def _settings(config: dict[str, Any]) -> list[str]:
    """The options, one sentence each."""
    limits = ", ".join(f"{task} {tokens:,}" for task, tokens in config["max_new_tokens"].items())
    how = "Greedy decoding"
    if config["temperature"] > 0:
        how = (
            f"{config['num_samples']} samples of each problem at temperature {config['temperature']:g}, top-p "
            f"{config['top_p']:g}, top-k {config['top_k'] or 'unlimited'}, seed {config['seed']}"
        )
    window, distinct = config["repetition"]
    prompts = {
        "full": "in full by all heads",
        "local": "through them, as in training",
        "published": "in full by all heads, their last 50 tokens decoded through them, as in the evaluation of RLKV",
    }
    stopped = "such texts are ended there" if config["stop_repetitive"] else "such texts continue"
    return [
        f"{how}; new tokens at most: {limits}; {config['batch_size']} texts at once; {config['dtype']}.",
        f"Without a policy, compressible heads keep {config['sink']} + {config['window']} entries. Prompts are read "
        f"{prompts[config['prefill']]}.",
        f"Repetitive: {window} tokens hold fewer than {distinct} distinct ones; {stopped}.",
        f"{config['processes']} process{'es' if config['processes'] > 1 else ''}.",
    ]
