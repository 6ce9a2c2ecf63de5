"""The run that made the built-in model: pretraining with its log, held-out accuracy, and the package folder."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.models.loading import resolve_device
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.hf import HFEngine
from rlkv.tiny import MODEL_DIR
from rlkv.tiny.task import MAX_DEFINITIONS, longest_solution, problems
from rlkv.tiny.tokenizer import build_tokenizer
from rlkv.training.tiny_pretraining import PretrainConfig, build_model, pretrain
from rlkv.utils.atomic import write_json
from rlkv.utils.jsonl import read_log
from rlkv.utils.progress import progress_bar
from rlkv.utils.provenance import hardware_line
from rlkv.verifier.verifier import are_correct

HELDOUT_SEED = 1_000_003  # pretraining never drew these problems
MAX_NEW_TOKENS = longest_solution(MAX_DEFINITIONS) + 20
LENGTH_BUCKETS = (0, 64, 128, 256, MAX_NEW_TOKENS)


@dataclass(frozen=True, kw_only=True)
class PretrainRunConfig:
    """Pretraining of the tiny model."""

    output_dir: Path = MODEL_DIR
    """where the finished model goes"""
    work_dir: Path = Path("results/pretrain_tiny")
    """checkpoint and log of the run"""
    steps: int = PretrainConfig.steps
    """optimizer steps before the closing stage"""
    seed: int = PretrainConfig.seed
    """initial weights and problems"""
    heldout: int = 1000
    """problems of the closing accuracy measurement"""
    device: str = "auto"
    """auto, cpu or cuda"""


def run_pretraining(run: PretrainRunConfig) -> dict[str, Any]:
    """Start or resume the pretraining run in ``run.work_dir``, and write the model; returns ``pretraining.json``."""
    config = PretrainConfig(seed=run.seed, steps=run.steps)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, run.seed)
    torch.nn.Module.to(model, resolve_device(run.device))
    run.work_dir.mkdir(parents=True, exist_ok=True)
    path = run.work_dir / "log.jsonl"
    started = time.perf_counter()
    with progress_bar("pretraining", "steps", config.total_steps) as bar, path.open("a") as log:

        def on_step(step: int, loss: float) -> None:
            if not bar.done:
                bar.resume(step)
            bar.update(step + 1, note=f"loss {loss:.4f}")
            seconds = round(time.perf_counter() - started, 1)
            log.write(json.dumps({"step": step, "loss": loss, "seconds": seconds}) + "\n")
            log.flush()

        pretrain(model, tokenizer, config, on_step, checkpoint=run.work_dir / "checkpoint.pt")
    model.save_pretrained(run.output_dir)
    tokenizer.save_pretrained(run.output_dir)
    summary = {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "seconds": round(seconds_trained(path)),
        "hardware": hardware_line(),
        "heldout": heldout_accuracy(model, tokenizer, run.heldout),
    }
    write_json(run.output_dir / "pretraining.json", summary)
    return summary


def seconds_trained(log: Path) -> float:
    """Seconds of all runs in the log: each run counts from zero, so a run ends where the count falls."""
    seconds = [record["seconds"] for record in read_log(log)]
    return sum(now for now, later in zip(seconds, [*seconds[1:], 0.0], strict=True) if later < now)


def heldout_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int) -> dict[str, Any]:
    """Greedy accuracy with the full cache on ``n`` held-out problems, over all and per bucket of output tokens."""
    drawn = problems(n, seed=HELDOUT_SEED)
    engine = HFEngine(model, tokenizer, batch_size=100)
    prompts = [render_prompt(tokenizer, p["problem"]) for p in drawn]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    right = are_correct((c.text, p["answer"]) for c, p in zip(completions, drawn, strict=True))
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
