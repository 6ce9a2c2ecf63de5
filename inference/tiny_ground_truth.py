"""Measure which KV heads the built-in tiny model needs: the yardstick for finders of heads.

    python inference/tiny_ground_truth.py            # writes rlkv/tiny/model/ground_truth.json

Three measurements with sink 4 and window 16 over chains of 3 to 12 definitions (decoding with
prefill full):

1. the greedy accuracy with the full cache, with random halves of the heads compressible (10 draws),
   and with each single head compressible;
2. a greedy backward elimination: heads are made compressible one by one, each time the one whose
   loss leaves the most correct solutions reproduced under teacher forcing (ties: the highest mean
   log-probability).  Every head that is left is scored at every step, without a shortcut:
   rlkv-train --finder elimination needs far fewer scores;
3. the greedy accuracy, by decoding, after every step of that elimination.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.cache import CacheSettings
from rlkv.cli.app import parse, run_app
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import compress
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import ModelOptions, check_least
from rlkv.models.builtin import TINY
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

# token ids of a rendered prompt and of a correct completion, the EOS included
Trace = tuple[list[int], list[int]]
# of an allocation; larger is better, and in a tuple a finer measure breaks the ties of a coarser
# one
Score = Callable[[HeadAllocation], Any]


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
        check_least(self, 1, "num_problems", "num_traces", "random_draws")
        if self.output == GROUND_TRUTH and self.model != TINY:
            raise ValueError(
                f"{GROUND_TRUTH.name} of the package is that of {TINY}: give measurements of "
                f"{self.model} an --output of their own"
            )


class TraceScorer:
    """Scores allocations: ``(share of traces reproduced, mean log-probability per token)``.

    Prompt and solution are read in one call with ``prefill="local"``: every token sees the cache
    entries that it would see in decoding.  A trace whose every token is the argmax is what greedy
    decoding writes.
    """

    def __init__(self, model: PreTrainedModel, traces: list[Trace], sink: int, window: int) -> None:
        if not traces:
            raise ValueError("scoring allocations needs at least one correct trace")
        self.model = model
        self.sink = sink
        self.window = window
        self.num_traces = len(traces)
        groups: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        for prompt, output in traces:
            groups[len(prompt), len(output)].append(prompt + output)
        # ids int64 [rows, prompt + output], and the length of the output
        self.batches = []
        for (_, output_length), rows in groups.items():
            self.batches.append((torch.tensor(rows, device=model.device), output_length))

    @torch.inference_mode()
    def __call__(self, allocation: HeadAllocation) -> tuple[float, float]:
        reproduced = tokens = 0
        log_likelihood = 0.0
        with compress(self.model, allocation, sink=self.sink, window=self.window, prefill="local"):
            for ids, length in self.batches:
                logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=length + 1).logits
                predicted = logits[:, :-1]
                output = ids[:, -length:]
                reproduced += int((predicted.argmax(-1) == output).all(dim=1).sum())
                picked = predicted.float().log_softmax(-1).gather(-1, output[..., None])
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
    """Return ``full`` (bool ``[L, H]``) with one more compressible head."""
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


def measure_ground_truth(config: GroundTruthConfig) -> dict[str, Any]:
    """Make all measurements, JSON-able; the order of the heads is under ``elimination``."""
    model, tokenizer = config.load()
    shape = ModelShape.from_config(model.config)
    layers = shape.num_layers
    heads = shape.num_kv_heads
    total = layers * heads
    limit = longest_solution(config.longest)
    everything = HeadAllocation(torch.ones(layers, heads, dtype=torch.bool))
    sizes = CacheSettings(config.sink, config.window)
    engine = InferenceEngine(model, tokenizer, everything, sizes, batch_size=100)

    def draw(kind: str, number: int) -> list[dict[str, str]]:
        return problems(number, SEEDS[kind], max_definitions=config.longest)

    def decode(drawn: list[dict[str, str]]) -> tuple[list[list[int]], list[bool]]:
        """Return tokens and verdict of every problem under the engine's allocation."""
        prompts = [render_prompt(tokenizer, problem["problem"]) for problem in drawn]
        completions, _ = engine.batch(prompts, SamplingParams(limit))
        texts = [completion.text for completion in completions]
        answers = [problem["answer"] for problem in drawn]
        right = are_correct(zip(texts, answers, strict=True))
        return [completion.token_ids for completion in completions], right

    examined = draw("accuracy", config.num_problems)

    def accuracies(title: str, allocations: list[HeadAllocation]) -> list[float]:
        found = []
        with progress_bar(title, "allocations", len(allocations)) as bar:
            for allocation in allocations:
                engine.allocation = allocation
                found.append(sum(decode(examined)[1]) / config.num_problems)
                bar.advance()
        engine.allocation = everything
        return found

    seeds = range(config.random_draws)
    halves = [HeadAllocation.random(layers, heads, 0.5, seed) for seed in seeds]
    full_accuracy, *half_accuracy = accuracies("random halves", [everything, *halves])
    every_head = everything.full.nonzero().tolist()
    single = [without_head(everything.full, layer, head) for layer, head in every_head]
    lost = [full_accuracy - found for found in accuracies("single heads", single)]
    recorded = draw("traces", config.num_traces)
    traces = []
    for problem, output, right in zip(recorded, *decode(recorded), strict=True):
        if right:
            (prompt,) = engine.tokenize([render_prompt(tokenizer, problem["problem"])])
            traces.append((prompt, output))
    with progress_bar("elimination", "scores", total * (total + 1) // 2) as bar:
        scorer = TraceScorer(model, traces, config.sink, config.window)
        steps = backward_elimination(scorer, everything, bar.advance)
    order = [(step.layer, step.head) for step in steps]
    shares = [gone / total for gone in range(1, total + 1)]
    partial = [HeadAllocation.from_order(order, layers, heads, share) for share in shares]
    curve = accuracies("accuracy after every step", partial)
    settings = {**asdict(CacheSettings(config.sink, config.window)), "max_new_tokens": limit}
    # one less than the steps to the first accuracy that is too low
    removable = [*(accuracy < REMOVABLE for accuracy in curve), True].index(True)
    eliminated = []
    for step, accuracy in zip(steps, curve, strict=True):
        found = {"layer": step.layer, "head": step.head}
        found["traces_reproduced"], found["mean_log_probability"] = step.score
        eliminated.append({**found, "accuracy": accuracy})
    return {
        "model": asdict(shape),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "num_problems": config.num_problems,
        "definitions": [MIN_DEFINITIONS, config.longest],
        "problem_seeds": SEEDS,
        "num_traces": len(traces),
        "full_accuracy": full_accuracy,
        "random_half_accuracy": half_accuracy,
        "random_half_mean": sum(half_accuracy) / len(half_accuracy),
        "accuracy_lost_by_single_head": [lost[i : i + heads] for i in range(0, total, heads)],
        "elimination": eliminated,
        "heads_removable_before_0.95": removable,
    }


def main() -> None:
    config = parse(GroundTruthConfig, __doc__)
    check_results(config.output.parent, config.output.name, (), ("elimination",))
    result = measure_ground_truth(config)
    write_json(config.output, {**result, **provenance()})
    shown = ("full_accuracy", "random_half_mean", "heads_removable_before_0.95")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    run_app(main)
