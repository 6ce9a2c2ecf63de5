"""The serving benchmark as a Markdown page and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rlkv.benchmarks.serving_workload import LIMITED, Workload

NOTE = (
    "Figures are medians over the rounds, in brackets the least and the greatest. x full: tokens/s over those of the "
    "full cache in the same round. Theory: 1 / ((1-s) + s K/L) with the mean length L and room for K entries, S+W or "
    "budget and buffer; by blocks: the same for the "
    "blocks that these requests really hold over their lives; both are about requests that fit, so they say nothing "
    "where memory is not the limit. KV bytes per token: bytes of the blocks in use over the tokens of the running "
    "requests, mean over all steps, with the steps that are in flight. Pool: KV tokens by the engine's own count for "
    "requests of the longest length, with the blocks that it reserves for a step in flight. Times are from the start, "
    "when all requests arrive. What is compared is one process each, with the scheduler in it."
)


def describe(work: Workload, setting: str) -> str:
    """One sentence on pool and requests of a setting."""
    pool = work.pool_bytes(setting)
    low, high = work.prompt_tokens
    return (
        f"{work.requests} requests at once, prompts of {low} to {high} tokens, outputs of {work.mean_output} tokens on "
        f"average (lognormal, spread {work.spread:g}, at most {work.max_output}), mean length "
        f"{work.mean_length:.0f}; up to {work.rows_of(setting)} may run; a pool of {pool:,} bytes, "
        f"{pool // work.bytes_per_token:,} tokens of the full cache; S={work.sink}, W={work.window}, with eviction "
        f"{work.budget} entries and a buffer of {work.buffer}; blocks of {work.block_size}."
    )


def markdown_page(work: Workload, rows: list[dict[str, Any]]) -> str:
    """Two tables per setting: speed, then memory and times."""
    parts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        parts += [f"## {setting.capitalize()}", describe(work, setting), _speed(own), _memory(own)]
    return "\n\n".join([*parts, NOTE])


def _speed(rows: list[dict[str, Any]]) -> str:
    head = ("mode", "output tokens/s", "x full", "theory", "by blocks", "steps", "steps, full / this", "mean running")
    lines = []
    for row in rows:
        expected = row.get("expected")
        shown = expected if row["setting"] == LIMITED else None
        lines.append(
            (
                row["mode"],
                _range(row["tokens_per_second"], "{:.1f}"),
                _range(row["speedup"], "{:.2f}"),
                f"{shown['theory']:.2f}" if shown else "",
                f"{shown['by_blocks']:.2f}" if shown else "",
                _range(row["steps"], "{:,.0f}"),
                f"{row['step_ratio'][0]:.2f}",
                _range(row["mean_running"], "{:.2f}"),
            )
        )
    return _table(head, lines)


def _memory(rows: list[dict[str, Any]]) -> str:
    head = ("mode", "preemptions", "TTFT s p50, p90, p99", "latency s p50, p90, p99")
    lines = []
    for row in rows:
        times = [" / ".join(f"{row[f'{name}_p{p}'][0]:.2f}" for p in (50, 90, 99)) for name in ("ttft", "latency")]
        memory = (f"{row['bytes_per_token'][0]:,.0f}", f"{row['pool_tokens'][0]:,.0f}", f"{row['pool_bytes'][0]:,.0f}")
        lines.append((row["mode"], _range(row["preemptions"], "{:,.0f}"), *times, *memory))
    return _table((*head, "KV bytes per token", "KV tokens in the pool", "pool bytes"), lines)


def _range(values: list[float], form: str) -> str:
    middle, least, greatest = (form.format(value) for value in values)
    return middle if least == greatest else f"{middle} [{least}, {greatest}]"


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(rows + [f"| {' | '.join(line)} |" for line in lines])


def _draw(axes: Any, rows: list[dict[str, Any]], name: str, is_limited: bool) -> None:
    """One kind of compressible heads at rising sparsities; ``name`` is added to the labels."""
    shares = [row["sparsity"] for row in rows]
    middle = [row["speedup"][0] for row in rows]
    low = [row["speedup"][0] - row["speedup"][1] for row in rows]
    high = [row["speedup"][2] - row["speedup"][0] for row in rows]
    drawn = axes.errorbar(
        shares, middle, yerr=[low, high], marker="o", markersize=4, capsize=3, label=f"tokens/s{name}"
    )
    colour = drawn.lines[0].get_color()
    if is_limited:
        steps = [row["step_ratio"][0] for row in rows]
        axes.plot(shares, steps, "-.", color=colour, marker="s", markersize=4, label=f"engine steps{name}")
        for key, label, style in (("theory", "theory", "--"), ("by_blocks", "by blocks", ":")):
            expected = [row["expected"][key] for row in rows]
            axes.plot(shares, expected, style, color=colour, marker="_", label=f"{label}{name}")


def plot_results(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """One panel per setting: tokens/s over those of the full cache at each sparsity, with least and greatest."""
    from matplotlib.figure import Figure

    from rlkv.utils.figures import TITLE_SIZE, save_figure

    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(4.4 * len(settings), 3.8), layout="constrained")
    panels = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
    for axes, setting in zip(panels, settings, strict=True):
        compressed = [row for row in rows if row["setting"] == setting and "expected" in row]
        for eviction in dict.fromkeys(row["eviction"] for row in compressed):
            own = sorted((row for row in compressed if row["eviction"] == eviction), key=lambda r: r["sparsity"])
            _draw(axes, own, "" if eviction is None else f", {eviction}", setting == LIMITED)
        shares = sorted({row["sparsity"] for row in compressed})
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("sparsity")
        axes.set_xticks(shares)
        axes.set_title(setting, fontsize=TITLE_SIZE)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=3.2)
    panels[0].set_ylabel("times the full cache, same pool bytes")
    figure.suptitle(textwrap.fill(title, 60 * len(settings)), fontsize=TITLE_SIZE)
    save_figure(figure, path)
