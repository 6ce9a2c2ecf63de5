"""Greedy accuracy of the tiny model with its full cache, on problems that pretraining never drew."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from scipy.stats import binomtest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.tiny.task import MAX_DEFINITIONS, longest_solution, problems
from rlkv.verifier.verifier import is_correct

HELDOUT_SEED = 1_000_003
MAX_NEW_TOKENS = longest_solution(MAX_DEFINITIONS) + 20
LENGTH_BUCKETS = (0, 64, 128, 256, MAX_NEW_TOKENS)


def heldout_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int) -> dict[str, Any]:
    """Accuracy on ``n`` held-out problems of the full length range, over all and per bucket of output tokens."""
    drawn = problems(n, seed=HELDOUT_SEED)
    engine = HFEngine(model, tokenizer, batch_size=100)
    prompts = [render_prompt(tokenizer, p["problem"]) for p in drawn]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    right = [is_correct(c.text, p["answer"]) for c, p in zip(completions, drawn, strict=True)]
    buckets: dict[str, list[bool]] = defaultdict(list)
    for completion, ok in zip(completions, right, strict=True):
        tokens = len(completion.token_ids)
        above, upto = next((a, b) for a, b in pairwise(LENGTH_BUCKETS) if tokens <= b)
        buckets[f"{above}-{upto}"].append(ok)
    low, high = binomtest(sum(right), n).proportion_ci(method="wilson")
    return {
        "seed": HELDOUT_SEED,
        "n": n,
        "accuracy": sum(right) / n,
        "ci_low": float(low),
        "ci_high": float(high),
        "by_output_tokens": {k: {"n": len(v), "accuracy": sum(v) / len(v)} for k, v in sorted(buckets.items())},
    }
