r"""Which heads stay full x what the others keep, at the same bytes of KV: accuracy, error modes, lengths.

    python inference/compare_eviction.py --gates RLKV=results/demo/gates.pt --output-dir results/eviction
    python inference/compare_eviction.py --gates RLKV=a.pt --gates DuoAttention=b.tsv --model meta-llama/... \\
        --input problems.jsonl --buffer 128 --observation 8 --extra 80 --output-dir results/eviction

Every policy runs alone (in all heads) and under the heads of the first ``--gates``; every ranking of heads also with
sinks and a window.  Budgets are chosen such that, over the texts of the full-cache run, all methods hold at most
``1 - saved`` of the full cache's bytes; what a method's own texts held is in brackets.  Sizes default to those for the
tiny model.  Every row is written as it is measured; the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.eviction_report import markdown_report, plot_study
from rlkv.evaluation.eviction_study import StudyPlan, policy_templates, run_study
from rlkv.evaluation.heads.measure import CacheSettings
from rlkv.evaluation.run.cli_args import ORACLE, numbers, read_order, repetition_rule, study_problems
from rlkv.evaluation.run.methods import named_gates
from rlkv.eviction import POLICIES
from rlkv.gates.allocation import compression_order
from rlkv.models.loading import load_model
from rlkv.models.shape import ModelShape
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import hardware_line, provenance

RANDOM_HEADS = "random"
OUTPUTS = ("rows.jsonl", "results.json", "report.md", "accuracy.png")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def random_order(shape: ModelShape, seed: int) -> list[tuple[int, int]]:
    """All heads, shuffled."""
    import random

    heads = [(layer, head) for layer in range(shape.num_layers) for head in range(shape.num_kv_heads)]
    random.Random(seed).shuffle(heads)
    return heads


@app.command(help=help_text(__doc__))
def main(
    gates: Annotated[list[str], typer.Option(help="FILE or NAME=FILE; repeat it for several rankings")],
    output_dir: Annotated[Path, typer.Option(help=", ".join(OUTPUTS))],
    model: Annotated[str, typer.Option(help="tiny, a folder or a hub id; default: the one of the first gates")] = "",
    input: Annotated[Path | None, typer.Option(help="JSONL or Parquet with problem and answer")] = None,
    num_problems: Annotated[int, typer.Option(help="how many problems", min=1)] = 100,
    definitions: Annotated[str, typer.Option(help="chain lengths of the drawn tiny problems")] = "8-16",
    seed: Annotated[int, typer.Option(help="of the drawn tiny problems and the random heads")] = 2_000_003,
    saved: Annotated[
        str, typer.Option(help="shares of the full cache's bytes, comma separated")
    ] = "0.2,0.4,0.5,0.6,0.8",
    policies: Annotated[str, typer.Option(help="comma separated; default: all")] = ",".join(POLICIES),
    prompt_variants: Annotated[bool, typer.Option(help="each policy also with the prompt kept / evictable")] = True,
    oracle: Annotated[Path | None, typer.Option(help="ground-truth JSON with a measured elimination order")] = None,
    random_heads: Annotated[bool, typer.Option(help="a random ranking of heads, too")] = True,
    head_share: Annotated[
        float, typer.Option(help="share of the mean budget that compressible heads get under the first gates")
    ] = 0.5,
    sink: Annotated[int | None, typer.Option(help="of the rankings without a policy; default: the gates'")] = None,
    window: Annotated[int | None, typer.Option(help="likewise")] = None,
    buffer: Annotated[int, typer.Option(help="entries between two compactions (h2o, tova: always 1)")] = 16,
    observation: Annotated[int, typer.Option(help="observed tokens of rkv, snapkv and rpc")] = 4,
    extra: Annotated[int, typer.Option(help="entries beside the ratio, S + W in RLKV's appendix F")] = 20,
    repetition: Annotated[str, typer.Option(help="WINDOW,DISTINCT: fewer distinct tokens in a window")] = "100,12",
    max_new_tokens: Annotated[int, typer.Option(help="limit per problem")] = 440,
    batch_size: Annotated[int, typer.Option(help="problems decoded together")] = 50,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    fresh: Annotated[bool, typer.Option(help="drop the rows of an earlier run")] = False,
) -> None:
    rankings = named_gates(gates, (ORACLE, RANDOM_HEADS))
    first = next(iter(rankings.values()))
    savings = numbers(saved, "--saved", 0.0, 0.99)
    rule = repetition_rule(repetition)
    chosen = policy_templates(policies.split(","), buffer, observation, extra, prompt_variants)
    problems = study_problems(input, num_problems, seed, definitions)
    if not model and first.model is None:
        raise ValueError(f"{gates[0]} names no model: pass --model")
    loaded, tokenizer = load_model(model or first.model.model_id, dtype=dtype, device=device)
    for ranking in rankings.values():
        ranking.check_model(loaded.config)
    shape = ModelShape.from_config(loaded.config)
    orders = {name: compression_order(ranking) for name, ranking in rankings.items()}
    if oracle:
        orders[ORACLE] = read_order(oracle, shape)
    if random_heads:
        orders[RANDOM_HEADS] = random_order(shape, seed)
    settings = CacheSettings(
        sink=first.deploy_sink if sink is None else sink,
        window=first.deploy_window if window is None else window,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    plan = StudyPlan(orders, chosen, savings, head_share)
    if fresh:
        for name in OUTPUTS:
            (output_dir / name).unlink(missing_ok=True)
    source = str(input) if input else f"tiny task, {definitions} definitions, seed {seed}"
    facts = {"model": shape.model_id, "problems_from": source, "num_problems": len(problems)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("full cache", total=None)

        def on_row(done: int, total: int, row: dict) -> None:
            result = "cannot be done" if row["accuracy"] is None else f"{row['accuracy']:.3f}"
            bar.update(task, completed=done, total=total, description=f"{row['method']} @ {row['saved']:g}: {result}")

        rows = run_study(loaded, tokenizer, problems, plan, settings, rule, output_dir / "rows.jsonl", facts, on_row)
    config = {**facts, **vars(settings), "savings": savings, "head_share": head_share, "repetition": vars(rule)}
    with atomic_path(output_dir / "results.json") as path:
        path.write_text(json.dumps({"config": config, **provenance(), "rows": rows}, indent=1) + "\n")
    title = f"Heads and eviction at matched bytes: {shape.model_id}, {source}"
    notes = [
        f"Budgets are a ratio of the text read so far + {extra} entries. Policies compact every {buffer} tokens (h2o, "
        f"tova: every token) and observe {observation} (rkv, snapkv, rpc). Rankings without a policy keep "
        f"{settings.sink} sinks and a window of {settings.window}. Under '{next(iter(orders))} heads + policy' a "
        f"compressible head keeps about {head_share:g} of the mean budget. A dash: what must stay (prompt, {extra} "
        f"entries) is more than that many bytes. Error modes count problems that the full cache solves; repetitive: "
        f"fewer than {rule.distinct} distinct tokens in {rule.window}. Greedy, {hardware_line()}.",
    ]
    report = markdown_report(rows, title, notes)
    with atomic_path(output_dir / "report.md") as path:
        path.write_text(report)
    plot_study(rows, output_dir / "accuracy.png", title)
    print(report)


if __name__ == "__main__":
    run_app(app)
