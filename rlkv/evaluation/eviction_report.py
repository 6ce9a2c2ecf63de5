"""Tables and picture of an eviction study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkv.evaluation.eviction_study import FULL
from rlkv.evaluation.stats.error_modes import MODES
from rlkv.evaluation.stats.intervals import sign_test

Row = dict[str, Any]
ALIKE = 0.05  # p value of the paired test above which a method is not told apart from the best


def winners(rows: list[Row], saved: float) -> tuple[Row, list[Row]]:
    """The most accurate method at a saving, and those that the paired sign test does not tell apart from it."""
    measured = [row for row in rows if row["saved"] == saved and row["accuracy"] is not None]
    best = max(measured, key=lambda row: row["accuracy"])
    alike = []
    for row in measured:
        pairs = list(zip(best["correct"], row["correct"], strict=True))
        p = sign_test(pairs.count(("1", "0")), pairs.count(("0", "1")))
        if row is not best and p > ALIKE:
            alike.append(row)
    return best, alike


def markdown_report(rows: list[Row], title: str, notes: list[str]) -> str:
    """Accuracy, error modes and lengths per method and saving, and who wins."""
    savings = sorted({row["saved"] for row in rows if row["method"] != FULL})
    full = next(row for row in rows if row["method"] == FULL)
    lines = [f"# {title}", ""]
    lines += [
        f"Full cache: {full['accuracy']:.3f} on {full['n']} problems, {full['mean_output_tokens']:.0f} output tokens "
        "on average.",
        "",
        *_table(rows, savings, "Accuracy, and in brackets the bytes of KV in use / bytes of the full cache", _accuracy),
        *_table(rows, savings, f"Error modes ({' / '.join(MODES)}) and mean output tokens", _failures),
        "## Who wins",
        "",
    ]
    for saved in savings:
        if not any(row["saved"] == saved and row["accuracy"] is not None for row in rows):
            lines.append(f"- {saved:.0%} saved: no method fits.")
            continue
        best, alike = winners(rows, saved)
        others = f"; not told apart from it (p > {ALIKE}): {', '.join(row['method'] for row in alike)}" if alike else ""
        lines.append(
            f"- {saved:.0%} saved: **{best['method']}** {best['accuracy']:.3f} "
            f"[{best['ci_low']:.2f}, {best['ci_high']:.2f}]{others}."
        )
    return "\n".join([*lines, "", *notes]) + "\n"


def _table(rows: list[Row], savings: list[float], title: str, cell: Any) -> list[str]:
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != FULL))
    lines = [f"## {title}", "", "| method | " + " | ".join(f"{saved:.0%} saved" for saved in savings) + " |"]
    lines.append("|---" * (len(savings) + 1) + "|")
    for method in methods:
        found = {row["saved"]: row for row in rows if row["method"] == method}
        cells = [cell(found[saved]) if found[saved]["accuracy"] is not None else "-" for saved in savings]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _accuracy(row: Row) -> str:
    return f"{row['accuracy']:.2f} ({row['kv_share']:.0%})"


def _failures(row: Row) -> str:
    return " / ".join(str(row[mode]) for mode in MODES) + f", {row['mean_output_tokens']:.0f}"


def plot_study(rows: list[Row], path: Path, title: str) -> None:
    """Accuracy over bytes in use: one panel for policies alone, one for rankings of heads and their combinations."""
    from matplotlib.figure import Figure

    from rlkv.utils.figures import TEXT_SIZE, TITLE_SIZE, save_figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    full = next(row for row in rows if row["method"] == FULL)
    measured = [row for row in rows if row["method"] != FULL and row["accuracy"] is not None]
    for axes, name, chosen in (
        (panels[0], "tokens dropped in all heads", [row for row in measured if not row["heads"]]),
        (panels[1], "some heads full", [row for row in measured if row["heads"]]),
    ):
        for i, method in enumerate(dict.fromkeys(row["method"] for row in chosen)):
            points = sorted((row["kv_share"], row["accuracy"]) for row in chosen if row["method"] == method)
            style = "-" if i < 10 else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=f"C{i % 10}", label=method)
        axes.axhline(full["accuracy"], color="black", linewidth=0.8, linestyle=":")
        axes.set_title(name, fontsize=TITLE_SIZE)
        axes.set_xlabel("bytes of KV in use / bytes of the full cache")
        axes.grid(alpha=0.3)
        if chosen:
            axes.legend(fontsize=TEXT_SIZE)
    panels[0].set_ylabel("greedy accuracy")
    panels[0].set_ylim(-0.03, 1.03)
    figure.suptitle(title, fontsize=TITLE_SIZE)
    save_figure(figure, path)
