r"""Evaluate methods on benchmarks: every generation in a file, tables with intervals and paired differences.

    python inference/evaluate.py --model tiny --tasks tiny --limit 50 --methods full,rlkv@0.5,rkv@ratio=0.5 \
        --gates rlkv=results/demo/gates.pt --output-dir results/eval
    python inference/evaluate.py --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500,aime24 \
        --data FOLDER --gates rlkv=a.tsv --gates duo=b.tsv \
        --methods full,rlkv@0.4,duo@0.4,random-heads@0.4,rkv@ratio=0.6,rlkv@0.4+rkv@256 --output-dir results/llama8b
    python inference/evaluate.py --config configs/eval_llama8b.yaml --output-dir results/llama8b
    accelerate launch --num_processes 4 inference/evaluate.py --config configs/eval_llama8b.yaml --output-dir FOLDER

Greedy by default; ``--num-samples 64 --temperature 0.6 --top-p 0.95`` for pass@1 over samples and pass@k.  The same
command goes on where it was stopped, also with another number of processes, and refuses to mix settings.  Methods are
named as in rlkv/evaluation/run/methods.py.  Without --data the problems come from the hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.cache import CacheSettings
from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.report.eval_page import evaluation_page
from rlkv.evaluation.report.eval_report import summarize
from rlkv.evaluation.report.markdown_page import write_markdown
from rlkv.evaluation.run.cli_args import deployed_sizes, named_gates, repetition_rule
from rlkv.evaluation.run.distributed import Processes, join_processes
from rlkv.evaluation.run.eval_files import RowFiles
from rlkv.evaluation.run.methods import FULL, RANDOM_HEADS, CompressionMethod, parse_method
from rlkv.evaluation.run.runner import RunSettings, render_problems, run_method
from rlkv.evaluation.tasks import find_tasks, load_task
from rlkv.eviction import POLICIES
from rlkv.models.loading import load_model
from rlkv.rollout.base import SamplingParams
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import provenance

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def read_config(path: Path | None) -> dict[str, Any]:
    """Defaults for the options, from a YAML file with their names (methods, tasks and gates may be lists)."""
    if path is None:
        return {}
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} is no list of options: write name: value on each line")
    return {str(key).replace("-", "_"): value for key, value in config.items()}


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a YAML file's values the defaults; what is given on the command line wins, unknown names are refused."""
    config = read_config(path)
    known = {parameter.name: parameter for parameter in context.command.params}
    unknown = [name for name in config if name not in known]
    if unknown:
        raise ValueError(f"--config {path} has unknown options: {', '.join(unknown)}")
    joined = {
        name: ",".join(map(str, value)) if isinstance(value, list) and name != "gates" else value
        for name, value in config.items()
    }
    if isinstance(joined.get("gates"), str):
        joined["gates"] = [joined["gates"]]
    context.default_map = {**(context.default_map or {}), **joined}
    return path


@app.command(help=help_text(__doc__))
def main(
    output_dir: Annotated[Path, typer.Option(help="TASK/METHOD/*.jsonl, results.json, report.html, report.md")],
    config: Annotated[
        Path | None, typer.Option(help="YAML with defaults for these options", callback=use_config, is_eager=True)
    ] = None,
    model: Annotated[str, typer.Option(help="tiny, a folder or a hub id")] = "tiny",
    tasks: Annotated[str, typer.Option(help="comma separated, such as math500,aime24 or tiny")] = "tiny",
    methods: Annotated[str, typer.Option(help="comma separated, such as full,rlkv@0.5,rkv@ratio=0.5")] = "full",
    gates: Annotated[list[str] | None, typer.Option(help="NAME=FILE, a ranking that methods name")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the tasks' files; default: the hub")] = None,
    limit: Annotated[int | None, typer.Option(help="first problems of each task", min=1)] = None,
    num_samples: Annotated[int, typer.Option(help="samples of each problem", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: no limit")] = 0,
    seed: Annotated[int, typer.Option(help="of samples, random heads and drawn problems")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(help="default: the task's published limit", min=1)] = None,
    sink: Annotated[int | None, typer.Option(help="S of methods without a policy; default: gates', else 16")] = None,
    window: Annotated[int | None, typer.Option(help="W of methods without a policy; default: gates', else 64")] = None,
    prefill: Annotated[str, typer.Option(help="full or local")] = "full",
    repetition: Annotated[str, typer.Option(help="WINDOW,DISTINCT: fewer distinct tokens in a window")] = "400,40",
    stop_repetitive: Annotated[
        bool, typer.Option("--stop-repetitive", help="end a text when it is repetitive (recorded in its row)")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="samples decoded together", min=1)] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N; several processes take one GPU each")] = "auto",
) -> None:
    rankings = named_gates(gates or [], (FULL, RANDOM_HEADS, *POLICIES))
    parsed = parse_methods(methods, list(rankings))
    chosen = find_tasks(tasks, data)
    rule = repetition_rule(repetition)
    sizes = deployed_sizes(rankings, sink, window)
    CacheSettings(*sizes, prefill)
    # before the model, which takes long
    found = {task.name: load_task(task.name, data, limit, seed) for task in chosen}
    processes = join_processes(device)
    loaded, tokenizer = load_model(model, dtype=dtype, device=processes.device or device)
    allocations = {m.name: m.allocation(loaded.config, rankings, seed) for m in parsed}
    problems = {task.name: render_problems(task, found[task.name], tokenizer) for task in chosen}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not processes.is_main) as bar:
        for task, method in product(chosen, parsed):
            settings = RunSettings(
                CacheSettings(*sizes, prefill, method.policy),
                SamplingParams(max_new_tokens or task.max_new_tokens, temperature, top_p, top_k, seed),
                num_samples,
                batch_size,
                rule,
                processes.rank,
                processes.count,
                stop_repetitive,
            )
            files = RowFiles(output_dir, task.name, method.name)
            run_method(
                loaded,
                tokenizer,
                problems[task.name],
                allocations[method.name],
                settings,
                files.own(processes.rank, processes.count),
                {},
                show_rows(bar, f"{task.name} {method.name}", processes),
                files.of_others(processes.count),
            )
    processes.wait_for_all()
    if processes.is_main:
        rows = {
            (task.name, method.name): RowFiles(output_dir, task.name, method.name).rows(
                [problem.key for problem in problems[task.name]], num_samples
            )
            for task, method in product(chosen, parsed)
        }
        config = {
            **{"model": model, "tasks": [task.name for task in chosen], "methods": [m.name for m in parsed]},
            **{"sink": sizes[0], "window": sizes[1], "prefill": prefill, "seed": seed, "num_samples": num_samples},
            **{"temperature": temperature, "top_p": top_p, "top_k": top_k, "limit": limit},
            **{"max_new_tokens": {task.name: max_new_tokens or task.max_new_tokens for task in chosen}},
            **{"batch_size": batch_size, "repetition": asdict(rule), "stop_repetitive": stop_repetitive},
            **{"dtype": str(loaded.dtype), "processes": processes.count},
        }
        write_report(output_dir, rows, parsed, config)


def parse_methods(names: str, rankings: list[str]) -> list[CompressionMethod]:
    """The methods, each of which may be named once."""
    parsed = [parse_method(name.strip(), rankings) for name in names.split(",")]
    for i, method in enumerate(parsed):
        if any(replace(method, name=other.name) == other for other in parsed[:i]):
            raise ValueError(f"--methods names {method.name!r} twice: leave one out")
    return parsed


def show_rows(bar: Progress, name: str, processes: Processes) -> Callable[[int, int, float], None]:
    """A line of the progress bar: units done and accuracy so far, of this process."""
    share = "" if processes.count == 1 else f" (process 0 of {processes.count})"
    line = bar.add_task(name + share, total=None)

    def on_rows(done: int, total: int, accuracy: float) -> None:
        shown = f"{name}{share}: {accuracy:.3f}" if done else f"{name}{share}"
        bar.update(line, completed=done, total=total, description=shown)

    return on_rows


def write_report(
    output_dir: Path,
    rows: dict[tuple[str, str], list[dict[str, Any]]],
    methods: list[CompressionMethod],
    config: dict[str, Any],
) -> None:
    """results.json, report.html and report.md."""
    summaries = [summarize(task, method, found, rows.get((task, FULL))) for (task, method), found in rows.items()]
    origin = provenance()
    with atomic_path(output_dir / "results.json") as path:
        path.write_text(json.dumps({"config": config, **origin, "results": summaries}, indent=1) + "\n")
    page = evaluation_page(config["model"], methods, summaries, origin, config)
    page.write(output_dir / "report.html")
    write_markdown(page, output_dir / "report.md")
    print((output_dir / "report.md").read_text())


if __name__ == "__main__":
    run_app(app)
