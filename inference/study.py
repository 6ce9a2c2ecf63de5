r"""Study rankings of KV heads: sweep, paired comparison, threshold, sensitivity, error modes, lengths, budgets, gates.

    python inference/study.py --model tiny --tasks tiny --data problems.jsonl --gates RLKV=results/demo/gates.pt \
        --gates DuoAttention=outputs/duo_tiny/gates.pt --oracle rlkv/tiny/model/ground_truth.json \
        --sparsities 0.2,0.4,0.5,0.6,0.8 --sink 4 --window 16 --repetition 40,8 --max-new-tokens 208 \
        --batch-size 100 --output-dir results/study/report
    python inference/study.py --model deepseek-ai/DeepSeek-R1-Distill-Llama-8B --tasks math500,aime24 --data FOLDER \
        --gates RLKV=rlkv.tsv --gates DuoAttention=duo.tsv --buffer 128 --observation 8 --extra 80 \
        --output-dir results/llama8b_study

Several ``--gates NAME=FILE`` under one name are seeds of one method; the first name is compared with every other.
``--ablation NAME=FILE`` adds variants that are compared with it alone.  Decoding is greedy, so every allocation of
heads is measured once, however many seeds and analyses ask for it.  Files: report.html (one file), report.md, pictures,
results.json with every number, rows/ with every text.  The same command goes on where it was stopped; rows that were
measured with other settings are refused by name.  The sizes of the budget analysis default to those for the tiny model.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.eviction_study import policy_templates
from rlkv.evaluation.report.eval_page import published_name
from rlkv.evaluation.run.cli_args import numbers, read_truth, repetition_rule
from rlkv.evaluation.run.runner import RunSettings
from rlkv.evaluation.study.base import Study, StudyOptions
from rlkv.evaluation.study.bench import Bench, study_task
from rlkv.evaluation.study.rankings import RESERVED, gates_rankings, group_by_name, reference_rankings
from rlkv.evaluation.study.report import (
    ANALYSES,
    choose_analyses,
    measure_cells,
    run_study,
    write_measured,
    write_report,
)
from rlkv.evaluation.study.sensitivity import default_top_heads
from rlkv.evaluation.study.text import SEEDS_FIXED
from rlkv.evaluation.tasks import find_tasks
from rlkv.models.loading import load_model
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from rlkv.utils.provenance import provenance

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def levels(text: str, option: str) -> tuple[float, ...]:
    """Ascending sparsities above 0.

    Raises:
        ValueError: if there is none, or one outside 0 to 1.
    """
    found = tuple(sorted({value for value in numbers(text, option, 0.0, 1.0) if value > 0}))
    if not found:
        raise ValueError(f"{option} {text!r} names no sparsity above 0")
    return found


def top_heads(text: str, total: int) -> tuple[int, ...]:
    """How many heads the sensitivity compresses: whole numbers, or shares of all heads where they are below 1.

    Raises:
        ValueError: for a number that is neither, or beyond the model's heads.
    """
    if not text:
        return default_top_heads(total)
    found = set()
    for value in numbers(text, "--top-heads", 0.0, total):
        if value == 0:
            raise ValueError(f"--top-heads {text!r}: 0 heads are the full cache: give 1 or more, or a share above 0")
        if value >= 1 and value != int(value):
            raise ValueError(f"--top-heads {text!r}: {value:g} is neither a whole number nor a share below 1")
        found.add(int(value) if value >= 1 else max(1, round(value * total)))
    return tuple(sorted(found))


@app.command(help=help_text(__doc__))
def main(
    gates: Annotated[list[str], typer.Option(help="NAME=FILE; several files of one name are its seeds")],
    output_dir: Annotated[Path, typer.Option(help="report.html, report.md, results.json, pictures, rows/")],
    model: Annotated[str, typer.Option(help="tiny, a folder or a hub id")] = "tiny",
    tasks: Annotated[str, typer.Option(help="comma separated, such as math500,aime24 or tiny")] = "tiny",
    data: Annotated[Path | None, typer.Option(help="file or folder with the tasks' problems; default: the hub")] = None,
    ablation: Annotated[list[str] | None, typer.Option(help="NAME=FILE, a variant of the first method")] = None,
    analyses: Annotated[str, typer.Option(help=f"comma separated; default: all of {', '.join(ANALYSES)}")] = "",
    oracle: Annotated[Path | None, typer.Option(help="ground-truth JSON with a measured elimination order")] = None,
    random_draws: Annotated[int, typer.Option(help="random orders of the heads", min=0)] = 5,
    sparsities: Annotated[str, typer.Option(help="of the sweep, comma separated")] = "0.2,0.4,0.5,0.6,0.8",
    compare_at: Annotated[str, typer.Option(help="sparsities of the comparison in pairs")] = "0.4,0.6",
    ablate_at: Annotated[str, typer.Option(help="sparsities of the ablations")] = "0.4,0.5,0.6",
    margin: Annotated[float, typer.Option(help="accuracy that near-lossless may lose", min=0.0, max=1.0)] = 0.02,
    top_heads_gone: Annotated[
        str,
        typer.Option("--top-heads", help="heads that the sensitivity compresses; below 1: shares; default: by size"),
    ] = "",
    policies: Annotated[str, typer.Option(help="of the budget analysis, comma separated")] = "rkv,h2o,random",
    savings: Annotated[str, typer.Option(help="of the budget analysis, shares of the full bytes")] = "0.2,0.4,0.6",
    buffer: Annotated[int, typer.Option(help="entries between two compactions (h2o: always 1)", min=1)] = 16,
    observation: Annotated[int, typer.Option(help="observed tokens of rkv, snapkv and rpc", min=1)] = 4,
    extra: Annotated[int, typer.Option(help="entries beside a dynamic budget's share of the text")] = 20,
    published: Annotated[str, typer.Option(help="model whose published numbers are shown; default: --model")] = "",
    limit: Annotated[int | None, typer.Option(help="first problems of each task", min=1)] = None,
    seed: Annotated[int, typer.Option(help="of drawn problems")] = 0,
    sink: Annotated[int | None, typer.Option(help="S; default: the first gates file's")] = None,
    window: Annotated[int | None, typer.Option(help="W; likewise")] = None,
    prefill: Annotated[str, typer.Option(help="full or local")] = "full",
    repetition: Annotated[str, typer.Option(help="WINDOW,DISTINCT: fewer distinct tokens in a window")] = "400,40",
    max_new_tokens: Annotated[int | None, typer.Option(help="default: the task's published limit", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="problems decoded together", min=1)] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    measure_only: Annotated[
        bool,
        typer.Option("--measure-only", help="no report: to share the work of another process of this study"),
    ] = False,
) -> None:
    started = time.monotonic()
    files = group_by_name(gates, "--gates", RESERVED)
    variant_files = group_by_name(ablation or [], "--ablation", [*RESERVED, *files])
    names = [name.strip() for name in analyses.split(",")] if analyses else None
    chosen = choose_analyses(names, bool(variant_files))
    found_tasks = find_tasks([name.strip() for name in tasks.split(",")], data)
    sweep_at, pairs_at, variants_at = (
        levels(text, option)
        for text, option in ((sparsities, "--sparsities"), (compare_at, "--compare-at"), (ablate_at, "--ablate-at"))
    )
    saved = tuple(numbers(savings, "--savings", 0.0, 0.99))
    templates = policy_templates([name.strip() for name in policies.split(",")], buffer, observation, extra)
    rule = repetition_rule(repetition)
    shown = published_name(published or model)
    if published and shown is None:
        raise ValueError(f"--published {published!r}: nothing is known to be published for a model of this name")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    shape = ModelShape.from_config(loaded.config)
    truth = read_truth(oracle, shape) if oracle else None
    methods = gates_rankings(files, loaded.config)
    variants = gates_rankings(variant_files, loaded.config)
    rankings = [*methods, *reference_rankings(shape, oracle, random_draws)]
    cache = CacheSettings(
        methods[0].gates[0].deploy_sink if sink is None else sink,
        methods[0].gates[0].deploy_window if window is None else window,
        prefill,
    )
    prepared = []
    for task in found_tasks:
        sampling = SamplingParams(max_new_tokens or task.max_new_tokens)
        settings = RunSettings(cache, sampling, batch_size=batch_size, rule=rule)
        prepared.append(study_task(task.name, data, limit, seed, tokenizer, settings))
    bench = Bench(loaded, tokenizer, prepared, output_dir / "rows", {"model": model})
    options = StudyOptions(
        sweep_at,
        pairs_at,
        variants_at,
        margin,
        top_heads(top_heads_gone, shape.num_layers * shape.num_kv_heads),
        templates,
        saved,
        truth,
        shown,
    )
    study = Study(tuple(rankings), tuple(variants), options, bench, EntrySize.of(loaded))
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        stages: dict[str, Any] = {}

        def on_stage(what: str) -> None:
            stages["bar"] = bar.add_task(what, total=None)

        def on_progress(cell: str, done: int, total: int, accuracy: float) -> None:
            bar.update(stages["bar"], completed=done, total=total, description=f"{cell}: {accuracy:.3f}")

        if measure_only:
            measure_cells(study, chosen, on_progress, on_stage)
            write_measured(output_dir, study)
            return
        figures = run_study(study, chosen, on_progress, on_stage)
    config = {
        "model": model,
        "tasks": [task.name for task in found_tasks],
        "data": str(data) if data else "the hub, or drawn",
        "gates": gates,
        "ablation": ablation or [],
        "analyses": [analysis.name for analysis in chosen],
        "oracle": str(oracle) if oracle else "none",
        "random_draws": random_draws,
        "sparsities": sweep_at,
        "compare_at": pairs_at,
        "ablate_at": variants_at,
        "margin": margin,
        "top_heads": options.top_heads,
        "policies": [json.dumps(policy.describe()) for policy in templates.values()],
        "savings": saved,
        "seed of drawn problems": seed,
        "sink": cache.sink,
        "window": cache.window,
        "prefill": prefill,
        "repetition": repetition,
        "max_new_tokens": [task.settings.sampling.max_new_tokens for task in prepared],
        "batch_size": batch_size,
        "dtype": str(loaded.dtype),
        "device": str(loaded.device),
    }
    seconds = time.monotonic() - started
    title = f"Study of KV heads: {shape.model_id}"
    write_report(output_dir, title, study, chosen, figures, config, provenance(), seconds)
    print(f"{output_dir / 'report.html'}, report.md, results.json: {seconds:.0f} s")
    for analysis in chosen:
        for line in analysis.findings(figures[analysis.name]):
            print(f"- {line}")
    print(SEEDS_FIXED)


if __name__ == "__main__":
    run_app(app)
