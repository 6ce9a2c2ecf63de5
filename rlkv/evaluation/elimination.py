"""In which order heads can go: scores of allocations on recorded solutions, backward elimination, and re-ranked gates.

A gate says how much of a head is needed while the others are open too, not what is lost when the head goes: re-ranking
measures the order among the heads that the gates keep, as a closing step after training.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.formats import SUFFIXES
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.compress import compress
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.training.distill_data import read_traces
from rlkv.utils.progress import progress_bar

# of an allocation; larger is better, and in a tuple a finer measure breaks the ties of a coarser one
Score = Callable[[HeadAllocation], Any]


@dataclass(frozen=True)
class Trace:
    """Token ids of a rendered prompt and of a correct completion, the EOS included."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class TraceScorer:
    """Scores allocations on fixed traces: ``(share of traces reproduced, mean log-probability per token)``.

    Prompt and solution are read in one call with ``prefill="local"``: every token sees the cache entries that it would
    see in decoding.  A trace whose every token is the argmax is what greedy decoding writes.
    """

    def __init__(self, model: PreTrainedModel, traces: list[Trace], sink: int, window: int) -> None:
        if not traces:
            raise ValueError("scoring allocations needs at least one correct trace")
        self.model, self.sink, self.window, self.num_traces = model, sink, window, len(traces)
        groups: dict[tuple[int, int], list[Trace]] = defaultdict(list)
        for trace in traces:
            groups[len(trace.prompt), len(trace.output)].append(trace)
        # ids int64 [rows, prompt + output], and the length of the output
        self.batches = [
            (torch.tensor([t.prompt + t.output for t in group], device=model.device), output_length)
            for (_, output_length), group in groups.items()
        ]

    @torch.inference_mode()
    def __call__(self, allocation: HeadAllocation) -> tuple[float, float]:
        reproduced = tokens = 0
        log_likelihood = 0.0
        with compress(self.model, allocation, sink=self.sink, window=self.window, prefill="local"):
            for ids, output_length in self.batches:
                logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=output_length + 1).logits[:, :-1]
                output = ids[:, -output_length:]
                reproduced += int((logits.argmax(-1) == output).all(dim=1).sum())
                picked = logits.float().log_softmax(-1).gather(-1, output[..., None])
                log_likelihood += picked.sum().item()
                tokens += output.numel()
        return reproduced / self.num_traces, log_likelihood / tokens


@dataclass(frozen=True)
class Elimination:
    """One step: this head was made compressible, and the allocation then scored ``score``."""

    layer: int
    head: int
    score: Any


def without_head(full: Tensor, layer: int, head: int) -> HeadAllocation:
    """``full`` (bool ``[L, H]``) with one more compressible head."""
    reduced = full.clone()
    reduced[layer, head] = False
    return HeadAllocation(reduced)


def num_scores(candidates: int, steps: int) -> int:
    """What :func:`backward_elimination` costs: ``candidates + (candidates - 1) + ...``, one term per step."""
    return sum(candidates - done for done in range(steps))


def backward_elimination(
    score: Score, start: HeadAllocation, on_call: Callable[[], None], num_full: int = 0
) -> list[Elimination]:
    """Make heads compressible one by one, each time the one whose loss leaves the best score.

    Begins with ``start`` and stops when ``num_full`` heads are full.  Ties go to the lower (layer, head).
    """
    full = start.full.clone()
    steps: list[Elimination] = []
    while int(full.sum()) > num_full:
        found = []
        for layer, head in full.nonzero().tolist():
            found.append(Elimination(layer, head, score(without_head(full, layer, head))))
            on_call()
        best = max(found, key=lambda step: step.score)  # the first of equal ones
        full[best.layer, best.head] = False
        steps.append(best)
    return steps


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
    template: str = "rlkv"
    """prompt template, a name in rlkv.models.prompts"""

    def check(self) -> None:
        if self.output.suffix not in SUFFIXES:  # not after hours
            raise ValueError(f"--output {self.output} must end with {', '.join(SUFFIXES)}")
        check_positive(self, "num_traces")


class Span:
    """The part of the order that is measured: heads that go between the sparsities ``low`` and ``high``.

    Attributes:
        candidates: heads that are full at ``low``; ``steps``: how many of them go.
        cost: scores that :func:`rerank` takes.
    """

    def __init__(self, gates: HeadGates, low: float, high: float) -> None:
        total = gates.alpha.numel()
        self.gates, self.low, self.candidates = gates, low, num_full_heads(low, total)
        self.steps = self.candidates - num_full_heads(high, total)
        if self.steps < 1:
            raise ValueError(
                f"between the sparsities {low:g} and {high:g} no head of {total} becomes compressible: lower the first "
                "or raise the second"
            )
        self.cost = num_scores(self.candidates, self.steps)


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
    recorded = read_traces(str(config.curriculum), tokenizer, config.template, max_length=sys.maxsize)
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
