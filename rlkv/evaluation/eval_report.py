"""The report of an evaluation: summaries, tables as RLKV's 6 to 8, a plot for each task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rlkv.evaluation.evaluate import (
    FULL,
    RANDOM_HEADS,
    RESULTS,
    CompressionMethod,
    Evaluation,
    plot_name,
)
from rlkv.evaluation.metrics import (
    MODES,
    NGRAMS,
    Estimate,
    Floats,
    error_mode,
    mean_with_interval,
    ngram_entropy,
    paired_difference,
    problem_scores,
    ratio_with_interval,
    repetition_rate,
    sentence_redundancy,
    sign_test,
    smallest_provable_difference,
)
from rlkv.evaluation.published import published_name, write_published
from rlkv.evaluation.report import (
    FIXED_STYLES,
    FULL_CACHE,
    LEVEL,
    RANDOM,
    Metrics,
    Page,
    Panel,
    Point,
    levels,
    mark,
    p_number,
    plot_curves,
    provenance_facts,
)
from rlkv.evaluation.runner import ROWS, name_unlike_rows
from rlkv.rollout.base import share_held
from rlkv.utils.files import write_json
from rlkv.utils.runtime import provenance
from rlkv.utils.store import Row

# --- summaries


def summarize(
    task: str,
    method: str,
    rows: list[Row],
    full_rows: list[Row] | None,
    baseline_rows: list[Row] | None = None,
) -> Metrics:
    """Return accuracy with its interval, paired tests, lengths, times, bytes and error modes.

    Args:
        full_rows: of the full cache on the same problems; None if it was not run: then there are
            no differences and no error modes.
        baseline_rows: of another method on the same problems; ``versus_baseline`` has the tests
            against it.
    """
    problems = _by_problem(rows)
    verdicts = [[row["correct"] for row in samples] for samples in problems.values()]
    scores = problem_scores(verdicts)
    accuracy = mean_with_interval(scores)
    summary: Metrics = {
        "task": task,
        "method": method,
        "n": len(problems),
        "samples": len(rows) // len(problems),
        "accuracy": accuracy.mean,
        "ci_low": accuracy.low,
        "ci_high": accuracy.high,
        "kv_bytes": sum(row["kv_bytes"] for row in rows),
        "kv_bytes_full": sum(row["kv_bytes_full"] for row in rows),
        # samples that change less than a whole problem prove smaller ones
        "smallest_provable_difference": smallest_provable_difference(len(problems))
        if len(rows) == len(problems)
        else None,
        "pass_at_k": pass_at(verdicts),
        "strict": _interval(mean_with_interval([float(all(own)) for own in verdicts])),
        **_terminated(problems),
        **_cost(rows),
        **_texts(rows),
    }
    if unchanged := sum(row.get("kv_bytes_unchanged", 0) for row in rows):
        summary["kv_bytes_unchanged"] = unchanged
    if full_rows is not None and method != FULL:
        summary |= _tests(full_rows, scores)
        summary |= _versus_full(rows, full_rows)
    if baseline_rows is not None:
        summary["versus_baseline"] = _tests(baseline_rows, scores)
    return summary


def _by_problem(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by their problems, in the order of the keys."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=itemgetter("key")):
        groups.setdefault(row["key"], []).append(row)
    return groups


def _interval(of: Estimate) -> dict[str, float]:
    return {"mean": of.mean, "low": of.low, "high": of.high}


def pass_at(verdicts: list[list[bool]]) -> dict[str, dict[str, float]]:
    """Return pass@k for k = 1, 2, 4, ... up to the samples of a problem, with 95% intervals."""
    found = {}
    k = 1
    while k <= min(map(len, verdicts)):
        found[str(k)] = _interval(mean_with_interval(problem_scores(verdicts, k)))
        k *= 2
    return found


def _terminated(problems: dict[str, list[Row]]) -> Metrics:
    """Return the share of texts that ended by themselves and their accuracy, None without any."""
    right = []
    ended = []
    for samples in problems.values():
        own = [row["correct"] for row in samples if row["finish_reason"] == "stop"]
        right.append(sum(own))
        ended.append(len(own))
    accuracy = ratio_with_interval(right, ended)
    return {
        "share_terminated": sum(ended) / sum(map(len, problems.values())),
        "right_of_terminated": None if accuracy is None else _interval(accuracy),
    }


def _cost(rows: list[Row]) -> Metrics:
    """Return output tokens, and wall-clock time of decoding, summed over processes."""
    tokens = sum(len(row["token_ids"]) for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    return {
        "mean_output_tokens": tokens / len(rows),
        "seconds": round(seconds, 2),
        "seconds_per_text": seconds / len(rows),
        "tokens_per_second": tokens / max(1e-9, seconds),
    }


def _texts(rows: list[Row]) -> Metrics:
    """Return how the texts repeat themselves, as means, and how many were ended early for it."""
    found = {
        "share_repetitive": fmean(row["repetitive"] for row in rows),
        "stopped_for_repetition": sum(row["finish_reason"] == "repetition" for row in rows),
        "sentence_redundancy": fmean(sentence_redundancy(row["text"]) for row in rows),
    }
    for n in NGRAMS:
        found[f"entropy_{n}_gram"] = fmean(ngram_entropy(row["token_ids"], n) for row in rows)
        found[f"repeated_{n}_grams"] = fmean(repetition_rate(row["token_ids"], n) for row in rows)
    return found


def _tests(reference_rows: list[Row], scores: Floats) -> Metrics:
    """Compare scores with those of another method on the same problems."""
    problems = _by_problem(reference_rows).values()
    reference = problem_scores([[row["correct"] for row in samples] for samples in problems])
    found = paired_difference(reference, scores)
    better, worse, sign_p_value = sign_test(reference, scores)
    return {
        "difference": found.difference,
        "difference_low": found.low,
        "difference_high": found.high,
        "p_value": found.p_value,
        "problems_better": better,
        "problems_worse": worse,
        "sign_p_value": sign_p_value,
    }


def _versus_full(rows: list[Row], full_rows: list[Row]) -> Metrics:
    """Return cost relative to the full cache, and error modes and lengths where that is right."""
    full_tokens = {}
    for row in full_rows:
        if row["correct"]:
            full_tokens[row["key"], row["sample"]] = len(row["token_ids"])
    common = [row for row in rows if (row["key"], row["sample"]) in full_tokens]
    modes = [error_mode(row) for row in common]
    own_lengths = []
    full_lengths = []
    for row in common:
        if row["correct"]:
            own_lengths.append(len(row["token_ids"]))
            full_lengths.append(full_tokens[row["key"], row["sample"]])
    cost = _cost(rows)
    full_cost = _cost(full_rows)
    return {
        "tokens_times_full": cost["mean_output_tokens"] / full_cost["mean_output_tokens"],
        "tokens_both_right": fmean(own_lengths) if own_lengths else None,
        "full_tokens_both_right": fmean(full_lengths) if full_lengths else None,
        "n_both_right": len(own_lengths),
        "solved_in_full": len(full_tokens),
        **{mode: modes.count(mode) for mode in MODES},
    }


# --- the page

# a task whose smallest provable difference is larger proves little: the report says so in bold
COARSE = 0.05
LEGEND = (
    "Accuracy: pass@1 in percent, with 95% intervals over problems. In parentheses: the paired "
    f"difference to the full cache in points; * ▲ ▼ where a permutation test gives p < {LEVEL:g}, "
    "uncorrected. "
    "KV: bytes held at the end of each text, of the full cache's for the same tokens. s: share of "
    "KV heads that are compressible."
)
OF_GATED = (
    "This model has layers without gates, whose sliding windows and linear states count in KV; the "
    "second share is that of the layers with gates alone, and s that of their heads."
)
PREFILL = {
    "full": "in full by all heads",
    "local": "through them, as in training",
    "published": "in full by all heads, their last 50 tokens decoded through them, as in the "
    "evaluation of RLKV",
}
MODE_COLUMNS = {
    "method": "{method}",
    "solved by full": "{solved_in_full}",
    **{mode: f"{{{mode}}}" for mode in MODES},
    "ended early, of all": "{stopped_for_repetition}",
    "tokens, both right": "{tokens_both_right:.0f}, full {full_tokens_both_right:.0f} (n = "
    "{n_both_right})",
}
MODE_CAPTION = (
    "How samples fail that the full cache solves; mean output tokens where both are right."
)
COST_COLUMNS = {
    "method": "{method}",
    "output tokens": "{mean_output_tokens:.0f}",
    "times full": "{tokens_times_full:.2f}",
    "seconds per text": "{seconds_per_text:.2f}",
    "seconds": "{seconds:.0f}",
    "tokens/s": "{tokens_per_second:.1f}",
}
COST_CAPTION = (
    "Output tokens and wall-clock time of decoding, summed over processes. The first method's time "
    "includes compilation; `rlkv-bench` compares speeds."
)
TEXT_COLUMNS = {
    "method": "{method}",
    **{f"entropy, {n}-grams": f"{{entropy_{n}_gram:.2f}}" for n in NGRAMS},
    **{f"repeated {n}-grams": f"{{repeated_{n}_grams:.3f}}" for n in NGRAMS},
    "repeated sentences": "{sentence_redundancy:.3f}",
    "repetitive texts": "{share_repetitive:.3f}",
}
TEXT_CAPTION = (
    "Means over texts: entropy of n-grams of tokens in bits (arXiv 2505.13866, equation 1); "
    "shares of n-grams and sentences that occurred before in their text."
)


def write_report(folder: Path, done: Evaluation) -> None:
    """Write ``results.json``, a plot for each task, ``report.md`` and ``report.html``."""
    baseline = done.config["baseline"]
    summaries = []
    for (task, method), rows in done.rows.items():
        other = None if method == baseline else done.rows.get((task, baseline))
        summaries.append(summarize(task, method, rows, done.rows.get((task, FULL)), other))
    origin = provenance()
    write_json(folder / RESULTS, {"config": done.config, **origin, "results": summaries})
    files = {}
    for task, method in done.rows:
        shards = (folder / task.replace(":", "_") / method).glob(f"{ROWS}-*-of-*.jsonl")
        files[f"{task} {method}"] = sorted(shards)
    unlike = name_unlike_rows(files)
    page = evaluation_page(folder, done.methods, summaries, origin, done.config, unlike)
    page.write_report(folder)


def evaluation_page(
    folder: Path,
    methods: list[CompressionMethod],
    summaries: list[Metrics],
    origin: Metrics,
    config: dict[str, Any],
    unlike: Sequence[str] = (),
) -> Page:
    """Return the report of all tasks, and write their plots.

    Args:
        folder: takes the plots; the page is to be written there too.
        summaries: of every task with every method (:func:`summarize`).
        origin: what :func:`rlkv.utils.runtime.provenance` returns.
        config: the options; published numbers are those of its model.
        unlike: a sentence on rows that were not all made alike, if any.
    """
    page = Page(f"Evaluation of {config['model']}")
    page.paragraph(LEGEND)
    if any("kv_bytes_unchanged" in summary for summary in summaries):
        page.paragraph(OF_GATED)
    if any(method.ranking == RANDOM_HEADS for method in methods):
        page.paragraph(f"{RANDOM_HEADS} is one draw of heads (seed {config['seed']}).")
    for task in dict.fromkeys(summary["task"] for summary in summaries):
        page.heading(task)
        own = [summary for summary in summaries if summary["task"] == task]
        _write_task(page, folder, task, methods, own, config)
    page.heading("How it was run")
    page.code(origin["command"])
    page.bullets([*_settings(config), *provenance_facts(origin), *unlike])
    return page


def _write_task(
    page: Page,
    folder: Path,
    task: str,
    methods: list[CompressionMethod],
    summaries: list[Metrics],
    config: dict[str, Any],
) -> None:
    first = summaries[0]
    _write_provable(page, first)
    _write_accuracy(page, task, methods, summaries)
    if any(summary["method"] != FULL for summary in summaries):
        plot = plot_accuracy(folder / plot_name(task), task, methods, summaries)
        page.picture(plot, f"{task}: accuracy against the bytes of KV held, 95% intervals.")
    _write_samples(page, summaries)
    against_full = [summary for summary in summaries if "difference" in summary]
    _write_paired(page, "the full cache", against_full)
    against_baseline = []
    for summary in summaries:
        if "versus_baseline" in summary:
            against_baseline.append({**summary, **summary["versus_baseline"]})
    _write_paired(page, config["baseline"], against_baseline)
    write_published(page, published_name(config["model"], config.get("data")), task)
    caption = MODE_CAPTION
    if first["samples"] > 1:
        caption += " Sample i of a problem is paired with the full cache's sample i: another text."
    page.records(summaries, MODE_COLUMNS, caption)
    page.records(summaries, COST_COLUMNS, COST_CAPTION)
    page.records(summaries, TEXT_COLUMNS, TEXT_CAPTION)


def _write_provable(page: Page, summary: Metrics) -> None:
    """Say which differences a task of this size can prove."""
    n = summary["n"]
    least = smallest_provable_difference(n)
    if least is None:
        page.paragraph(f"{n} problems are too few for a significant difference.", strong=True)
        return
    text = (
        f"{n} problems: at least {round(least * n)} must change, all in one direction, for a "
        f"significant difference (sign test, p < {LEVEL:g})"
    )
    if summary["samples"] == 1:
        text += f", which is a difference of {100 * least:.1f} points"
    coarse = summary["samples"] == 1 and least > COARSE
    page.paragraph(text + (": this task proves little." if coarse else "."), strong=coarse)


def _write_accuracy(
    page: Page, task: str, methods: list[CompressionMethod], summaries: list[Metrics]
) -> None:
    """Add rankings of heads by sparsity, and a table of the methods without a sparsity."""
    cells = {summary["method"]: _accuracy_cell(summary) for summary in summaries}
    full = [FULL_CACHE, cells[FULL]] if FULL in cells else []
    groups: dict[str, dict[float, str]] = {}
    others = []
    for method in methods:
        if method.sparsity is not None:
            groups.setdefault(_group(method), {})[method.sparsity] = cells[method.name]
        elif method.name != FULL:
            others.append([method.name, cells[method.name]])
    if groups or not others:
        sparsities = sorted({0.0}.union(*groups.values()))
        rows = [full + [""] * (len(sparsities) - 1)] if full else []
        for name, by_sparsity in groups.items():
            rows.append([name, *(by_sparsity.get(sparsity, "") for sparsity in sparsities)])
        caption = f"{task}, measured: which heads stay full, by sparsity."
        page.table(["heads", *levels(sparsities)], rows, caption)
    if others:
        rows = [full, *others] if full else others
        caption = f"{task}, measured: policies in all heads."
        page.table(["method", "accuracy"], rows, caption)


def _group(method: CompressionMethod) -> str:
    """Return the name of a method without its sparsity, which methods of one ranking share."""
    if method.sparsity is None:
        return method.name
    parts = method.name.split("+")
    policies = [part for part in parts if part.partition("@")[0] != method.ranking]
    return "+".join([str(method.ranking), *policies])


def plot_accuracy(
    path: Path, task: str, methods: list[CompressionMethod], summaries: list[Metrics]
) -> Path:
    """Plot accuracy against the bytes of KV held, with a curve through the sparsities of a ranking.

    summaries: of this task with every method (:func:`summarize`).
    """
    by_name = {summary["method"]: summary for summary in summaries}
    curves: dict[str, list[Point]] = {}
    for method in methods:
        if method.name == FULL:
            continue
        of = by_name[method.name]
        share = share_held(of["kv_bytes"], of["kv_bytes_full"])
        point = (share, of["accuracy"], of["ci_low"], of["ci_high"])
        curves.setdefault(_group(method), []).append(point)
    panel = Panel(
        f"{task}: accuracy, 95% intervals",
        "KV held at the end of each text, share of the full cache's bytes",
        {name: sorted(points) for name, points in curves.items()},
        ylabel="accuracy (pass@1)",
        styles={RANDOM_HEADS: FIXED_STYLES[RANDOM]},
        reference=by_name[FULL]["accuracy"] if FULL in by_name else None,
        ticks=False,
    )
    return plot_curves(path, panel)


def _percent(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _accuracy_cell(summary: Metrics) -> str:
    held = summary["kv_bytes"]
    full = summary["kv_bytes_full"]
    share = f"KV {share_held(held, full):.0%}"
    if unchanged := summary.get("kv_bytes_unchanged"):
        share += f" ({share_held(held, full, unchanged):.0%})"
    if "difference" not in summary:
        text = _percent(summary["accuracy"], summary["ci_low"], summary["ci_high"])
        return text if summary["method"] == FULL else f"{text} {share}"
    sign = mark(summary["difference"], summary["p_value"])
    change = _points(summary["difference"]) + ("*" if sign else "")
    low = _points(summary["difference_low"])
    high = _points(summary["difference_high"])
    return f"{100 * summary['accuracy']:.1f} ({change} [{low}, {high}]) {share}{sign}"


def _write_samples(page: Page, summaries: list[Metrics]) -> None:
    samples = summaries[0]["samples"]
    columns = ["method", *(f"pass@{k}" for k in summaries[0]["pass_at_k"])]
    if samples > 1:
        columns.append(f"all {samples} right")
    rows = []
    for summary in summaries:
        cells = [summary["method"], *(_percent(**of) for of in summary["pass_at_k"].values())]
        if samples > 1:
            cells.append(_percent(**summary["strict"]))
        right = summary["right_of_terminated"]
        terminated = f"{100 * summary['share_terminated']:.1f}"
        rows.append([*cells, terminated, _percent(**right) if right else "none"])
    page.table(
        [*columns, "terminated texts", "right of these"],
        rows,
        f"In percent, from {samples} samples of each problem. Terminated: texts that end by "
        "themselves.",
    )


def _write_paired(page: Page, reference: str, summaries: list[Metrics]) -> None:
    if not summaries:
        return
    rows = []
    for of in summaries:
        limits = f"[{_points(of['difference_low'])}, {_points(of['difference_high'])}]"
        rows.append(
            [
                of["method"],
                f"{_points(of['difference'])} {limits}",
                f"{of['problems_better']}, {of['problems_worse']} of {of['n']}",
                p_number(of["sign_p_value"]),
                p_number(of["p_value"]),
            ]
        )
    columns = ("difference in points", "problems better, worse", "p, sign test", "p, flip test")
    page.table(["method", *columns], rows, f"Against {reference}, paired by problem.")


def _settings(config: dict[str, Any]) -> Iterable[str]:
    """Return a sentence for each group of options."""
    how = "Greedy decoding"
    if config["temperature"] > 0:
        samples = ", ".join(f"{task} {number}" for task, number in config["num_samples"].items())
        how = (
            f"Samples of each problem: {samples}; temperature {config['temperature']:g}, top-p "
            f"{config['top_p']:g}, top-k {config['top_k'] or 'unlimited'}, seed {config['seed']}"
        )
    limits = ", ".join(f"{task} {tokens:,}" for task, tokens in config["max_new_tokens"].items())
    yield (
        f"{how}; new tokens at most: {limits}; {config['batch_size']} texts at once; "
        f"{config['dtype']}."
    )
    first = config["sink"]
    if config["protect_prompt"]:
        first = f"the prompt (at least {first})"
    yield (
        f"Without a policy, compressible heads keep {first} + {config['window']} entries. Prompts "
        f"are read {PREFILL[config['prefill']]}; template of maths tasks: "
        f"{config['template'] or 'their own'}."
    )
    window, distinct = config["repetition"]
    stopped = "such texts are ended there" if config["stop_repetitive"] else "such texts continue"
    yield f"Repetitive: {window} tokens hold fewer than {distinct} distinct ones; {stopped}."
    yield f"{config['processes']} process{'es' if config['processes'] > 1 else ''}."
    if config["engine"] == "vllm":
        yield (
            "Decoded by vLLM. KV counts the entries in use at the end of each text; the engine "
            "holds them in whole blocks, which is more."
        )
    if "sandbox" in config:
        yield f"Programs were shut in by {config['sandbox']}."
