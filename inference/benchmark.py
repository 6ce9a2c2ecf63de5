"""Speed and memory of the compressed cache.

    python inference/benchmark.py decode            # the whole table, about 15 minutes on 2 cores
    python inference/benchmark.py decode --quick    # small sizes, under a minute
    python inference/benchmark.py decode --threads 1 --contexts 4096 --batches 1

``decode``: a random Llama of about 100 M parameters (8 KV heads of 64, two query heads each) decodes with
HeadReallocationCache at several sparsities and with transformers' DynamicCache (sdpa), taking turns in one run.
Writes decode.json, decode.md and decode.png.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.atomic import atomic_path
from rlkv.cli_errors import run_app
from rlkv.inference.decode_benchmark import BenchmarkConfig, build_model, markdown_rows, plot_results, run_benchmark
from rlkv.models import resolve_device, resolve_dtype
from rlkv.provenance import hardware, hardware_line, provenance

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

QUICK = BenchmarkConfig(
    batches=(1, 2), contexts=(256, 1024), rounds=2, seconds=0.5, layers=4, hidden=256, vocabulary=512
)


@app.callback(help=__doc__)
def benchmark() -> None: ...


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r} is no list of numbers: write it as 1,8") from None
    if not values or min(values) < (1 if kind is int else 0):
        raise ValueError(f"{option} {text!r} holds a number out of range")
    return values


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
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("decode", total=None)
        results = run_benchmark(
            model, config, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
        bar.update(task, completed=bar.tasks[0].total)
    facts = {
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(target),
        "config": asdict(config),
        **provenance(),
    }
    machine = hardware_line() + (f", {hardware()['torch_threads']} threads" if target.type == "cpu" else "")
    title = f"Llama of {facts['parameters'] / 1e6:.0f} M parameters, {facts['dtype']}, {machine}"
    table = markdown_rows(results)
    with atomic_path(output_dir / "decode.json") as path:
        path.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")
    with atomic_path(output_dir / "decode.md") as path:
        path.write_text(f"{title}; torch {facts['versions']['torch']}\n\n{table}\n")
    plot_results(results, title, str(output_dir / "decode.png"))
    print(f"{title}\n\n{table}\n\nwritten to {output_dir}")


if __name__ == "__main__":
    run_app(app)
