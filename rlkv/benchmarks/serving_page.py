"""The serving benchmark as a Markdown page and a plot."""

from __future__ import annotations

from typing import Any

from rlkv.benchmarks.output import Line, Plot, markdown_table, write_result
from rlkv.benchmarks.serving import ServingConfig, do_runs, summarize
from rlkv.benchmarks.workload import LIMITED, Workload
from rlkv.models.loading import resolve_device
from rlkv.utils.provenance import hardware_line
from rlkv.vllm.plugin import check_installed, installed_version

NOTE = (
    "Figures are medians over the rounds, in brackets the least and the greatest. x full: tokens/s over those of the "
    "full cache in the same round. Theory: 1 / ((1-s) + s K/L) with the mean length L and room for K entries, S+W or "
    "budget and buffer. By blocks: the same for the blocks that these requests hold over their lives. Both are about "
    "how many requests fit, so they do not apply where memory is not the limit. KV bytes per token: bytes of the "
    "blocks in use over the tokens of the running requests, mean over all steps, with the steps that are in flight. "
    "Pool: KV tokens by the engine's own count for requests of the longest length, with the blocks that it reserves "
    "for a step in flight. Times are from the start, when all requests arrive. Every run is a process of its own, "
    "with the scheduler in it."
)


def serving_title(work: Workload, gates: str | None) -> str:
    """A line that names model, engine and machine; ``gates``: the file that was named, None for random gates."""
    return (
        f"Llama of {work.layers} layers, {work.kv_heads} KV heads of {work.head_dim}, hidden {work.hidden}, random "
        f"weights, {work.dtype}, {gates or 'random gates'}; vLLM {installed_version()}, "
        f"{'eager' if work.eager else 'compiled'}; {hardware_line()}"
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


def serving_page(work: Workload, rows: list[dict[str, Any]]) -> str:
    """Two tables per setting: speed, then memory and times."""
    parts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        parts += [f"## {setting.capitalize()}", describe(work, setting)]
        parts += [markdown_table([_formatted(row) for row in own], columns) for columns in (SPEED, MEMORY)]
    return "\n\n".join([*parts, NOTE])


SPEED = {
    "mode": "{mode}",
    "output tokens/s": "{tokens_per_second}",
    "x full": "{speedup}",
    "theory": "{theory}",
    "by blocks": "{by_blocks}",
    "steps": "{steps}",
    "steps, full / this": "{step_ratio}",
    "mean running": "{mean_running}",
}
MEMORY = {
    "mode": "{mode}",
    "preemptions": "{preemptions}",
    "TTFT s p50, p90, p99": "{ttft_p50} / {ttft_p90} / {ttft_p99}",
    "latency s p50, p90, p99": "{latency_p50} / {latency_p90} / {latency_p99}",
    "KV bytes per token": "{bytes_per_token}",
    "KV tokens in the pool": "{pool_tokens}",
    "pool bytes": "{pool_bytes}",
}
WITH_RANGE = {
    "tokens_per_second": ".1f",
    "speedup": ".2f",
    "steps": ",.0f",
    "mean_running": ".2f",
    "preemptions": ",.0f",
}
MIDDLE = {"step_ratio": ".2f", "bytes_per_token": ",.0f", "pool_tokens": ",.0f", "pool_bytes": ",.0f"}


def _formatted(row: dict[str, Any]) -> dict[str, str]:
    """The numbers of a row as text: the median, with the least and the greatest where they say something."""
    cells = {name: _range(row[name], form) for name, form in WITH_RANGE.items()}
    times = {name: ".2f" for name in row if name.startswith(("ttft_", "latency_"))}
    cells |= {name: format(row[name][0], form) for name, form in {**MIDDLE, **times}.items()}
    expected = row.get("expected") if row["setting"] == LIMITED else None
    cells |= {name: f"{expected[name]:.2f}" if expected else "" for name in ("theory", "by_blocks")}
    return {"mode": row["mode"], **cells}


def _range(values: list[float], form: str) -> str:
    middle, least, greatest = (format(value, form) for value in values)
    return middle if least == greatest else f"{middle} [{least}, {greatest}]"


def serving_plot(rows: list[dict[str, Any]]) -> Plot:
    """One panel per setting: tokens/s over those of the full cache at each sparsity, with least and greatest."""
    panels: dict[str, list[Line]] = {}
    compressed = [row for row in rows if "expected" in row]
    evictions = list(dict.fromkeys(row["eviction"] for row in compressed))
    for setting, eviction in dict.fromkeys((row["setting"], row["eviction"]) for row in compressed):
        own = [row for row in compressed if (row["setting"], row["eviction"]) == (setting, eviction)]
        own.sort(key=lambda row: row["sparsity"])
        color, name = f"C{evictions.index(eviction)}", "" if eviction is None else f", {eviction}"
        x = [row["sparsity"] for row in own]
        middle, low, high = ([row["speedup"][i] for row in own] for i in range(3))
        lines = [Line(f"tokens/s{name}", x, middle, low, high, {"color": color})]
        if setting == LIMITED:
            steps = [row["step_ratio"][0] for row in own]
            look = {"linestyle": "-.", "marker": "s", "color": color}
            lines.append(Line(f"engine steps{name}", x, steps, style=look))
            for key, label, style in (("theory", "theory", "--"), ("by_blocks", "by blocks", ":")):
                expected = [row["expected"][key] for row in own]
                look = {"linestyle": style, "marker": "_", "color": color}
                lines.append(Line(f"{label}{name}", x, expected, style=look))
        panels.setdefault(setting, []).extend(lines)
    return Plot(panels, "sparsity", "times the full cache, same pool bytes", shared=True, base=1.0)


def run_serving(config: ServingConfig) -> None:
    """``rlkv-bench serving``: do the runs that are missing and write the results."""
    check_installed()
    gates = config.head_gates()
    runs = do_runs(config, gates)
    rows = summarize(config, gates, runs)
    facts = {
        "device": resolve_device().type,
        "runs": runs,
        "lengths": {"prompts": [len(prompt) for prompt in config.prompts], "outputs": config.output_lengths},
        "versions": {"vllm": installed_version()},  # also where the distribution is that for CPUs
    }
    title, page, plot = serving_title(config, config.gates), serving_page(config, rows), serving_plot(rows)
    write_result(config.output_dir, "serving", title, config, rows, page, plot, **facts)
