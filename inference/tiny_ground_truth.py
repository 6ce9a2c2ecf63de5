r"""Measure which KV heads the built-in tiny model needs: the yardstick for every head-identification method.

    python inference/tiny_ground_truth.py            # writes rlkv/tiny/model/ground_truth.json

Three measurements with sink 4 and window 16 over chains of 3 to 12 definitions (decoding with prefill full):
  1. the greedy accuracy with the full cache, with random halves of the heads compressible (10 draws), and with
     each single head compressible;
  2. a greedy backward elimination: heads are made compressible one by one, each time the one whose loss leaves
     the most correct solutions reproduced under teacher forcing (ties: the highest mean log-probability);
  3. the greedy accuracy, by decoding, after every step of that elimination.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.heads.elimination import backward_elimination, single_head_scores
from rlkv.evaluation.heads.measure import CacheSettings, measure
from rlkv.evaluation.heads.traces import Trace, TraceScorer
from rlkv.gates.allocation import HeadAllocation
from rlkv.models.loading import load_model
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.tiny import GROUND_TRUTH, problems
from rlkv.tiny.task import MIN_DEFINITIONS, longest_solution
from rlkv.utils.atomic import atomic_path
from rlkv.utils.provenance import provenance

app = typer.Typer(add_completion=False, rich_markup_mode=None)
TRACE_SEED, ACCURACY_SEED = 3_000_003, 4_000_003


@app.command(help=help_text(__doc__))
def main(
    output: Annotated[Path, typer.Option(help="the JSON file to write")] = GROUND_TRUTH,
    model: Annotated[str, typer.Option(help="tiny, or a folder with another tiny model")] = "tiny",
    num_problems: Annotated[int, typer.Option(help="problems per decoded accuracy")] = 200,
    num_traces: Annotated[int, typer.Option(help="problems whose solutions are teacher-forced")] = 200,
    longest: Annotated[int, typer.Option(help="most definitions of a problem")] = 12,
    random_draws: Annotated[int, typer.Option(help="random halves", min=1)] = 10,
    sink: int = 4,
    window: int = 16,
    device: str = "auto",
) -> None:
    loaded, tokenizer = load_model(model, dtype="float32", device=device)
    shape = ModelShape.from_config(loaded.config)
    layers, heads = shape.num_layers, shape.num_kv_heads
    total = layers * heads
    settings = CacheSettings(sink=sink, window=window, max_new_tokens=longest_solution(longest), batch_size=100)
    everything = HeadAllocation(torch.ones(layers, heads, dtype=torch.bool))
    drawn = problems(num_problems, seed=ACCURACY_SEED, max_definitions=longest)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        stage = bar.add_task("", total=None)

        def begin(description: str, calls: int) -> None:
            bar.console.log(description)
            bar.reset(stage, total=calls, description=description)

        def accuracy(allocation: HeadAllocation) -> float:
            return measure(loaded, tokenizer, drawn, allocation, settings).accuracy

        def counted(allocation: HeadAllocation) -> float:
            result = accuracy(allocation)
            bar.advance(stage)
            return result

        begin("random halves", 1 + random_draws)
        full_accuracy = counted(everything)
        halves = [counted(HeadAllocation.random(layers, heads, 0.5, seed)) for seed in range(random_draws)]

        begin("single heads", total)
        alone = single_head_scores(accuracy, layers, heads, lambda: bar.advance(stage))

        trace_problems = problems(num_traces, seed=TRACE_SEED, max_definitions=longest)
        outcome = measure(loaded, tokenizer, trace_problems, everything, settings)
        prompts = [render_prompt(tokenizer, p["problem"]) for p in trace_problems]
        traces = [
            Trace(tuple(tokenizer(text, add_special_tokens=False).input_ids), tuple(completion.token_ids))
            for text, completion, ok in zip(prompts, outcome.completions, outcome.correct, strict=True)
            if ok
        ]
        scorer = TraceScorer(loaded, traces, sink, window)
        begin("elimination", total * (total + 1) // 2)
        steps = backward_elimination(scorer, layers, heads, lambda: bar.advance(stage))

        begin("accuracy after every step", total)
        order = [(step.layer, step.head) for step in steps]
        curve = [counted(HeadAllocation.from_order(order, layers, heads, k / total)) for k in range(1, total + 1)]

    elimination: list[dict[str, Any]] = []
    for step, decoded in zip(steps, curve, strict=True):
        reproduced, log_likelihood = step.score
        elimination.append(
            {
                "layer": step.layer,
                "head": step.head,
                "accuracy": decoded,
                "traces_reproduced": reproduced,
                "mean_log_probability": log_likelihood,
            }
        )
    removable = next((k for k, a in enumerate(curve) if a < 0.95), total)
    result = {
        "model": shape.to_dict(),
        "settings": asdict(settings),
        "num_problems": num_problems,
        "definitions": [MIN_DEFINITIONS, longest],
        "problem_seeds": {"accuracy": ACCURACY_SEED, "traces": TRACE_SEED},
        "num_traces": len(traces),
        "full_accuracy": full_accuracy,
        "random_half_accuracy": halves,
        "random_half_mean": sum(halves) / len(halves),
        "accuracy_lost_by_single_head": [[full_accuracy - a for a in row] for row in alone],
        "elimination": elimination,
        "heads_removable_before_0.95": removable,
        **provenance(),
    }
    with atomic_path(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    shown = {k: result[k] for k in ("full_accuracy", "random_half_mean", "heads_removable_before_0.95")}
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    run_app(app)
