"""The pace of this machine, from a short rollout and one forward and backward: ``--plan_measured``."""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from rlkv.attention import LocalSizes
from rlkv.models.loading import load_model
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import GatedEngine, Rows
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.head_gate import HeadGateConfig
from rlkv.training.logprobs import completion_logprobs
from rlkv.training.plan import Rates
from rlkv.training.rollout import GatedHFEngine, open_engine
from rlkv.training.sharding import is_sharded

PROMPT, NEW, WARM_UP = 128, 64, 4  # tokens of the rollout
UPDATED = 512  # tokens of a row of the update


def measure_rates(settings: RLKVSettings, args: GateTrainingArguments) -> Rates:
    """Tokens/s of this process with random tokens: ``rollout_rows`` rows decode, one micro-batch is updated.

    The second of two is timed each.  Rollouts of 64 tokens after prompts of 128: long texts take longer per token.

    Args:
        settings: with the engine and sizes that a plan has chosen.

    Raises:
        ValueError: with several processes, rollout servers or sharded weights, whose pace is not one process's.
    """
    if settings.rollout == "vllm-server" or is_sharded(args) or args.world_size > 1:
        raise ValueError(
            "plan_measured times one process: leave it out with several, --rollout vllm-server or sharded weights"
        )
    base, tokenizer = load_model(settings.model, dtype=settings.dtype, device=str(args.device))
    add_fused_lm_head(base)
    sizes, rows = LocalSizes(settings.sink, settings.window), settings.rollout_rows or DEFAULT_ROWS
    with open_engine(settings, args, PROMPT) as engine:
        if engine is None:
            engine = GatedHFEngine(base, sizes, tokenizer.pad_token_id or 0, rows)
            model: Any = engine.model
        else:
            model = get_peft_model(base, HeadGateConfig(sink=sizes.sink, window=sizes.window))
        vocabulary = base.config.get_text_config().vocab_size
        rollout = rows * NEW / _decode_seconds(engine, rows, vocabulary)
        return Rates(rollout, _updated_per_second(model, settings, args, vocabulary))


def _decode_seconds(engine: GatedEngine, rows: int, vocabulary: int) -> float:
    """Of ``NEW`` tokens a row without end tokens; reading the prompts is the rollout's part too."""
    for tokens in (WARM_UP, NEW):
        prompts = torch.randint(0, vocabulary, (rows, PROMPT)).tolist()  # others, which no engine has cached
        started = time.perf_counter()
        for _ in engine.sample(Rows(prompts, list(range(len(prompts))), 0), SamplingParams(tokens, 1.0), []):
            pass
    return time.perf_counter() - started


def _updated_per_second(model: Any, settings: RLKVSettings, args: GateTrainingArguments, vocabulary: int) -> float:
    """Tokens/s of forward and backward."""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    length = min(UPDATED, PROMPT + (args.max_completion_length or 0))
    ids = torch.randint(0, vocabulary, (args.per_device_train_batch_size, length), device=args.device)

    def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs

    for _ in range(2):
        started = time.perf_counter()
        completion_logprobs(score, ids, torch.ones_like(ids), length - 1, settings.forward_rows).sum().backward()
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
    return ids.numel() / (time.perf_counter() - started)
