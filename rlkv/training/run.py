"""One training run from its configuration to its export: problems, model, trainer, resume."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from rlkv.data.deepscaler import read_curriculum
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import TINY
from rlkv.models.loading import load_model, resolve_dtype
from rlkv.models.prompts import build_messages, choose_template
from rlkv.rollout.estimate import free_memory
from rlkv.tiny.task import MAX_DEFINITIONS, MIN_DEFINITIONS, longest_solution, problems
from rlkv.training.callbacks import StepLine
from rlkv.training.checkpoints import load_tensors
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.early_stop import StopWhenStable
from rlkv.training.head_gate import set_gates
from rlkv.training.plan import make_plan
from rlkv.training.resumable import GATE_MEAN, STABLE
from rlkv.training.rollout import open_engine
from rlkv.training.run_folder import RunFolder
from rlkv.training.trainer import Reward, RLKVTrainer, verifier_reward
from rlkv.utils.provenance import digest

_TRAINING_KEYS = [
    *["output_dir", "run_name", "seed", "max_steps", "num_train_epochs", "prompts_per_step", "num_generations"],
    *["temperature", "top_p", "top_k", "max_completion_length", "learning_rate", "lr_scheduler_type", "weight_decay"],
    *["adam_beta1", "adam_beta2", "max_grad_norm", "recipe", "epsilon", "importance_cap", "num_iterations"],
    *["steps_per_generation", "generation_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"],
    *["save_steps", "save_total_limit"],
]
DRAWN = 200  # problems of the built-in task; as many as configs/filter_tiny.yaml selects
CURVES = (
    ("reward/mean", "mean reward"),
    ("gates/mean", "mean gate"),
    ("gates/below_0.5", "gates below 0.5"),
    ("reward/zero_spread_share", "groups without spread"),
)


def load_curriculum(settings: RLKVSettings, args: GateTrainingArguments) -> Dataset:
    """Columns ``prompt`` (messages) and ``answer``: a curriculum file, or new problems of the built-in model's task.

    Raises:
        ValueError: if there is no curriculum, and as :func:`rlkv.data.deepscaler.read_curriculum`.
    """
    if settings.curriculum is not None:
        rows = read_curriculum(settings.curriculum)
    elif settings.model != TINY:
        raise ValueError(
            f"no problems to train on: pass --curriculum FILE, which `rlkv-filter --model {settings.model}` writes"
        )
    else:
        room = args.max_completion_length or 0
        fitting = [n for n in range(MIN_DEFINITIONS, MAX_DEFINITIONS + 1) if longest_solution(n) <= room]
        longest = max(fitting, default=MIN_DEFINITIONS)
        rows = problems(max(DRAWN, args.prompts_per_rollout), args.seed, max_definitions=longest)
        if args.process_index == 0:
            print(
                f"no --curriculum: training on {len(rows)} problems of the built-in task, of up to {longest} "
                f"definitions, drawn with seed {args.seed}",
                flush=True,
            )
    template = choose_template(settings.template, model=settings.model)
    return Dataset.from_list(
        [{"prompt": build_messages(row["problem"], template), "answer": str(row["answer"])} for row in rows]
    )


def longest_prompt(curriculum: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    prompts: Any = tokenizer.apply_chat_template(list(curriculum["prompt"]), add_generation_prompt=True)
    return max(map(len, prompts["input_ids"]))


def run_config(
    settings: RLKVSettings, args: GateTrainingArguments, curriculum: Dataset, start: HeadGates | None
) -> dict[str, Any]:
    """The settings that define a run, JSON-able, with digests of the problems and of the gates at the start."""
    training = {key: getattr(args, key) for key in _TRAINING_KEYS}
    found = {**asdict(settings), **training, "processes": args.world_size, "problems": digest(curriculum.to_list())}
    if start is not None:
        values = digest(start.alpha.numpy().tobytes())
        found["init_gates"] = {"digest": values, **{key: start.training.get(key) for key in ("method", "steps")}}
    return json.loads(json.dumps(found, default=str))


def is_finished(checkpoint: Path, args: GateTrainingArguments, stop: StopWhenStable | None) -> bool:
    """Whether the checkpoint is the end of its run and no more steps are asked for now."""
    if stop is not None:
        stop.load(load_tensors(checkpoint / GATE_MEAN).get(STABLE, {}))
        if stop.ended:
            return True
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return state.global_step >= max(args.max_steps, state.max_steps if args.max_steps <= 0 else 0)


def train_gates(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward: Reward = verifier_reward,
    callbacks: list[TrainerCallback] | None = None,
) -> HeadGates:
    """Start or resume the training run in ``args.output_dir``, and export it there.

    Args:
        model, tokenizer: instead of the ones that ``settings.model`` names.
        callbacks: run on every process, in addition to the loggers of the main one.

    Raises:
        ValueError: for data, a model or a folder that do not fit.
    """
    settings = make_plan(settings.with_curriculum(), args, free_memory(args.device)).announced()
    curriculum = load_curriculum(settings, args)
    start = None if settings.init_gates is None else HeadGates.load(settings.init_gates)
    config = run_config(settings, args, curriculum, start)
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    if model is None or tokenizer is None:
        dtype = str(resolve_dtype(settings.dtype, args.device)).removeprefix("torch.")
        model, tokenizer = load_model(settings.model, dtype=dtype, device="cpu")  # the trainer moves it
    if start is not None:
        start.check_model(model.config)

    def make_gates() -> HeadGates:
        return run.gates(trainer.model, trainer.gate_mean.mean(), "rlkv", trainer.state.global_step)

    main = args.process_index == 0
    stop = None
    if settings.target_sparsity:
        stop = StopWhenStable(make_gates, settings.target_sparsity, settings.stable_steps)
    loggers = [*run.loggers(make_gates), StepLine()] if main else []
    extra = [*(callbacks or []), *([] if stop is None else [stop]), *loggers]
    engine = open_engine(settings, args, longest_prompt(curriculum, tokenizer)) if main else None
    trainer = RLKVTrainer(model, args, settings, curriculum, tokenizer, reward, extra, engine)
    if start is not None:
        set_gates(trainer.model, start.alpha)
    trainer.accelerator.wait_for_everyone()  # every process has looked into the folder
    if main:
        run.write_config()
    if run.checkpoint is not None and is_finished(run.checkpoint, args, stop):
        trainer.restore(run.checkpoint)
    else:
        trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    gates = make_gates()
    if main:
        run.export(gates, CURVES)
    trainer.accelerator.wait_for_everyone()
    return gates
