"""A plain decoding of tiny problems under an allocation: no files, no batches of the runner."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.verifier import are_correct


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    allocation: HeadAllocation,
    cache: CacheSettings,
    max_new_tokens: int,
    batch_size: int = 100,
) -> tuple[list[Completion], list[bool]]:
    """Return greedy completions of ``problems`` and their verdicts, in the problems' order."""
    engine = InferenceEngine(model, tokenizer, allocation, cache, batch_size)
    prompts = [render_prompt(tokenizer, problem["problem"]) for problem in problems]
    completions, _ = engine.batch(prompts, SamplingParams(max_new_tokens))
    return completions, are_correct(
        (c.text, p["answer"]) for c, p in zip(completions, problems, strict=True)
    )
