"""One training run from its configuration to its export: data, model, trainer, resume."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import load_model, resolve_dtype
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.engine_rollout import open_engine
from rlkv.training.export import CURVES
from rlkv.training.head_gate import set_gates
from rlkv.training.loggers import StepLine
from rlkv.training.problems import load_curriculum, longest_prompt
from rlkv.training.reward import Reward, verifier_reward
from rlkv.training.run_folder import RunFolder
from rlkv.training.trainer import RLKVTrainer

_TRAINING_KEYS = [
    *["output_dir", "run_name", "seed", "max_steps", "num_train_epochs", "prompts_per_step", "num_generations"],
    *["temperature", "top_p", "top_k", "max_completion_length", "learning_rate", "lr_scheduler_type", "weight_decay"],
    *["adam_beta1", "adam_beta2", "max_grad_norm", "epsilon", "num_iterations", "steps_per_generation"],
    *["generation_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"],
    *["save_steps", "save_total_limit"],
]


def gates_facts(gates: HeadGates) -> dict[str, Any]:
    """What a run says of the gates that it started from: a digest of their values, and how they were found."""
    digest = hashlib.sha256(gates.alpha.numpy().tobytes()).hexdigest()[:16]
    return {"digest": digest, **{key: gates.training.get(key) for key in ("method", "steps")}}


def run_config(
    settings: RLKVSettings, args: GateTrainingArguments, problems: Dataset, start: HeadGates | None = None
) -> dict[str, Any]:
    """The settings that define a run, JSON-able, with digests of the problems and of the gates at the start."""
    training = {key: getattr(args, key) for key in _TRAINING_KEYS}
    digest = hashlib.sha256(json.dumps(problems.to_list()).encode()).hexdigest()[:16]
    found = {**asdict(settings), **training, "processes": args.world_size, "problems": digest}
    found["init_gates"] = None if start is None else gates_facts(start)
    return json.loads(json.dumps(found, default=str))


def is_finished(checkpoint: Path, args: GateTrainingArguments) -> bool:
    """Whether the checkpoint is the end of its run and no more steps are asked for now."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return state.global_step >= max(args.max_steps, state.max_steps if args.max_steps <= 0 else 0)


def load_policy(settings: RLKVSettings, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen model on the CPU (the trainer moves it), in the dtype that ``device`` would use."""
    dtype = str(resolve_dtype(settings.dtype, device)).removeprefix("torch.")
    return load_model(settings.model, dtype=dtype, device="cpu")


def train_gates(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward: Reward = verifier_reward,
    callbacks: list[TrainerCallback] | None = None,
) -> HeadGates:
    """Train, or go on with, the run in ``args.output_dir``, and export it there.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.
        callbacks: run on every process, in addition to the loggers of the main one.

    Raises:
        ValueError: for data, a model or a folder that do not fit; see :func:`load_curriculum` and
            :class:`RunFolder`.
    """
    problems = load_curriculum(settings, args)
    start = None if settings.init_gates is None else HeadGates.load(settings.init_gates)
    config = run_config(settings, args, problems, start)
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    if model is None or tokenizer is None:
        model, tokenizer = load_policy(settings, args.device)
    if start is not None:
        start.check_model(model.config)

    def make_gates() -> HeadGates:
        return run.gates(trainer.model, trainer.gate_mean.mean(), "rlkv", trainer.state.global_step)

    main = args.process_index == 0
    extra = [*(callbacks or []), *([*run.loggers(make_gates), StepLine()] if main else [])]
    engine = open_engine(settings, args, longest_prompt(problems, tokenizer)) if main else None
    trainer = RLKVTrainer(model, args, settings, problems, tokenizer, reward, extra, engine)
    if start is not None:
        set_gates(trainer.model, start.alpha)
    trainer.accelerator.wait_for_everyone()  # every process has looked into the folder
    if main:
        run.write_config()
    if run.checkpoint is not None and is_finished(run.checkpoint, args):
        trainer.restore(run.checkpoint)
    else:
        trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    gates = make_gates()
    if main:
        run.export(gates, CURVES)
    trainer.accelerator.wait_for_everyone()
    return gates
