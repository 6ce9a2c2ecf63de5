"""The report of an evaluation as a page: per task a table in the layout of RLKV's tables 6 to 8, and what goes with it.

Measured and published numbers stand in tables of their own, one below the other.
"""

from __future__ import annotations

from typing import Any

from rlkv.evaluation.report.eval_report import NGRAMS, Summary
from rlkv.evaluation.report.html_page import Cell, Page, sign_of
from rlkv.evaluation.report.markdown_page import LEGEND
from rlkv.evaluation.report.published import Source, find_published, published_numbers
from rlkv.evaluation.run.methods import FULL, RANDOM_HEADS, CompressionMethod
from rlkv.evaluation.stats.error_modes import MODES
from rlkv.evaluation.stats.metrics import FEW_CHANGED

FULL_CACHE = "full cache"
COARSE = 0.05  # a task whose smallest provable difference is larger proves little: it is said in bold
HOW_TO_READ = (
    "Accuracy is pass@1 in percent, with its 95% interval for the full cache. For a method, in parentheses: the "
    "difference to the full cache in points, with its 95% interval (bootstrap over problems, paired); * where a paired "
    f"permutation test gives p < 0.05, coloured by sign (grey: not told apart; in Markdown {LEGEND}). {FEW_CHANGED} "
    "The p values are not corrected for the number of comparisons. KV: bytes of KV in use at the end of each text, "
    "over the bytes of the full cache for the same tokens. s: share of KV heads that are compressible."
)


def evaluation_page(
    model: str,
    methods: list[CompressionMethod],
    summaries: list[Summary],
    provenance: dict[str, Any],
    config: dict[str, Any],
) -> Page:
    """The whole report.

    Args:
        model: its name; published numbers are looked up by its last part.
        summaries: of :func:`rlkv.evaluation.report.eval_report.summarize`, every task with every method.
        provenance: of :func:`rlkv.utils.provenance.provenance`.
        config: the settings that results.json has too.
    """
    page = Page(f"Evaluation of {model}")
    page.paragraph(HOW_TO_READ)
    if any(method.ranking == RANDOM_HEADS for method in methods):
        page.paragraph(
            f"{RANDOM_HEADS} is one draw of heads (seed {config['seed']}): its intervals are over problems and say "
            "nothing of other draws."
        )
    for task in dict.fromkeys(s["task"] for s in summaries):
        found = {s["method"]: s for s in summaries if s["task"] == task}
        page.heading(task)
        page.paragraph(_what_it_proves(next(iter(found.values()))), strong=_is_coarse(next(iter(found.values()))))
        _accuracy_table(page, task, methods, found)
        _pass_at_table(page, found)
        _published_table(page, model, task)
        _text_tables(page, found)
    page.heading("How it was run")
    page.code(provenance["command"])
    page.bullets([*_settings(config), *_machine(provenance)])
    return page


def _is_coarse(summary: Summary) -> bool:
    least = summary["smallest_provable_difference"]
    return least is None or least > COARSE


def _what_it_proves(summary: Summary) -> str:
    n, least = summary["n"], summary["smallest_provable_difference"]
    if least is None:
        return f"{n} problems prove nothing: no difference between two methods could be called significant."
    text = (
        f"{n} problems: at least {round(least * n)} must change, all in one direction, for a difference between two "
        "methods to be called significant (sign test, p < 0.05)"
    )
    if summary["samples"] == 1:
        text += f", which is a difference of {100 * least:.1f} points"
    return text + (": this task proves little." if _is_coarse(summary) else ".")


def _accuracy_table(page: Page, task: str, methods: list[CompressionMethod], found: dict[str, Summary]) -> None:
    """Rankings of heads down, sparsities across; what has no sparsity gets a table of its own."""
    by_heads = [m for m in methods if m.sparsity is not None]
    others = [m for m in methods if m.sparsity is None and m.name != FULL]
    full = found.get(FULL)
    levels = sorted({0.0, *(m.sparsity for m in by_heads if m.sparsity is not None)})
    if by_heads or not others:
        rows: list[list[Cell | str]] = []
        if full is not None:
            rows.append([FULL_CACHE, _cell(full), *([""] * len(levels[1:]))])
        for group in dict.fromkeys(map(_group, by_heads)):
            own = {m.sparsity: found[m.name] for m in by_heads if _group(m) == group}
            rows.append([group, *(_cell(own[s]) if s in own else "" for s in levels)])
        columns = ["heads", *(f"s = {s:g}" for s in levels)]
        page.table(columns, rows, f"{task}, measured: which heads stay full, by sparsity.")
    if others:
        rows = [[FULL_CACHE, _cell(full)]] if full is not None else []
        rows += [[m.name, _cell(found[m.name])] for m in others]
        page.table(["method", "accuracy"], rows, f"{task}, measured: policies in all heads.")


def _group(method: CompressionMethod) -> str:
    """The row of a method: its name without the sparsity."""
    policies = [part for part in method.name.split("+") if part.partition("@")[0] != method.ranking]
    return "+".join([str(method.ranking), *policies])


def _cell(summary: Summary) -> Cell:
    text = f"{100 * summary['accuracy']:.1f}"
    if "difference" not in summary:
        return Cell(f"{text} [{100 * summary['ci_low']:.1f}, {100 * summary['ci_high']:.1f}]")
    low, high = summary["difference_low"], summary["difference_high"]
    sign = sign_of(summary["difference"], summary["p_value"])
    mark = "*" if sign in ("better", "worse") else ""
    share = summary["kv_bytes"] / summary["kv_bytes_full"]
    return Cell(
        f"{text} ({100 * summary['difference']:+.1f}{mark} [{100 * low:+.1f}, {100 * high:+.1f}]) KV {share:.0%}", sign
    )


def _pass_at_table(page: Page, found: dict[str, Summary]) -> None:
    samples = {s["samples"] for s in found.values()}
    if samples == {1}:
        return
    ks = list(next(iter(found.values()))["pass_at_k"])
    rows = [[name, *(_estimate(s["pass_at_k"][k]) for k in ks)] for name, s in found.items()]
    caption = (
        f"pass@k in percent from {', '.join(map(str, sorted(samples)))} samples of each problem: the probability that "
        "one of k is right, without bias (arXiv 2107.03374, equation 1), with 95% intervals over problems "
        "(Wilson where all scores are 0 or 1, else bootstrap)."
    )
    page.table(["method", *(f"k = {k}" for k in ks)], rows, caption)


def _estimate(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['mean']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def _text_tables(page: Page, found: dict[str, Summary]) -> None:
    rows = []
    for name, s in found.items():
        modes = [str(s[mode]) if mode in s else "" for mode in MODES]
        both = "" if s.get("tokens_both_right") is None else _both(s)
        solved = str(s.get("solved_in_full", ""))
        rows.append([name, solved, *modes, str(s["stopped_for_repetition"]), f"{s['mean_output_tokens']:.0f}", both])
    paired = ""
    if any(s["samples"] > 1 for s in found.values()):
        paired = " Sample i of a problem is paired with the full cache's sample i, another draw: chance counts too."
    page.table(
        ["method", "solved by full", *MODES, "ended early", "output tokens", "where both are right"],
        rows,
        "Error modes on the samples that the full cache solves (so many are they): repetitive, else cut at the limit "
        "(overlength), else incorrect. Ended early: texts that were stopped for repetition. Mean output tokens, "
        "over all and, for the method and the full cache, over the samples that both solve." + paired,
    )
    rows = [
        [
            name,
            *(f"{s[f'entropy_{n}_gram']:.2f}" for n in NGRAMS),
            *(f"{s[f'repeated_{n}_grams']:.3f}" for n in NGRAMS),
            f"{s['sentence_redundancy']:.3f}",
            f"{s['share_repetitive']:.3f}",
            f"{s['tokens_per_second']:.1f}",
        ]
        for name, s in found.items()
    ]
    page.table(
        [
            "method",
            *(f"entropy, {n}-grams" for n in NGRAMS),
            *(f"repeated {n}-grams" for n in NGRAMS),
            "repeated sentences",
            "repetitive texts",
            "tokens/s",
        ],
        rows,
        "Means over texts: entropy of n-grams of tokens in bits (arXiv 2505.13866, equation 1; it grows with the "
        "length of a text), share of n-grams and of sentences that occurred before in their text; share of repetitive "
        "texts; tokens per second of decoding.",
    )


def _both(summary: Summary) -> str:
    return (
        f"{summary['tokens_both_right']:.0f}, full {summary['full_tokens_both_right']:.0f} "
        f"(n = {summary['n_both_right']})"
    )


def published_name(model: str) -> str | None:
    """The model of the papers whose name ends as this one (a hub id or a folder) does."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    known = dict.fromkeys(number.model for number in published_numbers())
    return next((name for name in known if name.rpartition("/")[2].lower() == last), None)


def _published_table(page: Page, model: str, task: str) -> None:
    name = published_name(model)
    numbers = find_published(name, task) if name else []
    if not numbers:
        return
    page.heading("Published numbers, not measured here", level=3)
    sources = list(dict.fromkeys(number.source for number in numbers))
    sparsities = sorted({n.sparsity for n in numbers if n.sparsity is not None})
    columns = ["method", *(f"s = {s:g}" for s in sparsities), "without s", "source"]
    rows = []
    for source in sources:
        for method in dict.fromkeys(n.method for n in numbers if n.source == source):
            values = {n.sparsity: n.value for n in numbers if n.source == source and n.method == method}
            cells = [f"{values[s]:.1f}" if s in values else "" for s in (*sparsities, None)]
            rows.append([_published_method(method), *cells, f"[{sources.index(source) + 1}]"])
    page.table(
        columns,
        rows,
        f"{name} on {task}, accuracy in percent as published; no intervals were published. s: share of KV heads, or of "
        "entries where tokens are dropped in all heads; s = 0 is the full cache.",
    )
    page.bullets([f"[{i}] {_source(source)}" for i, source in enumerate(sources, start=1)])


def _published_method(method: str) -> str:
    return FULL_CACHE if method == FULL else method


def _source(source: Source) -> str:
    return f"{source.paper} (arXiv {source.arxiv}), {source.where}: {source.protocol}"


def _settings(config: dict[str, Any]) -> list[str]:
    """What was set, one sentence each."""
    limits = ", ".join(f"{task} {tokens:,}" for task, tokens in config["max_new_tokens"].items())
    how = "Greedy decoding"
    if config["temperature"] > 0:
        how = (
            f"{config['num_samples']} samples of each problem at temperature {config['temperature']:g}, top-p "
            f"{config['top_p']:g}, top-k {config['top_k'] or 'unlimited'}, seed {config['seed']}"
        )
    rule = config["repetition"]
    stopped = "such texts are ended there" if config["stop_repetitive"] else "such texts go on"
    return [
        f"{how}; new tokens at most: {limits}; batches of {config['batch_size']}; {config['dtype']}.",
        f"Without a policy, compressible heads keep {config['sink']} + {config['window']} entries. Prompts are read "
        f"{'in full by all heads' if config['prefill'] == 'full' else 'through them, as in training'}.",
        f"Repetitive: {rule['window']} tokens hold fewer than {rule['distinct']} different ones; {stopped}.",
        f"{config['processes']} process{'es' if config['processes'] > 1 else ''}.",
    ]


def _machine(provenance: dict[str, Any]) -> list[str]:
    machine = provenance["hardware"]
    gpus = ", ".join(machine["gpus"]) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return [
        f"Hardware: {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads, GPU {gpus}.",
        f"Versions: {versions}.",
        f"Finished {provenance['finished']}.",
    ]
