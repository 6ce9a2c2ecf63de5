"""How metrics are written: the same number looks the same in every table and sentence."""

from __future__ import annotations

from typing import Any

from rlkv.evaluation.measurements import Metrics
from rlkv.evaluation.report import LEVEL, MARKS_LEGEND, Cell, sign_of

SAME = "no significant difference"
NOT_AVAILABLE = "n/a"
LEGEND = (
    f"{MARKS_LEGEND} than the full cache by a paired permutation test (p < {LEVEL:g}, not "
    "corrected for the number of "
    f"comparisons); no mark: {SAME}."
)
SEEDS_FIXED = (
    "Intervals and p values are over problems, with the seeds held fixed: they say nothing about "
    "another training run. "
    "Problems of the same random draw count as independent, so that for random heads the interval "
    "has only a part of "
    "the variance between draws. How many sets of heads share the sign of a difference is given "
    "with it, for methods "
    "that decode all problems with each."
)
INTERVAL_NOTE = (
    "Brackets: 95% intervals over problems (Wilson for single runs, else bootstrap of the mean "
    "over seeds). Seeds that "
    "keep the same heads are one measurement, greedy decoding being deterministic: 'sets of heads' "
    "counts them. Random "
    "draws share the problems: each problem is decoded once, under one of the draws."
)
BYTES_NOTE = (
    "KV held: bytes of KV in use at the end of each text, over the bytes that the full cache would "
    "hold for the same "
    "tokens"
)


def interval(metrics: Metrics, digits: int = 2) -> str:
    return f"[{metrics['low']:.{digits}f}, {metrics['high']:.{digits}f}]"


def estimate(metrics: Metrics, digits: int = 2) -> str:
    """A mean with its interval."""
    return f"{metrics['mean']:.{digits}f} {interval(metrics, digits)}"


def p_number(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def p_text(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def difference_cell(metrics: Metrics, *notes: str, sign: float = 1.0) -> Cell:
    """A paired difference with its mark, interval and ``notes``; ``sign`` -1: lower is better."""
    mark = sign_of(sign * metrics["difference"], metrics["p_value"])
    limits = f"[{metrics['low']:+.2f}, {metrics['high']:+.2f}]"
    return Cell(f"{metrics['difference']:+.3f}", mark, "\n".join([limits, *notes]))


def verdict(metrics: Metrics, same_heads: bool = False) -> str:
    """A paired difference for a sentence: its size and what the test says, or why there is none."""
    if same_heads:
        return "the same heads"
    if not metrics["changed"]:
        return "no problem differs"
    size = f"{metrics['difference']:+.3f} [{metrics['low']:+.2f}, {metrics['high']:+.2f}]"
    judged = sign_of(metrics["difference"], metrics["p_value"]).replace("same", SAME)
    return f"{size}, {p_text(metrics['p_value'])}, {judged}"


def seeds_of_sign(compared: Metrics, first: str, second: str) -> str:
    """For a sentence, after a verdict: how many sets of heads of each method have the sign of the
    difference.

    ``compared``: as :func:`compare` returns it.  Draws that share the problems are left out.  Empty
    where there is no difference, or at most one set of heads of each.
    """
    difference, seeds = compared["difference"]["difference"], compared["per_seed"]
    if difference == 0 or max(map(len, seeds.values())) <= 1:
        return ""
    counts = [
        f"{sum(value * difference > 0 for value in values)} of {plural(len(values), 'set')} of "
        f"heads of {name}"
        for name, values in ((first, seeds["first"]), (second, seeds["second"]))
        if values
    ]
    return f"; this sign: {' and '.join(counts)}"


def against(compared: Metrics, shown: str, first: str, second: str) -> str:
    """The accuracy of the ``shown`` one, ``first`` or ``second``, and in parentheses how the first
    one compares.
    """
    text = verdict(compared["difference"], compared["same_heads"]) + seeds_of_sign(
        compared, first, second
    )
    return f"{compared[shown]['mean']:.3f} ({text})"


def seeds_text(accuracy: Metrics) -> str:
    """How many seeds a mean has, how many of them are different, and their range, or how many
    draws; empty for one.
    """
    seeds = accuracy["seeds"]
    if accuracy["draws"] > 1:
        return f"{accuracy['draws']} draws, which share the problems"
    if len(seeds) == 1:
        return ""
    text = f"{len(seeds)} seeds"
    if accuracy["distinct"] < len(seeds):
        text += f", {plural(accuracy['distinct'], 'set')} of heads"
    if accuracy["distinct"] == 1:
        return text
    low, high = f"{min(seeds):.2f}", f"{max(seeds):.2f}"
    return f"{text}: {low} to {high}" if low != high else f"{text}: all {low}"


def accuracy_cell(accuracy: Metrics) -> Cell:
    """As RLKV's tables 4 to 6: accuracy, any difference to full in brackets and its mark, then
    interval and seeds.
    """
    test, seeds = accuracy["versus_full"], seeds_text(accuracy)
    note = interval(accuracy) + (f"\n{seeds}" if seeds else "")
    if test is None:
        return Cell(f"{accuracy['mean']:.3f}", "", note)
    text = f"{accuracy['mean']:.3f} ({test['difference']:+.3f})"
    return Cell(text, sign_of(test["difference"], test["p_value"]), note)


def levels(values: Any) -> list[str]:
    """Column titles for sparsities."""
    return [f"s = {value:g}" for value in values]


def plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"
