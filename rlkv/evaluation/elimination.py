"""In which order heads can go: scores on recorded solutions, backward elimination, and gates that are re-ranked by it.

A gate says how much of a head is needed while the others are open too, not what is lost when the head goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.compress import compress

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
