r"""Measure the order of the heads that the gates keep: for sparsities above those at which the gates are certain.

    python inference/rerank_heads.py --gates outputs/tiny/gates.pt --output outputs/tiny/reranked.pt \
        --curriculum results/curriculum/curriculum.parquet

Heads that are full at sparsity ``--low`` are made compressible one by one up to ``--high``, each time the one without
which the model still reproduces most recorded solutions under teacher forcing (ties: the highest mean
log-probability).  The gates' numbers are handed out in the new order, so the result is used as any gates file; below
``--low`` nothing changes.  It reads the curriculum that the gates were trained on, with the recorded outputs.

The cost is a pass over the traces per score: 50 scores for 24 heads from 0.5 to 0.7, printed before it starts.  The
number grows with the square of the heads: narrow the span for large models.  What it took is kept in the gates file, in
``training["reranked"]``: ``seconds`` on the clock, and ``cpu_seconds`` of all threads.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlkv.cli.errors import run_app
from rlkv.cli.options import parse
from rlkv.data.deepscaler import curriculum_template
from rlkv.evaluation.elimination import Span, Trace, TraceScorer, rerank
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.formats import SUFFIXES
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.prompts import choose_template
from rlkv.training.distill_data import read_traces
from rlkv.utils.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class RerankConfig(ModelOptions):
    """Measure the order of the heads that the gates keep."""

    gates: str
    """gates file whose order is refined"""
    curriculum: Path
    """the filter's .parquet or .jsonl, with recorded outputs"""
    output: Path
    """gates file to write; its suffix is the format"""
    low: float = 0.5
    """sparsity up to which the gates are trusted"""
    high: float = 0.7
    """sparsity up to which heads are measured"""
    num_traces: int = 100
    """solutions that are teacher-forced"""
    seed: int = 0
    """of the drawn traces"""
    model: str = ""
    """tiny, a folder or a hub id; default: the one of the gates"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: the curriculum's, else the gates', else rlkv"""

    def check(self) -> None:
        if self.output.suffix not in SUFFIXES:  # not after hours
            raise ValueError(f"--output {self.output} must end with {', '.join(SUFFIXES)}")
        check_positive(self, "num_traces")


def main() -> None:
    config = parse(RerankConfig, __doc__)
    found = HeadGates.load(config.gates)
    span = Span(found, config.low, config.high)
    if not config.model and found.model is None:
        raise ValueError(f"{config.gates} names no model: pass --model")
    model, tokenizer = replace(config, model=config.model or found.model.model_id).load()  # type: ignore[union-attr]
    found.check_model(model.config)
    named = (config.template, curriculum_template(config.curriculum), found.training.get("template"))
    template = choose_template(*named, model=config.model or found.model.model_id)  # type: ignore[union-attr]
    recorded = read_traces(str(config.curriculum), tokenizer, template, max_length=sys.maxsize)
    if config.num_traces > len(recorded):
        raise ValueError(f"--num-traces {config.num_traces}: {config.curriculum} has only {len(recorded)} solutions")
    drawn = random.Random(f"rlkv-rerank-{config.seed}").sample(recorded, config.num_traces)
    traces = [Trace(text.ids[: text.answers[0]], text.ids[text.answers[0] :]) for text in drawn]
    scorer = TraceScorer(model, traces, found.deploy_sink, found.deploy_window)
    everything, _ = scorer(HeadAllocation(torch.ones(found.num_layers, found.num_kv_heads, dtype=torch.bool)))
    print(f"{span.steps} of {span.candidates} candidates, {span.cost} scores of {config.num_traces} traces")
    print(f"reproduced with the full cache: {everything:.3f}")
    started, cpu_started = time.monotonic(), time.process_time()
    with progress_bar("re-ranking", "scores", span.cost) as bar:
        result, steps = rerank(span, scorer, bar.advance)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    for step in steps:
        share, log_probability = step.score
        shown = f"{share:.3f} reproduced, mean log-probability {log_probability:.4g}"
        print(f"layer {step.layer} head {step.head}: {shown}")
    facts = {
        **{"low": config.low, "high": config.high, "traces": config.num_traces, "seed": config.seed},
        **{"scores": span.cost, "seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)},
    }
    replace(result, training={**result.training, "reranked": facts}).save(config.output)
    print(f"{seconds:.0f} s; written to {config.output}")


if __name__ == "__main__":
    run_app(main)
