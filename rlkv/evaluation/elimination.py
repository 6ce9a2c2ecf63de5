"""In which order heads can go, without a shortcut: the reference that finders of heads are compared
with.

Every head that is left is scored at every step: :mod:`rlkv.training.elimination` needs far fewer
scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import compress

# of an allocation; larger is better, and in a tuple a finer measure breaks the ties of a coarser
# one
Score = Callable[[HeadAllocation], Any]


@dataclass(frozen=True)
class Trace:
    """Token ids of a rendered prompt and of a correct completion, the EOS included."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class TraceScorer:
    """Scores allocations on fixed traces:

    ``(share of traces reproduced, mean log-probability per token)``.

    Prompt and solution are read in one call with ``prefill="local"``: every token sees the cache
    entries that it would see in decoding.  A trace whose every token is the argmax is what greedy
    decoding writes.
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
                logits = self.model(
                    input_ids=ids, use_cache=True, logits_to_keep=output_length + 1
                ).logits[:, :-1]
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


def backward_elimination(
    score: Score, start: HeadAllocation, on_call: Callable[[], None]
) -> list[Elimination]:
    """Make heads compressible one by one, each time the one whose loss leaves the best score.

    Begins with ``start``, whose n full heads take ``n (n + 1) / 2`` scores.  Ties go to the lower
    (layer, head).
    """
    full = start.full.clone()
    steps: list[Elimination] = []
    while full.any():
        found = []
        for layer, head in full.nonzero().tolist():
            found.append(Elimination(layer, head, score(without_head(full, layer, head))))
            on_call()
        best = max(found, key=lambda step: step.score)  # the first of equal ones
        full[best.layer, best.head] = False
        steps.append(best)
    return steps
