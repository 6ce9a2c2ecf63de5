r"""Evaluate methods on benchmarks: every generation in a file, tables with intervals and paired differences.

    python inference/evaluate.py --model tiny --tasks tiny --limit 50 --methods full,rlkv@0.5,rkv@ratio=0.5 \
        --gates rlkv=results/demo/gates.pt --output-dir results/eval
    python inference/evaluate.py --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500,aime24 \
        --data FOLDER --gates rlkv=a.tsv --gates duo=b.tsv \
        --methods full,rlkv@0.4,duo@0.4,random-heads@0.4,rkv@ratio=0.6,rlkv@0.4+rkv@256 --output-dir results/llama8b

Greedy by default; ``--num-samples 64 --temperature 0.6 --top-p 0.95`` for pass@1 over samples.  The same command goes
on where it was stopped and refuses to mix settings.  ``accelerate launch inference/evaluate.py ...`` shares the batches
over processes.  Methods are named as in rlkv/evaluation/methods.py.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.atomic import atomic_path
from rlkv.cache import CacheSettings
from rlkv.cli_errors import help_text, run_app
from rlkv.evaluation.eval_report import markdown_report, summarize
from rlkv.evaluation.inputs import named_gates, repetition_rule
from rlkv.evaluation.methods import FULL, RANDOM_HEADS, parse_method
from rlkv.evaluation.runner import RunSettings, run_method, task_problems
from rlkv.evaluation.tasks import find_task
from rlkv.eviction import POLICIES
from rlkv.models import load_model
from rlkv.provenance import hardware_line, provenance
from rlkv.rollout.base import SamplingParams

WAIT = timedelta(days=2)

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
    output_dir: Annotated[Path, typer.Option(help="TASK/METHOD/*.jsonl, results.json, report.md")],
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
    sink: Annotated[int, typer.Option(help="S of methods without a policy")] = 16,
    window: Annotated[int, typer.Option(help="W of methods without a policy")] = 64,
    prefill: Annotated[str, typer.Option(help="full or local")] = "full",
    repetition: Annotated[str, typer.Option(help="WINDOW,DISTINCT: fewer distinct tokens in a window")] = "400,40",
    batch_size: Annotated[int, typer.Option(help="samples decoded together", min=1)] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N; several processes take one GPU each")] = "auto",
) -> None:
    from accelerate import PartialState

    rankings = named_gates(gates or [], (FULL, RANDOM_HEADS, *POLICIES))
    parsed = [parse_method(name.strip(), list(rankings)) for name in methods.split(",")]
    chosen = [find_task(name.strip()) for name in tasks.split(",")]
    rule = repetition_rule(repetition)
    CacheSettings(sink, window, prefill)
    # processes wait for each other at the end only, which may be long
    processes = PartialState(cpu=device == "cpu" or None, **({"timeout": WAIT} if "RANK" in os.environ else {}))
    if device == "auto" and processes.device.type == "cuda":
        device = f"cuda:{processes.local_process_index}"
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    allocations = {m.name: m.allocation(loaded.config, rankings, seed) for m in parsed}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    facts = {"model": model, "seed": seed}
    loaded_tasks = {task.name: task_problems(task.name, data, limit, seed, tokenizer) for task in chosen}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not processes.is_main_process
    ) as bar:
        for task in chosen:
            problems = loaded_tasks[task.name]
            for method in parsed:
                name = f"{task.name} {method.name}"
                shown = bar.add_task(name, total=None)

                def on_rows(done: int, total: int, accuracy: float, shown: Any = shown, name: str = name) -> None:
                    bar.update(shown, completed=done, total=total, description=f"{name}: {accuracy:.3f}")

                settings = RunSettings(
                    CacheSettings(sink, window, prefill, method.policy),
                    SamplingParams(max_new_tokens or task.max_new_tokens, temperature, top_p, top_k, seed),
                    num_samples,
                    batch_size,
                    rule,
                    processes.process_index,
                    processes.num_processes,
                )
                file = f"rows-{processes.process_index}-of-{processes.num_processes}.jsonl"
                folder = output_dir / task.name.replace(":", "_") / method.name
                run_method(
                    loaded, tokenizer, problems, allocations[method.name], settings, folder / file, facts, on_rows
                )
    processes.wait_for_everyone()
    if processes.is_main_process:
        for task in chosen:
            for method in parsed:
                folder = output_dir / task.name.replace(":", "_") / method.name
                rows[task.name, method.name] = read_rows(folder, processes.num_processes)
        write_report(output_dir, rows, facts, model)


def read_rows(folder: Path, processes: int) -> list[dict[str, Any]]:
    """The rows of all processes."""
    files = [folder / f"rows-{rank}-of-{processes}.jsonl" for rank in range(processes)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()[1:]]


def write_report(
    output_dir: Path, rows: dict[tuple[str, str], list[dict[str, Any]]], facts: dict[str, Any], model: str
) -> None:
    """results.json and report.md."""
    summaries = [summarize(task, method, found, rows.get((task, FULL))) for (task, method), found in rows.items()]
    content = {"config": facts, **provenance(), "results": summaries}
    with atomic_path(output_dir / "results.json") as path:
        path.write_text(json.dumps(content, indent=1) + "\n")
    notes = [f"`{content['command']}`; {hardware_line()}; torch {content['versions']['torch']}."]
    report = markdown_report(summaries, f"Evaluation of {model}", notes)
    with atomic_path(output_dir / "report.md") as path:
        path.write_text(report)
    print(report)


if __name__ == "__main__":
    run_app(app)
