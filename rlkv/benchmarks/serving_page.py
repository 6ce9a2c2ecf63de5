"""The serving benchmark as a page and a plot."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rlkv.benchmarks.common import write_result
from rlkv.benchmarks.serving import ServingConfig, do_runs, summarize
from rlkv.benchmarks.workload import Workload
from rlkv.evaluation.report import Page, Panel, Point
from rlkv.models.loading import resolve_device
from rlkv.utils.runtime import hardware_line
from rlkv.vllm.plugin import check_installed, installed_version

NOTE = (
    "Medians over the rounds, in brackets the least and the greatest. x full: tokens/s over those "
    "of the full cache in "
    "the same round. Theory: 1 / ((1-s) + s K/L) with the mean length L and room for K entries, "
    "S+W or budget and "
    "buffer. By blocks: the same for the blocks that these requests hold over their lives. Both "
    "apply where memory is "
    "the limit. KV bytes per token: bytes of the blocks in use over the tokens of the running "
    "requests, mean over all "
    "steps. Pool: KV tokens by the engine's own count for requests of the longest length. Times "
    "are from the start, "
    "when all requests arrive. Every run is a process of its own, with the scheduler in it."
)
SPEED = {
    "mode": "{mode}",
    "output tokens/s": "{tokens_per_second:.1f}",
    "x full": "{speedup:.2f}",
    "theory": "{expected[theory]:.2f}",
    "by blocks": "{expected[by_blocks]:.2f}",
    "steps": "{steps:,.0f}",
    "steps, full / this": "{step_ratio[0]:.2f}",
    "mean running": "{mean_running:.2f}",
}
MEMORY = {
    "mode": "{mode}",
    "preemptions": "{preemptions:,.0f}",
    "TTFT s p50, p90, p99": "{ttft_p50[0]:.2f} / {ttft_p90[0]:.2f} / {ttft_p99[0]:.2f}",
    "latency s p50, p90, p99": "{latency_p50[0]:.2f} / {latency_p90[0]:.2f} / {latency_p99[0]:.2f}",
    "KV bytes per token": "{bytes_per_token[0]:,.0f}",
    "KV tokens in the pool": "{pool_tokens[0]:,.0f}",
    "pool bytes": "{pool_bytes[0]:,.0f}",
}


def serving_page(work: Workload, rows: list[dict[str, Any]]) -> Page:
    """Two tables per setting: speed, then memory and times."""
    page, (low, high) = Page("rlkv-bench serving"), work.prompt_tokens
    for setting in dict.fromkeys(row["setting"] for row in rows):
        pool, own = work.pool_bytes(setting), [row for row in rows if row["setting"] == setting]
        page.heading(setting.capitalize())
        page.paragraph(
            f"{work.requests} requests at once, prompts of {low} to {high} tokens, outputs of "
            f"{work.mean_output} "
            f"tokens on average (lognormal, spread {work.spread:g}, at most {work.max_output}), "
            "mean length "
            f"{work.mean_length:.0f}; up to {work.rows_of(setting)} may run; a pool of {pool:,} "
            "bytes, "
            f"{pool // work.bytes_per_token:,} tokens of the full cache; S={work.sink}, "
            f"W={work.window}, with eviction "
            f"{work.budget} entries and a buffer of {work.buffer}; blocks of {work.block_size}."
        )
        page.records(own, SPEED)
        page.records(own, MEMORY)
    page.paragraph(NOTE)
    return page


def serving_plot(rows: list[dict[str, Any]]) -> list[Panel]:
    """A panel per setting: tokens/s over those of the full cache at each sparsity, and what was
    expected.
    """
    compressed = sorted(
        (row for row in rows if row["sparsity"] is not None), key=lambda row: row["sparsity"]
    )
    variants = list(dict.fromkeys(map(_variant, compressed)))
    panels = []
    for setting in dict.fromkeys(row["setting"] for row in compressed):
        curves: dict[str, list[Point]] = defaultdict(list)
        styles = {}
        for row in (row for row in compressed if row["setting"] == setting):
            name = _variant(row)
            points = {f"tokens/s{name}": (row["speedup"], "-")}
            if "expected" in row:
                points[f"engine steps{name}"] = ([row["step_ratio"][0]] * 3, "-.")
                points[f"theory{name}"] = ([row["expected"]["theory"]] * 3, "--")
                points[f"by blocks{name}"] = ([row["expected"]["by_blocks"]] * 3, ":")
            for label, ((middle, low, high), line) in points.items():
                curves[label].append((row["sparsity"], middle, low, high))
                styles[label] = {"color": f"C{variants.index(name)}", "linestyle": line}
        axes = ("sparsity", curves, "times the full cache, same pool bytes")
        panels.append(Panel(setting, *axes, styles=styles, reference=1.0, limits=None))
    return panels


def _variant(row: dict[str, Any]) -> str:
    """What a mode has besides its sparsity."""
    return str(row["mode"]).removeprefix(f"sparsity {row['sparsity']:g}")


def run_serving(config: ServingConfig) -> None:
    """``rlkv-bench serving``: do the runs that are missing and write the results."""
    check_installed()
    gates = config.head_gates()
    runs = do_runs(config, gates)
    rows = summarize(config, gates, runs)
    title = (
        f"Llama of {config.layers} layers, {config.kv_heads} KV heads of {config.head_dim}, hidden "
        f"{config.hidden}, "
        f"random weights, {config.dtype}, {config.gates or 'random gates'}; vLLM "
        f"{installed_version()}, "
        f"{'eager' if config.eager else 'compiled'}; {hardware_line()}"
    )
    facts: dict[str, Any] = {
        "device": resolve_device().type,
        "runs": runs,
        "lengths": {
            "prompts": [len(prompt) for prompt in config.prompts],
            "outputs": config.output_lengths,
        },
        "versions": {"vllm": installed_version()},  # also where the distribution is that for CPUs
    }
    page, panels = serving_page(config, rows), serving_plot(rows)
    write_result(config.output_dir, "serving", title, config, rows, page, panels, **facts)
