r"""Compare head rankings: greedy accuracy at several sparsities, as a table, results.json and a picture.

    python inference/sweep_heads.py --gates results/demo/gates.pt --output-dir results/sweep
    python inference/sweep_heads.py --gates RLKV=a.pt --gates DuoAttention=b.tsv --model meta-llama/... \\
        --input problems.jsonl --output-dir results/sweep

``--gates`` may be given several times, as FILE or NAME=FILE; files under one NAME are runs of one method, shown as
their mean and range.  Where a training log lies beside a gates file, the table tells what its steps took.  Every row
is written as it is measured; the same command goes on where it was stopped.  Without ``--input``, fresh problems of
the tiny task are drawn.  ``problems.jsonl``, written last, is what other programs need to use the same ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlkv.cli.errors import help_text, run_app
from rlkv.data.deepscaler import Problem, write_problems
from rlkv.evaluation.heads.agreement import agreement
from rlkv.evaluation.heads.measure import CacheSettings, HeadResult
from rlkv.evaluation.heads.sweep import plan_sweep, run_sweep
from rlkv.evaluation.report.sweep_report import markdown_table, plot_accuracy, training_seconds, write_results
from rlkv.evaluation.run.cli_args import ORACLE, numbers, read_order, read_truth, study_problems
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import load_model
from rlkv.models.shape import ModelShape

RESERVED = ("full cache", "random heads", ORACLE)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def group_by_name(items: list[str]) -> dict[str, list[str]]:
    """Files by the name that they were given; a file without a name goes by its own, which must be the only one."""
    files: dict[str, list[str]] = {}
    for item in items:
        name, named, file = item.partition("=")
        name, file = (name, file) if named else (Path(item).stem, item)
        if name in RESERVED or (name in files and not named):
            raise ValueError(f"--gates: the name {name!r} is taken twice or by the table itself: give NAME=FILE")
        files.setdefault(name, []).append(file)
    return files


@app.command(help=help_text(__doc__))
def main(
    gates: Annotated[list[str], typer.Option(help="FILE or NAME=FILE; repeat it for several methods or runs")],
    output_dir: Annotated[Path, typer.Option(help="rows.jsonl, results.json, table.md, accuracy.png, problems.jsonl")],
    model: Annotated[str, typer.Option(help="tiny, a folder or a hub id; default: the one of the first gates")] = "",
    input: Annotated[Path | None, typer.Option(help=".jsonl or .parquet with problem and answer")] = None,
    num_problems: Annotated[int, typer.Option(help="how many problems", min=1)] = 200,
    definitions: Annotated[str, typer.Option(help="chain lengths of the drawn tiny problems")] = "3-25",
    seed: Annotated[int, typer.Option(help="of the drawn tiny problems")] = 2_000_003,
    sparsities: Annotated[str, typer.Option(help="comma separated")] = "0.2,0.4,0.5,0.6,0.8",
    random_draws: Annotated[int, typer.Option(help="random allocations per sparsity", min=0)] = 5,
    oracle: Annotated[Path | None, typer.Option(help="ground-truth JSON with a measured elimination order")] = None,
    sink: Annotated[int | None, typer.Option(help="default: the first gates file's")] = None,
    window: Annotated[int | None, typer.Option(help="default: the first gates file's")] = None,
    prefill: Annotated[str, typer.Option(help="full or local")] = "full",
    max_new_tokens: Annotated[int, typer.Option(help="limit per problem", min=1)] = 440,
    batch_size: Annotated[int, typer.Option(help="problems decoded together", min=1)] = 50,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    fresh: Annotated[bool, typer.Option(help="drop the rows of an earlier run")] = False,
) -> None:
    levels = sorted(set(numbers(sparsities, "--sparsities", 0.0, 1.0)))
    files = group_by_name(gates)
    rankings = {name: [HeadGates.load(file) for file in found] for name, found in files.items()}
    first = next(iter(rankings.values()))[0]
    if not model and first.model is None:
        raise ValueError(f"{first.source} names no model: pass --model")
    loaded, tokenizer = load_model(model or first.model.model_id, dtype=dtype, device=device)
    for ranking in (ranking for runs in rankings.values() for ranking in runs):
        ranking.check_model(loaded.config)
    problems = study_problems(input, num_problems, seed, definitions)
    settings = CacheSettings(
        sink=first.deploy_sink if sink is None else sink,
        window=first.deploy_window if window is None else window,
        prefill=prefill,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    shape = ModelShape.from_config(loaded.config)
    truth = read_truth(oracle, shape) if oracle else None
    orders = {ORACLE: read_order(oracle, shape)} if oracle else {}
    cells = list(plan_sweep(shape, levels, rankings, orders, random_draws))
    if fresh:
        for name in ("rows.jsonl", "results.json", "table.md", "accuracy.png", "problems.jsonl"):
            (output_dir / name).unlink(missing_ok=True)
    source = str(input) if input else f"tiny task, {definitions} definitions, seed {seed}"
    config = {"model": shape.model_id, "problems_from": source}
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=len(cells))

        def on_row(done: int, row: HeadResult) -> None:
            bar.update(task, completed=done, description=f"{row.method} @ {row.sparsity:g}: {row.accuracy:.3f}")

        rows = run_sweep(loaded, tokenizer, problems, cells, settings, output_dir / "rows.jsonl", config, on_row)
    labelled = {
        name if len(runs) == 1 else f"{name}, run {i}": ranking
        for name, runs in rankings.items()
        for i, ranking in enumerate(runs)
    }
    agreements = {label: agreement(ranking, truth) for label, ranking in labelled.items()} if truth else {}
    found = {name: [training_seconds(file) for file in runs] for name, runs in files.items()}
    seconds = {name: [s for s in runs if s is not None] for name, runs in found.items() if None not in runs}
    write_results(output_dir / "results.json", rows, {**config, **vars(settings)}, agreements, seconds)
    title = f"{shape.model_id}: {source}, sink {settings.sink}, window {settings.window}, prefill {prefill}"
    table = markdown_table(rows, title, seconds)
    (output_dir / "table.md").write_text(table)
    plot_accuracy(rows, output_dir / "accuracy.png", title)
    write_problems(output_dir / "problems.jsonl", [Problem(**problem) for problem in problems])
    print(table)


if __name__ == "__main__":
    run_app(app)
