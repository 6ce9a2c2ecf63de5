"""Teacher forcing of recorded solutions through a compressed cache: one pass instead of hundreds of steps.

Prompt and solution are read in one call with ``prefill="local"``: every token sees exactly the cache entries
that it would see in decoding, and the prompt is masked in the same way, as in training.  A trace whose every
token is the argmax is a problem that greedy decoding solves with the same words; its mean log-probability tells
allocations apart that solve the same problems.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlkv.gates.allocation import HeadAllocation
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
