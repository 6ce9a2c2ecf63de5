"""The measured ground truth of the built-in model: random halves, single heads, a whole elimination."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.evaluation.heads.elimination import Score, Trace, TraceScorer, backward_elimination, num_scores, without_head
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import Completion, SamplingParams
from rlkv.tiny import GROUND_TRUTH, problems
from rlkv.tiny.task import MIN_DEFINITIONS, longest_solution
from rlkv.utils.progress import progress_bar
from rlkv.verifier.verifier import is_correct

TRACE_SEED, ACCURACY_SEED = 3_000_003, 4_000_003
REMOVABLE = 0.95  # accuracy below which heads are needed


@dataclass(frozen=True, kw_only=True)
class GroundTruthConfig(ModelOptions):
    """Measure which KV heads the built-in model needs."""

    output: Path = GROUND_TRUTH
    """the JSON file to write"""
    num_problems: int = 200
    """problems per decoded accuracy"""
    num_traces: int = 200
    """problems whose solutions are teacher-forced"""
    longest: int = 12
    """most definitions of a problem"""
    random_draws: int = 10
    """random halves of the heads"""
    sink: int = 4
    """first tokens that compressible heads keep"""
    window: int = 16
    """last tokens that they keep"""
    dtype: str = "float32"
    """of the model"""

    def check(self) -> None:
        check_positive(self, "num_problems", "num_traces", "random_draws")


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
    """Decode ``problems`` (``problem``, ``answer``) greedily under ``allocation`` and verify the answers; no files."""
    engine = InferenceEngine(
        model, tokenizer, allocation, cache.sink, cache.window, cache.prefill, batch_size, cache.eviction
    )
    prompts = [render_prompt(tokenizer, problem["problem"]) for problem in problems]
    completions, _ = engine.batch(prompts, SamplingParams(max_new_tokens))
    return Decoded(completions, [is_correct(c.text, p["answer"]) for c, p in zip(completions, problems, strict=True)])


def measure_ground_truth(config: GroundTruthConfig) -> dict[str, Any]:
    """All measurements, JSON-able; the order of the heads is under ``elimination``."""
    model, tokenizer = config.load()
    shape = ModelShape.from_config(model.config)
    layers, heads = shape.num_layers, shape.num_kv_heads
    total = layers * heads
    cache, limit = CacheSettings(config.sink, config.window), longest_solution(config.longest)
    everything = HeadAllocation(torch.ones(layers, heads, dtype=torch.bool))
    drawn = problems(config.num_problems, seed=ACCURACY_SEED, max_definitions=config.longest)

    def accuracy(allocation: HeadAllocation) -> float:
        return decode(model, tokenizer, drawn, allocation, cache, limit).accuracy

    halves = [HeadAllocation.random(layers, heads, 0.5, seed) for seed in range(config.random_draws)]
    full_accuracy, *half_accuracy = _scores("random halves", accuracy, [everything, *halves])
    single = [without_head(everything.full, layer, head) for layer in range(layers) for head in range(heads)]
    lost = [full_accuracy - found for found in _scores("single heads", accuracy, single)]
    texts = problems(config.num_traces, seed=TRACE_SEED, max_definitions=config.longest)
    outcome = decode(model, tokenizer, texts, everything, cache, limit)
    prompts = [tokenizer(render_prompt(tokenizer, p["problem"]), add_special_tokens=False).input_ids for p in texts]
    solved = zip(prompts, outcome.completions, outcome.correct, strict=True)
    traces = [Trace(tuple(prompt), tuple(completion.token_ids)) for prompt, completion, right in solved if right]
    with progress_bar("elimination", "scores", num_scores(total, total)) as bar:
        scorer = TraceScorer(model, traces, config.sink, config.window)
        steps = backward_elimination(scorer, everything, bar.advance)
    order = [(step.layer, step.head) for step in steps]
    partial = [HeadAllocation.from_order(order, layers, heads, k / total) for k in range(1, total + 1)]
    curve = _scores("accuracy after every step", accuracy, partial)
    settings = {**asdict(cache), "max_new_tokens": limit}
    return {
        "model": shape.to_dict(),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "num_problems": config.num_problems,
        "definitions": [MIN_DEFINITIONS, config.longest],
        "problem_seeds": {"accuracy": ACCURACY_SEED, "traces": TRACE_SEED},
        "num_traces": len(traces),
        "full_accuracy": full_accuracy,
        "random_half_accuracy": half_accuracy,
        "random_half_mean": sum(half_accuracy) / len(half_accuracy),
        "accuracy_lost_by_single_head": [lost[i : i + heads] for i in range(0, total, heads)],
        "elimination": [
            {
                "layer": step.layer,
                "head": step.head,
                "accuracy": decoded,
                "traces_reproduced": step.score[0],
                "mean_log_probability": step.score[1],
            }
            for step, decoded in zip(steps, curve, strict=True)
        ],
        "heads_removable_before_0.95": next((k for k, a in enumerate(curve) if a < REMOVABLE), total),
    }


def _scores(title: str, score: Score, allocations: list[HeadAllocation]) -> list[Any]:
    found = []
    with progress_bar(title, "allocations", len(allocations)) as bar:
        for allocation in allocations:
            found.append(score(allocation))
            bar.advance()
    return found
