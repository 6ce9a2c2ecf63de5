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

from rlkv.data.curriculum_file import read_rows
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import load_model, resolve_dtype
from rlkv.models.prompts import build_messages
from rlkv.models.shape import ModelShape
from rlkv.training.checkpoint import last_checkpoint
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.engine_rollout import open_engine
from rlkv.training.export import export_run
from rlkv.training.head_gate import gates_matrix, set_gates
from rlkv.training.loggers import LOG, GateImages, JsonlLog, StepLine, WandbLog, read_log
from rlkv.training.records import gate_shares
from rlkv.training.reward import Reward, verifier_reward
from rlkv.training.trainer import RLKVTrainer
from rlkv.utils.atomic import atomic_path

RUN_CONFIG = "run_config.json"
# what may differ between a run and its continuation
_FREE = {"wandb", "wandb_project", "resume", "image_steps", "output_dir", "save_steps", "save_total_limit", "run_name"}
_FREE |= {"rollout_url", "rollout_patience", "rollout_kv_gib", "rollout_eager"}
_FREE |= {"max_steps", "num_train_epochs", "curriculum"}  # the problems themselves are compared by their digest
_TRAINING_KEYS = [
    *["output_dir", "run_name", "seed", "max_steps", "num_train_epochs", "prompts_per_step", "num_generations"],
    *["temperature", "top_p", "top_k", "max_completion_length", "learning_rate", "lr_scheduler_type", "weight_decay"],
    *["adam_beta1", "adam_beta2", "max_grad_norm", "epsilon", "num_iterations", "steps_per_generation"],
    *["generation_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"],
    *["save_steps", "save_total_limit"],
]


def read_problems(path: str | Path, template: str) -> Dataset:
    """The curriculum as columns ``prompt`` (messages) and ``answer``; errors as in :func:`read_rows`."""
    rows = read_rows(path)
    return Dataset.from_list(
        [{"prompt": build_messages(r["problem"], template), "answer": str(r["answer"])} for r in rows]
    )


def longest_prompt(problems: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    rendered = (
        tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in problems["prompt"]
    )
    return max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered)


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


def check_output_dir(folder: Path, config: dict[str, Any], resume: bool) -> Path | None:
    """The checkpoint to go on from; ``config`` is noted down for the next time.

    Raises:
        ValueError: if the folder holds another run, or this one and ``resume`` is off.
    """
    noted = folder / RUN_CONFIG
    checkpoint = last_checkpoint(folder)
    if noted.exists() and not resume:
        raise ValueError(f"{folder} holds a run already: continue it with --resume true, or take another --output_dir")
    if noted.exists() and checkpoint is not None:
        before = json.loads(noted.read_text())
        differing = [key for key in config if key not in _FREE and before.get(key, config[key]) != config[key]]
        if differing:
            changes = ", ".join(f"{key} {before[key]!r} -> {config[key]!r}" for key in differing)
            raise ValueError(
                f"{folder} holds a run with other settings ({changes}): use the same ones to continue it, or another "
                "--output_dir"
            )
    elif checkpoint is not None:
        raise ValueError(f"{folder} holds checkpoints of unknown origin: take another --output_dir")
    return checkpoint


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
        callbacks: run on every process, beside the loggers of the main one.

    Raises:
        ValueError: for data, a model or a folder that do not fit; see :func:`read_problems`, :func:`check_output_dir`.
    """
    if settings.curriculum is None:
        raise ValueError("no problems to train on: pass --curriculum FILE, which data_prep/filter_deepscaler.py writes")
    folder = Path(args.output_dir or "outputs/gates")
    problems = read_problems(settings.curriculum, settings.template)
    start = None if settings.init_gates is None else HeadGates.load(settings.init_gates)
    config = run_config(settings, args, problems, start)
    checkpoint = check_output_dir(folder, config, settings.resume)
    if model is None or tokenizer is None:
        model, tokenizer = load_policy(settings, args.device)
    if start is not None:
        start.check_model(model.config)
    shape = ModelShape.from_config(model.config)

    def make_gates() -> HeadGates:
        return HeadGates(
            alpha=gates_matrix(trainer.model),
            mean_alpha=trainer.gate_mean.mean(),
            model=shape,
            sink=settings.sink,
            window=settings.window,
            deploy_sink=settings.deploy_sink,
            deploy_window=settings.deploy_window,
            training={"method": "rlkv", "steps": trainer.state.global_step, **_summary(config)},
        )

    extra = list(callbacks or [])
    main = args.process_index == 0
    if main:
        images = GateImages(folder, settings.image_steps, make_gates)
        extra += [images, JsonlLog(folder), StepLine()]
        if settings.wandb != "disabled":
            extra.append(WandbLog(settings.wandb, settings.wandb_project, config, folder, images))
    engine = open_engine(settings, args, longest_prompt(problems, tokenizer)) if main else None
    trainer = RLKVTrainer(model, args, settings, problems, tokenizer, reward, extra, engine)
    if start is not None:
        set_gates(trainer.model, start.alpha)
    trainer.accelerator.wait_for_everyone()  # every process has looked into the folder
    if main:
        with atomic_path(folder / RUN_CONFIG) as partial:
            partial.write_text(json.dumps(config, indent=2) + "\n")
    if checkpoint is not None and is_finished(checkpoint, args):
        trainer.restore(checkpoint)
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    gates = make_gates()
    if main:
        gates.training["final"] = gate_shares(gates.alpha)
        export_run(folder, gates, read_log(folder / LOG), config)
    trainer.accelerator.wait_for_everyone()
    return gates


def _summary(config: dict[str, Any]) -> dict[str, Any]:
    """What a gates file says of its training: no paths of this machine."""
    private = {"curriculum", "output_dir", "run_name", "model", "wandb", "wandb_project", "resume", "rollout_url"}
    return {key: value for key, value in config.items() if key not in private}
