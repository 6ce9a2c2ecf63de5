r"""Measure which KV heads the built-in tiny model needs: the yardstick for every method that finds
heads.

    python inference/tiny_ground_truth.py            # writes rlkv/tiny/model/ground_truth.json

Three measurements with sink 4 and window 16 over chains of 3 to 12 definitions (decoding with
  prefill full): 1. the greedy accuracy with the full cache, with random halves of the heads
  compressible (10 draws), and with
     each single head compressible;
  2. a greedy backward elimination: heads are made compressible one by one, each time the one whose
     loss leaves the most correct solutions reproduced under teacher forcing (ties: the highest mean
     log-probability);
  3. the greedy accuracy, by decoding, after every step of that elimination.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlkv.cache import CacheSettings
from rlkv.cli.app import parse, run_app
from rlkv.evaluation.elimination import (
    Elimination,
    Trace,
    TraceScorer,
    backward_elimination,
    without_head,
)
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.prompts import render_prompt
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import SamplingParams
from rlkv.tiny import GROUND_TRUTH, MIN_DEFINITIONS, longest_solution, problems
from rlkv.utils.files import write_json
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import provenance
from rlkv.utils.store import check_results
from rlkv.verifier import are_correct

SEEDS = {"accuracy": 4_000_003, "traces": 3_000_003}  # of the problems
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


def measure_ground_truth(config: GroundTruthConfig) -> dict[str, Any]:
    """All measurements, JSON-able; the order of the heads is under ``elimination``."""
    model, tokenizer = config.load()
    shape = ModelShape.from_config(model.config)
    layers, heads = shape.num_layers, shape.num_kv_heads
    total, limit = layers * heads, longest_solution(config.longest)
    everything = HeadAllocation(torch.ones(layers, heads, dtype=torch.bool))
    engine = InferenceEngine(
        model, tokenizer, everything, config.sink, config.window, batch_size=100
    )
    numbers = {"accuracy": config.num_problems, "traces": config.num_traces}
    drawn = {
        kind: problems(numbers[kind], seed, max_definitions=config.longest)
        for kind, seed in SEEDS.items()
    }
    rendered = {
        kind: [render_prompt(tokenizer, p["problem"]) for p in of] for kind, of in drawn.items()
    }

    def decode(kind: str) -> tuple[list[list[int]], list[bool]]:
        """Tokens and verdict of every problem under the engine's allocation."""
        completions, _ = engine.batch(rendered[kind], SamplingParams(limit))
        pairs = zip(completions, drawn[kind], strict=True)
        return [c.token_ids for c in completions], are_correct(
            (c.text, p["answer"]) for c, p in pairs
        )

    def accuracies(title: str, allocations: list[HeadAllocation]) -> list[float]:
        found = []
        with progress_bar(title, "allocations", len(allocations)) as bar:
            for allocation in allocations:
                engine.allocation = allocation
                found.append(sum(decode("accuracy")[1]) / config.num_problems)
                bar.advance()
        engine.allocation = everything
        return found

    halves = [
        HeadAllocation.random(layers, heads, 0.5, seed) for seed in range(config.random_draws)
    ]
    full_accuracy, *half_accuracy = accuracies("random halves", [everything, *halves])
    single = [
        without_head(everything.full, layer, head)
        for layer in range(layers)
        for head in range(heads)
    ]
    lost = [full_accuracy - found for found in accuracies("single heads", single)]
    solved = zip(rendered["traces"], *decode("traces"), strict=True)
    traces = [
        Trace(tuple(engine.encode(prompt)), tuple(output))
        for prompt, output, right in solved
        if right
    ]
    with progress_bar("elimination", "scores", total * (total + 1) // 2) as bar:
        scorer = TraceScorer(model, traces, config.sink, config.window)
        steps = backward_elimination(scorer, everything, bar.advance)
    order = [(step.layer, step.head) for step in steps]
    partial = [
        HeadAllocation.from_order(order, layers, heads, k / total) for k in range(1, total + 1)
    ]
    curve = accuracies("accuracy after every step", partial)
    settings = {**asdict(CacheSettings(config.sink, config.window)), "max_new_tokens": limit}
    return {
        "model": shape.to_dict(),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "num_problems": config.num_problems,
        "definitions": [MIN_DEFINITIONS, config.longest],
        "problem_seeds": SEEDS,
        "num_traces": len(traces),
        "full_accuracy": full_accuracy,
        "random_half_accuracy": half_accuracy,
        "random_half_mean": sum(half_accuracy) / len(half_accuracy),
        "accuracy_lost_by_single_head": [lost[i : i + heads] for i in range(0, total, heads)],
        "elimination": [
            {**_scores(step), "accuracy": decoded}
            for step, decoded in zip(steps, curve, strict=True)
        ],
        "heads_removable_before_0.95": next(
            (k for k, a in enumerate(curve) if a < REMOVABLE), total
        ),
    }


def _scores(step: Elimination) -> dict[str, Any]:
    reproduced, log_probability = step.score
    heads = {"layer": step.layer, "head": step.head}
    return {**heads, "traces_reproduced": reproduced, "mean_log_probability": log_probability}


def main() -> None:
    config = parse(GroundTruthConfig, __doc__)
    check_results(config.output.parent, config.output.name, (), ("elimination",))
    result = measure_ground_truth(config)
    write_json(config.output, {**result, **provenance()})
    shown = ("full_accuracy", "random_half_mean", "heads_removable_before_0.95")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    run_app(main)
