r"""Measure the order of the heads that the gates keep: for sparsities above those at which the gates are certain.

    python inference/rerank_heads.py --gates outputs/tiny/gates.pt --output outputs/tiny/reranked.pt \
        --curriculum results/curriculum/curriculum.parquet

Heads that are full at sparsity ``--low`` are made compressible one by one up to ``--high``, each time the one without
which the model still reproduces most recorded solutions under teacher forcing (ties: the highest mean
log-probability).  The gates' numbers are handed out in the new order, so that the result is used as any gates file;
below ``--low`` nothing changes.  It reads the curriculum that the gates were trained on, with the recorded outputs.

The cost is a pass over the traces per score: 50 scores for 24 heads from 0.5 to 0.7, printed before it starts.  The
number grows with the square of the heads: narrow the span for large models.  What it took is kept in the gates file, in
``training["reranked"]``: ``seconds`` on the clock, and ``cpu_seconds`` of all threads.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlkv.cli.errors import help_text, run_app
from rlkv.evaluation.heads.reranking import Span, rerank
from rlkv.evaluation.heads.traces import Trace, TraceScorer
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.formats import SUFFIXES
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import load_model
from rlkv.training.distill_data import read_traces

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=help_text(__doc__))
def main(
    gates: Annotated[str, typer.Option(help="gates file whose order is refined")],
    curriculum: Annotated[Path, typer.Option(help="the filter's .parquet or .jsonl, with recorded outputs")],
    output: Annotated[Path, typer.Option(help="gates file to write, by suffix as HeadGates.save")],
    low: Annotated[float, typer.Option(help="sparsity up to which the gates are trusted")] = 0.5,
    high: Annotated[float, typer.Option(help="sparsity up to which heads are measured")] = 0.7,
    num_traces: Annotated[int, typer.Option(help="solutions that are teacher-forced", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="of the drawn traces")] = 0,
    model: Annotated[str, typer.Option(help="tiny, a folder or a hub id; default: the one of the gates")] = "",
    template: Annotated[str, typer.Option(help="prompt template, a name in rlkv.models.prompts")] = "rlkv",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
) -> None:
    if output.suffix not in SUFFIXES:  # not after hours
        raise ValueError(f"--output {output} must end with {', '.join(SUFFIXES)}")
    found = HeadGates.load(gates)
    span = Span(found, low, high)
    if not model and found.model is None:
        raise ValueError(f"{gates} names no model: pass --model")
    loaded, tokenizer = load_model(model or found.model.model_id, dtype=dtype, device=device)
    found.check_model(loaded.config)
    recorded = read_traces(str(curriculum), tokenizer, template, max_length=sys.maxsize)
    if num_traces > len(recorded):
        raise ValueError(f"--num-traces {num_traces}: {curriculum} has only {len(recorded)} solutions")
    drawn = random.Random(f"rlkv-rerank-{seed}").sample(recorded, num_traces)
    traces = [Trace(text.ids[: text.answers[0]], text.ids[text.answers[0] :]) for text in drawn]
    scorer = TraceScorer(loaded, traces, found.deploy_sink, found.deploy_window)
    everything, _ = scorer(HeadAllocation(torch.ones(found.num_layers, found.num_kv_heads, dtype=torch.bool)))
    print(f"{span.num_steps} of {span.num_candidates} candidates, {span.cost} scores of {num_traces} traces")
    print(f"reproduced with the full cache: {everything:.3f}")
    started, cpu_started = time.monotonic(), time.process_time()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=span.cost)
        result, steps = rerank(span, scorer, lambda: bar.advance(task))
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    for step in steps:
        share, log_probability = step.score
        print(
            f"layer {step.layer} head {step.head}: {share:.3f} reproduced, mean log-probability {log_probability:.4g}"
        )
    facts: dict[str, float] = {"low": low, "high": high, "traces": num_traces, "seed": seed, "scores": span.cost}
    facts |= {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
    replace(result, training={**result.training, "reranked": facts}).save(output)
    print(f"{seconds:.0f} s; written to {output}")


if __name__ == "__main__":
    run_app(app)
