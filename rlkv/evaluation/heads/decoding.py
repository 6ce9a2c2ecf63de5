"""Decode and verify without a file: the accuracy of a head allocation for searches that measure hundreds of them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.verifier.verifier import is_correct


@dataclass(frozen=True)
class Decoded:
    """Completion and verdict of every problem, in the problems' order."""

    completions: list[Completion]
    correct: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    allocation: HeadAllocation,
    cache: CacheSettings,
    max_new_tokens: int,
    batch_size: int = 100,
) -> Decoded:
    """Decode ``problems`` (``problem``, ``answer``) greedily under ``allocation`` and verify the answers."""
    engine = InferenceEngine(
        model, tokenizer, allocation, cache.sink, cache.window, cache.prefill, batch_size, cache.eviction
    )
    prompts = [render_prompt(tokenizer, problem["problem"]) for problem in problems]
    completions, _ = engine.batch(prompts, SamplingParams(max_new_tokens))
    return Decoded(completions, [is_correct(c.text, p["answer"]) for c, p in zip(completions, problems, strict=True)])
