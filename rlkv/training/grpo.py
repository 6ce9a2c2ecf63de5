"""One training run from its configuration to its export: problems, model, trainer, resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from rlkv.attention import LocalSizes
from rlkv.attention.head_gate import set_gates
from rlkv.data.problems import hold_out, read_curriculum
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import BUILT_IN, TINY
from rlkv.models.loading import dtype_name, files_digest, load_missing, load_tokenizer
from rlkv.models.prompts import build_messages, choose_template
from rlkv.models.shape import max_positions, rotation_change
from rlkv.rollout.base import GatedEngine
from rlkv.rollout.footprint import DEFAULT_KV_GIB, card_of, free_memory
from rlkv.tiny import MAX_DEFINITIONS, MIN_DEFINITIONS, longest_solution, problems
from rlkv.training.callbacks import HeldOut, StepLine, StopWhenStable
from rlkv.training.config import (
    DEFAULT_ROWS,
    GateTrainingArguments,
    RLKVSettings,
    option_names,
    print_unread,
    unread_options,
)
from rlkv.training.logs import RunLog
from rlkv.training.plan import PROMPT_TOKENS, Machine, make_plan
from rlkv.training.run_folder import RunFolder, refuse_retraining
from rlkv.training.sharding import load_as, not_loading
from rlkv.training.trainer import Reward, RLKVTrainer, verifier_reward
from rlkv.utils.runtime import digest, require
from rlkv.verifier import reference_answer

DRAWN = 200  # problems of the built-in task; as many as configs/filter_tiny.yaml selects
CURVES = (
    ("reward/mean", "mean reward"),
    ("gates/mean", "mean gate"),
    ("gates/below_0.5", "gates below 0.5"),
    ("reward/zero_spread_share", "groups without spread"),
)


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
    main = args.process_index == 0
    if main:
        print_unread(unread_by_grpo(settings, args))
    settings = settings.with_curriculum()
    rows, curriculum = load_curriculum(settings, args)
    with not_loading():
        machine = Machine(args.world_size, card_of(args.device), least_free_memory(args))
        plan = make_plan(settings, args, machine, rows)
    settings = plan.settings
    if main:
        print(plan.line(), flush=True)
    start = None if settings.init_gates is None else HeadGates.load(settings.init_gates)
    taught, held_out = hold_out(curriculum, settings.held_out, args)
    config = run_config(settings, args, taught, start)
    run = RunFolder(Path(str(args.output_dir)), settings, config)
    refuse_retraining(run.path)

    def make_gates() -> HeadGates:
        return run.gates(trainer.model, trainer.gate_mean.mean(), "rlkv", trainer.state.global_step)

    logs: list[TrainerCallback] = []
    if main:
        log = RunLog(run, make_gates, lambda: trainer.samples, settings.sample_steps)
        logs = [log, StepLine()]
    every = list(callbacks or [])
    if settings.target_sparsity and settings.stable_steps:
        every.append(StopWhenStable(make_gates, settings.target_sparsity, settings.stable_steps))
    if held_out is not None:
        every.append(HeldOut(held_out, settings, make_gates, lambda: trainer))
    every += logs  # last: the others add figures to the record
    dtype = dtype_name(settings.dtype, args.device)
    load_as(dtype)
    # the trainer moves it
    model, tokenizer = load_missing(settings.model, dtype, "cpu", model, tokenizer)
    if start is not None:
        start.check_model(model.config)
    longest = longest_text(model.config, prompt_lengths(curriculum, tokenizer), args)
    apply_liger = find_liger(model, args.device) if settings.liger_kernels else None
    with open_engine(settings, args, longest) as engine:
        trainer = RLKVTrainer(model, args, settings, taught, tokenizer, reward, every, engine)
        if apply_liger is not None:
            apply_liger(model)
        if start is not None:
            set_gates(trainer.model, start.alpha)
        trainer.accelerator.wait_for_everyone()  # every process has looked into the folder
        if main:
            run.write_config()
        trainer.accelerator.wait_for_everyone()
        run.check_shared()
        trainer.run(run.checkpoint)
    gates = make_gates()
    if main:
        run.export(gates, CURVES)
    trainer.accelerator.wait_for_everyone()
    return gates


def least_free_memory(args: GateTrainingArguments) -> int | None:
    """Return the free bytes of the fullest GPU, None on a CPU.

    All processes must choose the same engine.
    """
    free = free_memory(args.device)
    if free is None or args.world_size == 1:
        return free
    return min(gather_object([free]))


def load_curriculum(
    settings: RLKVSettings, args: GateTrainingArguments
) -> tuple[list[dict[str, Any]], Dataset]:
    """Load a curriculum file, or draw new problems of the built-in model's task.

    Returns:
        The rows, and of each the columns ``prompt`` (messages) and ``answer``.

    Raises:
        ValueError: if there is no curriculum, and as :func:`rlkv.data.problems.read_curriculum`.
    """
    if settings.curriculum is not None:
        rows = read_curriculum(settings.curriculum)
    elif settings.model == TINY:
        most = args.max_completion_length
        numbers = range(MIN_DEFINITIONS, MAX_DEFINITIONS + 1)
        fitting = [number for number in numbers if longest_solution(number) <= most]
        longest = max(fitting, default=MIN_DEFINITIONS)
        taught = max(DRAWN, args.prompts_per_rollout)
        if args.process_index == 0:
            print(
                f"no --curriculum: training on {taught} problems of the built-in task, of up to "
                f"{longest} definitions, drawn with seed {args.seed}",
                flush=True,
            )
        rows = problems(taught + settings.held_out, args.seed, max_definitions=longest)
    else:
        raise ValueError(
            "no problems to train on: pass --curriculum FILE, which `rlkv-filter --model "
            f"{settings.model}` writes"
        )
    template = choose_template(settings.template, model=settings.model)
    found = []
    for number, row in enumerate(rows, start=1):
        if not reference_answer(row["answer"]):
            raise ValueError(
                f"{settings.curriculum}: row {number} has no answer, so that nothing would be "
                "right: leave it out"
            )
        prompt = build_messages(row["problem"], template)
        found.append({"prompt": prompt, "answer": row["answer"]})
    return rows, Dataset.from_list(found)


def unread_by_grpo(settings: RLKVSettings, args: GateTrainingArguments) -> dict[str, str]:
    """Return options that were set and have no effect, with what they would have one with."""
    found = unread_options(settings)
    ends_early = settings.stable_steps not in (0, RLKVSettings.stable_steps)
    if ends_early and settings.target_sparsity is None:
        found["stable_steps"] = "--target-sparsity"
    if settings.rollout == "hf" and "importance_cap" in args.given:
        found["importance_cap"] = "--rollout vllm: the trainer's own samples are not weighed"
    if args.lr_scheduler_type == "constant":
        for name in ("warmup_steps", "lr_scheduler_kwargs"):
            if getattr(args, name):
                found[name] = "--lr-scheduler-type, such as constant_with_warmup"
    return found


def longest_text(config: Any, prompts: list[int], args: GateTrainingArguments) -> int:
    """Return the most tokens of a text, given the lengths of the prompts.

    Raises:
        ValueError: if the model has fewer positions, or changes its frequencies in between.
    """
    longest = max(prompts) + args.max_completion_length
    shorter = "lower --max-completion-length or leave out problems with long prompts"
    if change := rotation_change(config, min(prompts), longest):
        raise ValueError(f"{change.said}, which rollouts and updates read in two ways: {shorter}")
    most = max_positions(config)
    if longest > most:
        raise ValueError(
            f"the longest prompt and max_completion_length={args.max_completion_length} are "
            f"{longest} tokens, the model has {most} positions: {shorter}"
        )
    return longest


def prompt_lengths(curriculum: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of each prompt.

    Raises:
        ValueError: for a tokenizer without a chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, by which GRPO writes "
            "its prompts: put one into its folder as chat_template.jinja, or take --finder "
            "elimination or attention, which do without"
        )
    prompts: Any = tokenizer.apply_chat_template(
        list(curriculum["prompt"]), add_generation_prompt=True
    )
    return [len(ids) for ids in prompts["input_ids"]]


def prompt_tokens(settings: RLKVSettings, args: GateTrainingArguments) -> int:
    """Return the tokens of the longest prompt, assumed where tokenizer or problems are missing."""
    if settings.model not in BUILT_IN:
        return PROMPT_TOKENS
    try:
        curriculum = load_curriculum(settings, args)[1]
        return max(prompt_lengths(curriculum, load_tokenizer(settings.model)))
    except ValueError:  # no curriculum yet
        return PROMPT_TOKENS


def run_config(
    settings: RLKVSettings, args: GateTrainingArguments, taught: Dataset, start: HeadGates | None
) -> dict[str, Any]:
    """Return the settings that define a run, JSON-able.

    Problems and gates at the start count by their digests, wherever their files are.
    """
    unread = option_names(RLKVSettings, group="elimination")
    config = {name: value for name, value in asdict(settings).items() if name not in unread}
    config |= args.noted()
    config["processes"] = args.world_size
    config["problems"] = digest(taught.to_list())
    config["dtype"] = dtype_name(settings.dtype, args.device)  # what auto and fast are here
    if start is not None:
        config["init_gates"] = {
            "digest": digest(start.alpha.numpy().tobytes()),
            "method": start.training.get("method"),
            "steps": start.training.get("steps"),
        }
    return json.loads(json.dumps(config, default=str))


@contextmanager
def open_engine(
    settings: RLKVSettings, args: GateTrainingArguments, positions: int
) -> Iterator[GatedEngine | None]:
    """Open what samples instead of the trainer's own model: an engine, or a client of servers.

    Of servers only the main process has a client.  At the end an engine gives its memory back,
    unless the trainer has a process group.

    Raises:
        ValueError: if the engine is not installed, a server cannot be reached, or it does not fit
            the settings.
    """
    if settings.rollout == "hf" or (settings.rollout == "vllm-server" and args.process_index > 0):
        yield None
        return
    sizes = LocalSizes(settings.sink, settings.window)
    if settings.rollout == "vllm-server":
        from rlkv.rollout.remote import RolloutClient

        client = RolloutClient(settings.servers, settings.rollout_patience)
        client.check(sizes, positions, files_digest(settings.model))
        yield client
        return
    from rlkv.vllm.engine import VLLMEngine

    # vLLM ends any process group with its own: also the trainer's, which it then uses too
    alone = not torch.distributed.is_initialized()
    engine = VLLMEngine(
        settings.model,
        sizes,
        settings.dtype,
        max_positions=positions,
        kv_gib=settings.rollout_kv_gib or DEFAULT_KV_GIB,
        max_rows=settings.rollout_rows or DEFAULT_ROWS,
        enforce_eager=settings.rollout_eager,
    )
    with closing(engine) if alone else nullcontext():
        yield engine


def find_liger(model: PreTrainedModel, device: torch.device) -> Callable[[PreTrainedModel], None]:
    """Return what replaces layers of ``model`` by Liger's kernels.

    It is to be called when the model has its gates, which try a forward call where the weights were
    loaded: on a CPU, where these kernels do not run.  Rotary embeddings are replaced for all models
    of this family in the process.  On a GPU the logits of a tiny model have been compared; no
    training has run with them.

    Args:
        device: where the model will be trained.

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
    return partial(
        liger._apply_liger_kernel_to_instance, rope=True, rms_norm=True, swiglu=True, **losses
    )
