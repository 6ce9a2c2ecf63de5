"""Speed and memory of the compressed cache.

    python inference/benchmark.py decode            # the whole table, about 15 minutes on 2 cores
    python inference/benchmark.py decode --quick    # small sizes, under a minute
    python inference/benchmark.py decode --threads 1 --contexts 4096 --batches 1
    python inference/benchmark.py compaction        # what the eviction policies cost, a few minutes
    python inference/benchmark.py serving           # throughput of the vLLM plugin, about an hour on 2 cores
    python inference/benchmark.py serving --sparsities 0.5 --rounds 2
    python inference/benchmark.py serving --eviction rkv --budget 64 --buffer 32

``decode``: a random Llama of about 100 M parameters (8 KV heads of 64, two query heads each) decodes with
HeadReallocationCache at several sparsities and with transformers' DynamicCache (sdpa), taking turns in one run.
Writes decode.json, decode.md and decode.png.

``compaction``: one compaction of every eviction policy against one decode step of that model, and its memory.
Writes compaction.json and compaction.md.

``serving`` (needs vLLM): offline throughput of the stock engine and of the plugin at several sparsities, with the same
requests, output lengths and bytes of KV pool, where memory is the limit and where it is not; with ``--eviction`` each
sparsity is also run with that policy in the compressible heads. Every run has a process
of its own; finished ones are kept and not repeated. Writes serving.json, serving.md and serving.png.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.benchmarks import serving_benchmark
from rlkv.benchmarks.compaction_benchmark import CompactionConfig, compaction_table, run_compaction_benchmark
from rlkv.benchmarks.decode_benchmark import BenchmarkConfig, build_model, markdown_rows, plot_results, run_benchmark
from rlkv.benchmarks.serving_report import markdown_page
from rlkv.benchmarks.serving_report import plot_results as plot_serving
from rlkv.benchmarks.serving_workload import SETTINGS, SHAPES
from rlkv.cli.errors import help_text, run_app
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import resolve_device, resolve_dtype
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import hardware, hardware_line, provenance

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

QUICK = BenchmarkConfig(
    batches=(1, 2), contexts=(256, 1024), rounds=2, seconds=0.5, layers=4, hidden=256, vocabulary=512
)


@app.callback(help=help_text(__doc__))
def benchmark() -> None: ...


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r} is no list of numbers: write it as 1,8") from None
    if not values or min(values) < (1 if kind is int else 0):
        raise ValueError(f"{option} {text!r} holds a number out of range")
    return values


@contextmanager
def progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; yields what moves it."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        bar.update(task, completed=bar.tasks[0].total)


def facts_and_title(
    parameters: int, config: Any, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Any], str]:
    """What a result file carries beside its rows, and a line that names model and machine."""
    name = str(dtype).removeprefix("torch.")
    facts = {"parameters": parameters, "dtype": name, "device": str(device), "config": asdict(config), **provenance()}
    machine = hardware_line() + (f", {hardware()['torch_threads']} threads" if device.type == "cpu" else "")
    return facts, f"Llama of {parameters / 1e6:.0f} M parameters, {name}, {machine}"


def write(output_dir: Path, name: str, facts: dict[str, Any], results: list, title: str, table: str) -> None:
    with atomic_path(output_dir / f"{name}.json") as path:
        path.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")
    with atomic_path(output_dir / f"{name}.md") as path:
        path.write_text(f"{title}; torch {facts['versions']['torch']}\n\n{table}\n")
    print(f"{title}\n\n{table}\n\nwritten to {output_dir}")


@app.command()
def decode(
    output_dir: Annotated[Path, typer.Option(help="Where decode.json, .md and .png go.")] = Path("results/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Small model, short contexts.")] = False,
    batches: Annotated[str | None, typer.Option(help="Comma-separated; default 1,8.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens cached; default 1024,4096,16384.")] = None,
    sparsities: Annotated[str | None, typer.Option(help="Must include 0; default 0,0.5,0.9.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns that each cache takes.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Torch threads; default: all cores.", min=1)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Median time of a decode step against DynamicCache, with bytes of KV held / held by the full cache."""
    config = QUICK if quick else BenchmarkConfig()
    if batches is not None:
        config = replace(config, batches=_numbers(batches, "--batches", int))
    if contexts is not None:
        config = replace(config, contexts=_numbers(contexts, "--contexts", int))
    if sparsities is not None:
        config = replace(config, sparsities=_numbers(sparsities, "--sparsities", float))
    if rounds is not None:
        config = replace(config, rounds=rounds)
    if threads is not None:
        torch.set_num_threads(threads)
    target = resolve_device(device)
    model = build_model(config, target, resolve_dtype(dtype, target))
    with progress("decode") as on_turn:
        results = run_benchmark(model, config, on_turn)
    facts, title = facts_and_title(model.num_parameters(), config, target, model.dtype)
    write(output_dir, "decode", facts, results, title, markdown_rows(results))
    plot_results(results, title, str(output_dir / "decode.png"))


@app.command()
def compaction(
    output_dir: Annotated[Path, typer.Option(help="Where compaction.json and .md go.")] = Path("results/bench"),
    entries: Annotated[str, typer.Option(help="Cached entries, of which half are kept.")] = "1024,4096,16384",
    rows: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    rounds: Annotated[int, typer.Option(help="Turns that each policy takes.", min=1)] = 7,
    threads: Annotated[int | None, typer.Option(help="Torch threads; default: all cores.", min=1)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Time of one compaction of each policy against one decode step, and its memory high-water mark."""
    config = CompactionConfig(entries=_numbers(entries, "--entries", int), rows=rows, rounds=rounds)
    if min(config.entries) < 128:
        raise ValueError(f"--entries {entries!r}: policies need 128 or more entries to choose from")
    if threads is not None:
        torch.set_num_threads(threads)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, target)
    with progress("compaction") as on_turn:
        results = run_compaction_benchmark(config, target, kind, on_turn)
    parameters = build_model(config.model, torch.device("meta"), kind).num_parameters()
    facts, title = facts_and_title(parameters, config, target, kind)
    write(output_dir, "compaction", facts, results, title, compaction_table(results))


@app.command()
def serving(
    output_dir: Annotated[Path, typer.Option(help="Where serving.json, .md and .png go.")] = Path("results/serving"),
    shape: Annotated[str, typer.Option(help="small, llama8b, or auto: llama8b on a GPU.")] = "auto",
    sparsities: Annotated[str, typer.Option(help="Compared with the full cache.")] = "0.2,0.4,0.5,0.6",
    eviction: Annotated[str | None, typer.Option(help="Run each sparsity with this policy too: rkv or snapkv.")] = None,
    settings: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SETTINGS),
    rounds: Annotated[int, typer.Option(help="Turns that each mode takes.", min=1)] = 5,
    gates: Annotated[str | None, typer.Option(help="A gates file of that shape; default: random gates.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests, all at once.", min=1)] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Shortest and longest prompt, as 32,64.")] = None,
    mean_output: Annotated[int | None, typer.Option(help="Mean output length.", min=1)] = None,
    max_output: Annotated[int | None, typer.Option(help="Longest output.", min=1)] = None,
    sink: Annotated[int | None, typer.Option(help="Tokens that compressible heads keep.", min=0)] = None,
    window: Annotated[int | None, typer.Option(help="Tokens that compressible heads keep.", min=1)] = None,
    budget: Annotated[int | None, typer.Option(help="Entries that --eviction keeps.", min=1)] = None,
    buffer: Annotated[int | None, typer.Option(help="Entries between two compactions.", min=1)] = None,
    pool_tokens: Annotated[int | None, typer.Option(help="Full-cache tokens in the limited pool.", min=1)] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block.", min=1)] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of the shape's.", min=1)] = None,
    hidden: Annotated[int | None, typer.Option(help="Instead of the shape's.", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Instead of the shape's.", min=1)] = None,
    query_heads: Annotated[int | None, typer.Option(help="Instead of the shape's.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop the runs of the folder.")] = False,
) -> None:
    """Output tokens per second with vLLM, full cache and head reallocation in turns, in pools of equal bytes."""
    serving_benchmark.check_engine_installed()
    device = resolve_device()
    name = ("llama8b" if device.type == "cuda" else "small") if shape == "auto" else shape
    if name not in SHAPES:
        raise ValueError(f"unknown --shape {shape!r}: choose auto or one of {', '.join(SHAPES)}")
    work = SHAPES[name]
    sizes = {"layers": layers, "hidden": hidden, "kv_heads": kv_heads, "query_heads": query_heads}
    changes: dict[str, Any] = {
        "requests": requests,
        "prompt_tokens": prompt_tokens and _numbers(prompt_tokens, "--prompt-tokens", int),
        "mean_output": mean_output,
        "max_output": max_output,
        "sink": sink,
        "window": window,
        "budget": budget,
        "buffer": buffer,
        "pool_tokens": pool_tokens,
        "block_size": block_size,
        "dtype": dtype and str(resolve_dtype(dtype, device)).removeprefix("torch."),
        "shape": replace(work.shape, **{key: value for key, value in sizes.items() if value is not None}),
    }
    if prompt_tokens and len(changes["prompt_tokens"]) != 2:
        raise ValueError(f"--prompt-tokens {prompt_tokens!r}: give the shortest and the longest, as 32,64")
    work = replace(work, **{key: value for key, value in changes.items() if value is not None})
    chosen = HeadGates.load(gates) if gates else work.random_gates()
    serving_benchmark.check_gates(work, chosen)
    shares = _numbers(sparsities, "--sparsities", float)
    runs = serving_benchmark.plan_runs(tuple(settings.split(",")), shares, rounds, eviction)
    work.policy(eviction)  # for its errors
    folder = output_dir / "serving_runs"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    with progress("serving") as on_run:
        results = serving_benchmark.run_benchmark(work, chosen, runs, folder, on_run)
    rows = serving_benchmark.summarize(work, chosen, results)
    facts, title = serving_benchmark.facts_and_title(work, device.type, gates)
    write(output_dir, "serving", {**facts, "runs": results}, rows, title, markdown_page(work, rows))
    plot_serving(rows, title, str(output_dir / "serving.png"))


if __name__ == "__main__":
    run_app(app)
