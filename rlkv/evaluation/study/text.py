"""How figures are written: the same number looks the same in every table and sentence."""

from __future__ import annotations

from typing import Any

from rlkv.evaluation.report.html_page import LEVEL, Cell, sign_of
from rlkv.evaluation.report.markdown_page import LEGEND as MARKS_LEGEND
from rlkv.evaluation.study.base import Figures

LEGEND = (
    f"Colour: green better, red worse than the full cache by a paired permutation test (p < {LEVEL:g}, not corrected "
    f"for the number of comparisons), grey not told apart; in Markdown {MARKS_LEGEND}."
)
SEEDS_FIXED = (
    "Intervals and p values are over problems, with the seeds held fixed: they say nothing of what another training "
    "run or another draw would find. How many sets of heads have the sign of a difference stands beside it."
)
INTERVAL_NOTE = (
    "Brackets: 95% intervals over problems (Wilson for single runs, else bootstrap of the mean over seeds). Seeds that "
    "keep the same heads are one measurement, greedy decoding being deterministic: 'sets of heads' counts them."
)


def interval(figures: Figures, digits: int = 2) -> str:
    return f"[{figures['low']:.{digits}f}, {figures['high']:.{digits}f}]"


def estimate(figures: Figures, digits: int = 2) -> str:
    """A mean with its interval."""
    return f"{figures['mean']:.{digits}f} {interval(figures, digits)}"


def p_number(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def p_text(p_value: float) -> str:
    return f"p {p_number(p_value)}" if p_value < 0.001 else f"p = {p_number(p_value)}"


def difference(figures: Figures) -> str:
    """A paired difference in accuracy with its interval."""
    return f"{figures['difference']:+.3f} [{figures['low']:+.2f}, {figures['high']:+.2f}]"


def judged(figures: Figures) -> str:
    """``better``, ``worse`` or ``not told apart``, by the paired test."""
    return sign_of(figures["difference"], figures["p_value"]).replace("same", "not told apart")


def difference_cell(figures: Figures) -> Cell:
    """A paired difference, coloured, its interval below."""
    sign = sign_of(figures["difference"], figures["p_value"])
    return Cell(f"{figures['difference']:+.3f}", sign, f"[{figures['low']:+.2f}, {figures['high']:+.2f}]")


def verdict(figures: Figures, same_heads: bool = False) -> str:
    """A paired difference for a sentence: its size and what the test says, or why there is none."""
    if same_heads:
        return "the same heads"
    if not figures["changed"]:
        return "no problem differs"
    return f"{difference(figures)}, {p_text(figures['p_value'])}, {judged(figures)}"


def seeds_of_sign(compared: Figures, first: str, second: str) -> str:
    """For a sentence, after a verdict: how many sets of heads of each method have the sign of the difference.

    Args:
        compared: of :func:`rlkv.evaluation.study.comparison.compare`, whose seeds with the same heads count once.

    Empty where there is no difference, or one set of heads of each.
    """
    difference, seeds = compared["difference"]["difference"], compared["per_seed"]
    if difference == 0 or len(seeds["first"]) == len(seeds["second"]) == 1:
        return ""
    counts = [
        f"{sum(value * difference > 0 for value in values)} of {plural(len(values), 'set')} of heads of {name}"
        for name, values in ((first, seeds["first"]), (second, seeds["second"]))
    ]
    return f"; this sign: {' and '.join(counts)}"


def seeds_text(accuracy: Figures, run: str = "seed") -> str:
    """How many runs a mean has, how many of them are different, and their range; empty for one run."""
    seeds = accuracy["seeds"]
    if len(seeds) == 1:
        return ""
    text = f"{len(seeds)} {run}s"
    if accuracy["distinct"] < len(seeds):
        text += f", {plural(accuracy['distinct'], 'set')} of heads"
    if accuracy["distinct"] == 1:
        return text
    low, high = f"{min(seeds):.2f}", f"{max(seeds):.2f}"
    return f"{text}: {low} to {high}" if low != high else f"{text}: all {low}"


def accuracy_note(accuracy: Figures, run: str = "seed") -> str:
    """The interval, and on a line of its own the range of the seeds."""
    seeds = seeds_text(accuracy, run)
    return interval(accuracy) + (f"\n{seeds}" if seeds else "")


def accuracy_cell(accuracy: Figures, run: str = "seed") -> Cell:
    """As the paper's tables 4 to 6: accuracy, the difference to full in brackets, coloured; below interval and seeds.

    Without a difference (of the full cache itself, or where the table has another one) it is the accuracy alone.
    """
    test = accuracy["versus_full"]
    if test is None:
        return Cell(f"{accuracy['mean']:.3f}", "", accuracy_note(accuracy, run))
    text = f"{accuracy['mean']:.3f} ({test['difference']:+.3f})"
    return Cell(text, sign_of(test["difference"], test["p_value"]), accuracy_note(accuracy, run))


def levels(values: Any) -> list[str]:
    """Column titles for sparsities."""
    return [f"s = {value:g}" for value in values]


def plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"
