"""Where elimination starts: from no order at all, or from a short distillation that says which heads nothing needs.

A step of distillation tells of all heads at once, a forward under masks of one.  It is right about the heads that are
needed least, and wrong about the order of those that are needed, where it is measured instead.

Its prompts go through the gates, however they are read later: on the language model its heads at 0.4 then lose fewer of
other solutions than with prompts in full.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlkv.gates.allocation import compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.distill_config import DistillSettings
from rlkv.training.distill_run import distill_gates
from rlkv.training.elimination import with_order
from rlkv.training.logs import LOG
from rlkv.utils.jsonl import read_log

SOLUTIONS = 6  # of a step of the distillation
DISTILLED = "distilled"  # its folder, in that of the run
FASTEST = 0.25  # learning rate: gates that reach 0 at once tell of no order
COPIED = {"model", "dtype", "curriculum", "allow_foreign_curriculum", "template", "resume"}
SIZES = ("deploy_sink", "deploy_window")


def unordered_gates(shape: ModelShape, settings: RLKVSettings) -> HeadGates:
    """Gates that are spread evenly over 0 to 1, in the order of the heads' numbers."""
    alpha = torch.linspace(0, 1, shape.num_layers * shape.num_kv_heads).view(shape.num_layers, shape.num_kv_heads)
    sizes = settings.deploy_sink, settings.deploy_window
    return HeadGates(alpha, None, shape, *sizes, *sizes)  # type: ignore[arg-type]


def distillation_settings(settings: RLKVSettings, args: GateTrainingArguments, folder: Path) -> DistillSettings:
    """Of the distillation before an elimination: its steps suffice for a gate that goes from 1 to 0.

    A solution at a time, which needs the least memory, and on a CPU the least time, as nothing is padded.
    """
    return DistillSettings(
        **{name: getattr(settings, name) for name in (*COPIED, *SIZES)},
        data="traces",
        prefill="local",
        sink=settings.deploy_sink,
        window=settings.deploy_window,
        max_length=sys.maxsize,
        steps=settings.elimination_distillation,
        learning_rate=min(FASTEST, 2 / settings.elimination_distillation),
        batch_size=SOLUTIONS,
        gradient_checkpointing=args.gradient_checkpointing,
        save_steps=5,
        image_steps=0,
        seed=args.seed,
        device=str(args.device),
        output_dir=str(folder),
    )


def distilled_order(
    start: HeadGates,
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> tuple[HeadGates, float]:
    """The numbers of ``start`` in the order of a distillation, where one is asked for, and its CPU seconds.

    The distillation is a run of its own in ``folder``, which resumes.
    """
    if not settings.elimination_distillation:
        return start, 0.0
    distilled = distill_gates(distillation_settings(settings, args, folder / DISTILLED), model, tokenizer)
    seconds = sum(record["time/step_cpu_s"] for record in read_log(folder / DISTILLED / LOG))
    return with_order(start, compression_order(distilled)), seconds
