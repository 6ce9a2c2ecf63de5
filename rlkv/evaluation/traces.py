"""Teacher forcing of recorded solutions through a compressed cache: one pass instead of hundreds of steps.

The prompt is prefilled and the solution follows as one multi-token continuation, so that every token sees
exactly the cache entries that it would see in decoding.  A trace whose every token is the argmax is a problem
that greedy decoding solves with the same words; its mean log-probability tells allocations apart that solve
the same problems.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlkv.allocation import HeadAllocation
from rlkv.evaluation.heads import CacheSettings
from rlkv.inference.compress import compress


@dataclass(frozen=True)
class Trace:
    """Token ids of a rendered prompt and of a correct completion, the EOS included."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class TraceScorer:
    """Scores allocations on fixed traces: ``(share of traces reproduced, mean log-probability per token)``.

    Traces are batched by equal lengths, so nothing is padded.
    """

    def __init__(self, model: PreTrainedModel, traces: list[Trace], settings: CacheSettings) -> None:
        if not traces:
            raise ValueError("scoring allocations needs at least one correct trace")
        self.model, self.settings = model, settings
        groups: dict[tuple[int, int], list[Trace]] = defaultdict(list)
        for trace in traces:
            groups[len(trace.prompt), len(trace.output)].append(trace)
        device = model.device
        self.batches = [
            (torch.tensor([t.prompt for t in g], device=device), torch.tensor([t.output for t in g], device=device))
            for g in groups.values()
        ]

    @torch.inference_mode()
    def __call__(self, allocation: HeadAllocation) -> tuple[float, float]:
        s = self.settings
        reproduced = tokens = 0
        log_likelihood = 0.0
        with compress(self.model, allocation, sink=s.sink, window=s.window, prefill=s.prefill):
            for prompt, output in self.batches:
                first = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
                rest = self.model(input_ids=output[:, :-1], past_key_values=first.past_key_values, use_cache=True)
                logits = torch.cat([first.logits, rest.logits], dim=1).float()
                reproduced += int((logits.argmax(-1) == output).all(dim=1).sum())
                picked = logits.log_softmax(-1).gather(-1, output[..., None])
                log_likelihood += picked.sum().item()
                tokens += output.numel()
        return reproduced / sum(len(p) for p, _ in self.batches), log_likelihood / tokens
