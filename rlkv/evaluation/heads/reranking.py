"""Heads in the order in which they can go, measured among those that the gates keep: a closing step after training.

A gate says how much of a head is needed while the others are open too, not what is lost when the head goes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlkv.data.deepscaler import curriculum_template
from rlkv.evaluation.heads.elimination import Elimination, Score, Trace, TraceScorer, backward_elimination, num_scores
from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
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


@dataclass(frozen=True)
class Span:
    """The part of the order that is measured: heads that go between the sparsities ``low`` and ``high``.

    ``candidates`` heads are full at ``low``; ``steps`` of them go.
    """

    gates: HeadGates
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"between the sparsities {self.low:g} and {self.high:g} no head of {self.gates.alpha.numel()} becomes "
                "compressible: lower the first or raise the second"
            )

    @property
    def candidates(self) -> int:
        return num_full_heads(self.low, self.gates.alpha.numel())

    @property
    def steps(self) -> int:
        return self.candidates - num_full_heads(self.high, self.gates.alpha.numel())

    @property
    def cost(self) -> int:
        """Scores that :func:`rerank` takes."""
        return num_scores(self.candidates, self.steps)


def with_order(gates: HeadGates, order: Sequence[tuple[int, int]]) -> HeadGates:
    """``gates`` with the same numbers handed out so that ``compression_order`` is ``order`` (all heads, each once).

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha, rank = torch.empty_like(gates.alpha), torch.empty_like(gates.mean_alpha)
    last = max(1, len(order) - 1)
    for place, (head, value) in enumerate(zip(order, gates.alpha.flatten().sort().values, strict=True)):
        alpha[head], rank[head] = value, place / last
    return replace(gates, alpha=alpha, mean_alpha=rank)


def rerank(span: Span, score: Score, on_call: Callable[[], None]) -> tuple[HeadGates, list[Elimination]]:
    """Gates whose order is measured within ``span`` and theirs elsewhere, and the steps of the measurement."""
    order = compression_order(span.gates)
    start = HeadAllocation.from_gates(span.gates, span.low)
    steps = backward_elimination(score, start, on_call, num_full=span.candidates - span.steps)
    measured = [(step.layer, step.head) for step in steps]
    before = order[: len(order) - span.candidates]
    after = [head for head in order[len(before) :] if head not in measured]
    return with_order(span.gates, [*before, *measured, *after]), steps


def rerank_file(config: RerankConfig) -> None:
    """Re-rank a gates file into another one, and print what was measured."""
    found = HeadGates.load(config.gates)
    span = Span(found, config.low, config.high)
    if not config.model and found.model is None:
        raise ValueError(f"{config.gates} names no model: pass --model")
    model, tokenizer = replace(config, model=config.model or found.model.model_id).load()  # type: ignore[union-attr]
    found.check_model(model.config)
    template = choose_template(config.template, curriculum_template(config.curriculum), found.training.get("template"))
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
