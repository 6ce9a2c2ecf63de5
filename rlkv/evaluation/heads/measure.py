"""Accuracy of a model under a head allocation: the one measurement behind every comparison of head rankings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlkv.cache
from rlkv.cache.accounting import EntrySize, kv_nbytes
from rlkv.evaluation.stats.intervals import wilson_interval
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import compress
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.verifier.verifier import is_correct


@dataclass(frozen=True)
class CacheSettings:
    """What the compressible heads keep, and how completions are decoded (greedily).

    ``sink`` and ``window`` are in tokens; ``prefill`` is ``full`` or ``local`` (see ``rlkv.compress``).  What an
    eviction policy keeps is said to :func:`measure`.
    """

    sink: int = 16
    window: int = 64
    prefill: str = "full"
    max_new_tokens: int = 1024
    batch_size: int = 50
    template: str = "rlkv"


@dataclass(frozen=True)
class HeadResult:
    """One row of a results table.

    ``kv_bytes`` are the bytes of KV entries that each text holds at its own end, as if it were decoded alone, summed
    over texts; ``kv_bytes_full`` what the full cache holds for the same tokens.  ``ci_*`` is the 95% Wilson interval.
    """

    method: str
    sparsity: float
    seed: int | None
    accuracy: float
    ci_low: float
    ci_high: float
    n: int
    kv_bytes: int
    kv_bytes_full: int
    mean_output_tokens: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Measurement:
    """Verdict and completion of every problem, in the problems' order, and the KV bytes of the run."""

    correct: list[bool]
    completions: list[Completion]
    kv_bytes: int
    kv_bytes_full: int

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)

    def row(self, method: str, sparsity: float, seed: int | None = None) -> HeadResult:
        n = len(self.correct)
        low, high = wilson_interval(sum(self.correct), n)
        mean_tokens = sum(len(c.token_ids) for c in self.completions) / n
        return HeadResult(
            method, sparsity, seed, self.accuracy, low, high, n, self.kv_bytes, self.kv_bytes_full, mean_tokens
        )


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    allocation: HeadAllocation,
    settings: CacheSettings,
    eviction: EvictionPolicy | None = None,
) -> Measurement:
    """Decode ``problems`` greedily under ``allocation`` and verify the answers.

    With ``eviction`` the compressible heads keep what that policy chooses instead of sinks and a window.

    Batches hold problems of similar prompt length, which wastes the fewest padded steps.
    """
    prompts = [render_prompt(tokenizer, p["problem"], settings.template) for p in problems]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    sizes: dict[str, Any] = {"sink": settings.sink, "window": settings.window, "prefill": settings.prefill}
    entry_size = EntrySize.of(model)
    engine = HFEngine(model, tokenizer, batch_size=settings.batch_size)
    sampling = SamplingParams(max_new_tokens=settings.max_new_tokens)
    completions: dict[int, Completion] = {}
    with compress(model, allocation, **sizes, eviction=eviction):
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            completions.update(zip(rows, engine.generate([prompts[i] for i in rows], sampling), strict=True))
    ordered = [completions[i] for i in range(len(prompts))]
    correct = [is_correct(c.text, p["answer"]) for c, p in zip(ordered, problems, strict=True)]
    read = torch.tensor(engine.prompt_lengths(prompts))
    cached = read + torch.tensor([len(c.token_ids) for c in ordered]) - 1  # the last token is never fed
    cache = rlkv.cache.CacheSettings(**sizes, eviction=eviction)
    held, whole = kv_nbytes(cache, allocation.full, entry_size, read, cached)
    return Measurement(correct, ordered, int(held.sum()), int(whole.sum()))
