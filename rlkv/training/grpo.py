"""One training run from its configuration to its export: problems, model, trainer, resume."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from rlkv.attention.head_gate import set_gates
from rlkv.data.problems import read_curriculum
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import BUILT_IN, TINY
from rlkv.models.loading import dtype_name, load_model, load_tokenizer
from rlkv.models.prompts import build_messages, choose_template
from rlkv.rollout.footprint import card_of, free_memory
from rlkv.tiny import MAX_DEFINITIONS, MIN_DEFINITIONS, longest_solution, problems
from rlkv.training.callbacks import HeldOut, StepLine, StopWhenStable, hold_out
from rlkv.training.config import GateTrainingArguments, RLKVSettings, option_names
from rlkv.training.plan import PROMPT_TOKENS, Machine, make_plan
from rlkv.training.run_folder import RunFolder, load_tensors
from rlkv.training.sharding import load_as, not_loading
from rlkv.training.trainer import (
    GATE_MEAN,
    STABLE,
    Reward,
    RLKVTrainer,
    open_engine,
    verifier_reward,
)
from rlkv.utils.runtime import digest, require


def apply_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Replace these parts of ``model``, which is not yet wrapped.

    ``device`` is where it will be trained.

    Rotary embeddings are replaced for all models of this family in the process.  Not run on a GPU
    yet.

    Raises:
        ValueError: without a GPU, without the package ``liger-kernel``, or for a family that it
            does not know.
    """
    if device.type != "cuda":
        raise ValueError(
            f"liger_kernels needs a CUDA GPU, and this runs on {device.type}: leave it out"
        )
    liger = require("liger_kernel.transformers.monkey_patch", "liger")
    family = model.config.model_type
    if family not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"liger-kernel has no kernels for models of type {family}: leave liger_kernels out"
        )
    # its losses would replace the output head, which the objective calls itself
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model, rope=True, rms_norm=True, swiglu=True, **losses)


DRAWN = 200  # problems of the built-in task; as many as configs/filter_tiny.yaml selects


def load_curriculum(settings: RLKVSettings, args: GateTrainingArguments) -> Dataset:
    """Columns ``prompt`` (messages) and ``answer``: a curriculum file, or new problems of the
    built-in model's task.

    Raises:
        ValueError: if there is no curriculum, and as :func:`rlkv.data.problems.read_curriculum`.
    """
    if settings.curriculum is not None:
        rows = read_curriculum(settings.curriculum)
    elif settings.model != TINY:
        raise ValueError(
            "no problems to train on: pass --curriculum FILE, which `rlkv-filter --model "
            f"{settings.model}` writes"
        )
    else:
        room = args.max_completion_length or 0
        fitting = [
            n for n in range(MIN_DEFINITIONS, MAX_DEFINITIONS + 1) if longest_solution(n) <= room
        ]
        longest = max(fitting, default=MIN_DEFINITIONS)
        number = max(DRAWN, args.prompts_per_rollout) + settings.held_out
        rows = problems(number, args.seed, max_definitions=longest)
        if args.process_index == 0:
            print(
                f"no --curriculum: training on {len(rows) - settings.held_out} problems of the "
                "built-in task, of up to "
                f"{longest} definitions, drawn with seed {args.seed}",
                flush=True,
            )
    template = choose_template(settings.template, model=settings.model)
    return Dataset.from_list(
        [
            {"prompt": build_messages(row["problem"], template), "answer": str(row["answer"])}
            for row in rows
        ]
    )


def longest_prompt(curriculum: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    prompts: Any = tokenizer.apply_chat_template(
        list(curriculum["prompt"]), add_generation_prompt=True
    )
    return max(map(len, prompts["input_ids"]))


def prompt_tokens(settings: RLKVSettings, args: GateTrainingArguments) -> int:
    """Return the tokens of the longest prompt, or an assumption where tokenizer or problems are not
    at hand.
    """
    if settings.model not in BUILT_IN:
        return PROMPT_TOKENS
    try:
        return longest_prompt(load_curriculum(settings, args), load_tokenizer(settings.model))
    except ValueError:  # no curriculum yet
        return PROMPT_TOKENS


CURVES = (
    ("reward/mean", "mean reward"),
    ("gates/mean", "mean gate"),
    ("gates/below_0.5", "gates below 0.5"),
    ("reward/zero_spread_share", "groups without spread"),
)


def least_free_memory(args: GateTrainingArguments) -> int | None:
    """Free bytes of the fullest GPU, as all processes must choose the same engine.

    None on a CPU.
    """
    free = free_memory(args.device)
    if free is None or args.world_size == 1:
        return free
    return min(gather_object([free]))


def run_config(
    settings: RLKVSettings,
    args: GateTrainingArguments,
    curriculum: Dataset,
    start: HeadGates | None,
) -> dict[str, Any]:
    """The settings that define a run, JSON-able, with digests of the problems and of the gates at
    the start.
    """
    noted = option_names(GateTrainingArguments, resume=True)
    noted |= option_names(GateTrainingArguments, resume=False)
    training = {key: getattr(args, key) for key in sorted(noted)}
    found = {
        **asdict(settings),
        **training,
        "processes": args.world_size,
        "problems": digest(curriculum.to_list()),
    }
    found["dtype"] = dtype_name(settings.dtype, args.device)  # what auto and fast are here
    if start is not None:
        values = digest(start.alpha.numpy().tobytes())
        found["init_gates"] = {
            "digest": values,
            **{key: start.training.get(key) for key in ("method", "steps")},
        }
    return json.loads(json.dumps(found, default=str))


def is_finished(checkpoint: Path, trainer: RLKVTrainer, stop: StopWhenStable | None) -> bool:
    """Whether the checkpoint is the end of its run, and ``trainer`` is not asked for more steps
    now.
    """
    if stop is not None:
        stop.load(load_tensors(checkpoint / GATE_MEAN)[STABLE])
        if stop.ended:
            return True
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return state.global_step >= steps


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
    if settings.finder != "rlkv":
        raise ValueError(
            f"train_gates is GRPO: set finder to rlkv, not {settings.finder} (which is "
            "eliminate_heads)"
        )
    with not_loading():
        machine = Machine(args.world_size, card_of(args.device), least_free_memory(args))
        plan = make_plan(settings.with_curriculum(), args, machine)
        settings = plan.announced()
    curriculum = load_curriculum(settings, args)
    start = None if settings.init_gates is None else HeadGates.load(settings.init_gates)
    taught, held_out = hold_out(curriculum, settings.held_out, args)
    config = run_config(settings, args, taught, start)
    run = RunFolder(Path(args.output_dir or "outputs/gates"), settings, config)
    if model is None or tokenizer is None:
        dtype = dtype_name(settings.dtype, args.device)
        load_as(dtype)
        model, tokenizer = load_model(
            settings.model, dtype=dtype, device="cpu"
        )  # the trainer moves it
    if settings.liger_kernels:
        apply_liger(model, args.device)
    if start is not None:
        start.check_model(model.config)

    def make_gates() -> HeadGates:
        return run.gates(trainer.model, trainer.gate_mean.mean(), "rlkv", trainer.state.global_step)

    main = args.process_index == 0
    stop = None
    if settings.target_sparsity and settings.stable_steps:
        stop = StopWhenStable(make_gates, settings.target_sparsity, settings.stable_steps)
    measured = (
        []
        if held_out is None
        else [HeldOut(held_out, tokenizer, settings, make_gates, lambda: trainer)]
    )
    loggers: list[TrainerCallback] = []
    if main:
        logs = run.loggers(make_gates, lambda: trainer.samples, settings.sample_steps)
        loggers = [*logs, StepLine()]
    extra = [*(callbacks or []), *([] if stop is None else [stop]), *measured, *loggers]
    with open_engine(settings, args, longest_prompt(curriculum, tokenizer)) as engine:
        trainer = RLKVTrainer(model, args, settings, taught, tokenizer, reward, extra, engine)
        if start is not None:
            set_gates(trainer.model, start.alpha)
        trainer.accelerator.wait_for_everyone()  # every process has looked into the folder
        if main:
            run.write_config()
        trainer.accelerator.wait_for_everyone()
        run.check_shared()
        if run.checkpoint is not None and is_finished(run.checkpoint, trainer, stop):
            trainer.restore(run.checkpoint)
        else:
            trainer.train(
                resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint)
            )
    gates = make_gates()
    if main:
        run.export(gates, CURVES)
    trainer.accelerator.wait_for_everyone()
    return gates
