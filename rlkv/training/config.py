"""Configuration of gate training: YAML, overridden by the command line; an unknown key is an error that names it.

Two dataclasses share one flat file: :class:`RLKVSettings` (what this project adds) and :class:`GateTrainingArguments`
(trl's GRPOConfig, with the paper's optimizer as defaults).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import yaml
from trl import GRPOConfig, TrlParser

from rlkv.training.objective import NORMALIZATIONS

ROLLOUTS = ("hf", "vllm", "vllm-server")
WANDB_MODES = ("online", "offline", "disabled")
_SAMPLING = "rollouts know temperature, top_p and top_k"
_OBJECTIVE = "the loss is the paper's objective"
# options of trl that would be ignored or do harm: names, the only value, why
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("beta", 0.0, "gate training has no KL term (the L1 weight is l1_beta)"),
    ("loss_type", "grpo", _OBJECTIVE),
    ("importance_sampling_level", "token", _OBJECTIVE),
    ("top_entropy_quantile", 1.0, _OBJECTIVE),
    ("entropy_coef", 0.0, _OBJECTIVE),
    ("use_adaptive_entropy sync_ref_model use_liger_kernel", False, _OBJECTIVE),
    ("delta off_policy_mask_threshold reward_weights", None, _OBJECTIVE),
    ("epsilon_high", None, "clipping is symmetric: set epsilon"),
    ("scale_rewards", "group", "set advantage: group or batch instead"),
    ("mask_truncated_completions", False, "truncated completions count, with the reward that they got"),
    ("logging_steps", 1, "the log has one record per step"),
    ("log_completions", False, "the log holds figures only"),
    ("eval_strategy", "no", "evaluate the exported gates with the programs in inference/"),
    ("use_transformers_continuous_batching", False, "continuous batching bypasses the gates"),
    ("use_vllm", False, "trl's own rollouts of vLLM would not see the gates: set rollout to vllm or vllm-server"),
    ("cache_implementation", None, "static caches do not work with gates"),
    ("min_p generation_kwargs pad_to_multiple_of", None, _SAMPLING),
    ("repetition_penalty", 1.0, _SAMPLING),
)


@dataclass
class RLKVSettings:
    """Model, data, gates and penalty."""

    model: str = field(default="tiny", metadata={"help": "'tiny' (built in), a local folder or a hub id"})
    dtype: str = field(default="auto", metadata={"help": "dtype of the frozen model: auto, float32, bfloat16, float16"})
    curriculum: str | None = field(
        default=None, metadata={"help": "problems to train on: the filter's .parquet or .jsonl (problem, answer)"}
    )
    template: str = field(default="rlkv", metadata={"help": "prompt template, a name in rlkv.models.prompts"})
    sink: int = field(default=128, metadata={"help": "S: first tokens that the local branch sees"})
    window: int = field(default=256, metadata={"help": "W: last tokens that the local branch sees"})
    deploy_sink: int = field(default=16, metadata={"help": "sink size recommended for serving, kept in the gates file"})
    deploy_window: int = field(default=64, metadata={"help": "window recommended for serving, kept in the gates file"})
    init_value: float = field(default=1.0, metadata={"help": "where every gate starts"})
    init_gates: str | None = field(
        default=None, metadata={"help": "gates file to start from, instead of init_value for every gate"}
    )
    l1_beta: float = field(default=1e-3, metadata={"help": "beta of the L1 penalty (not trl's beta, which is KL)"})
    tau: float = field(default=0.5, metadata={"help": "mean reward of a group above which the penalty acts"})
    adaptive: bool = field(
        default=True,
        metadata={"help": "weigh the penalty by the group's mean reward; false: l1_beta * (e - 1) whatever the reward"},
    )
    advantage: str = field(default="group", metadata={"help": "normalise advantages over the group or the batch"})
    reward_offset: float = field(default=0.0, metadata={"help": "the policy loss sees (reward - offset) * scale"})
    reward_scale: float = field(default=1.0, metadata={"help": "the policy loss sees (reward - offset) * scale"})
    rollout: str = field(
        default="hf",
        metadata={"help": "who samples: hf (the trainer's model), vllm (in this process) or vllm-server (another GPU)"},
    )
    rollout_url: str = field(
        default="http://127.0.0.1:8700", metadata={"help": "vllm-server: where rollout/serve_vllm.py listens"}
    )
    rollout_patience: float = field(
        default=600.0, metadata={"help": "vllm-server: seconds without an answer before the training gives up"}
    )
    rollout_kv_gib: float = field(default=4.0, metadata={"help": "vllm: memory of its KV cache in GiB"})
    rollout_eager: bool = field(default=False, metadata={"help": "vllm: neither compile the model nor capture graphs"})
    importance_cap: float = field(
        default=3.0,
        metadata={
            "help": "vllm, vllm-server: largest weight of a token in the importance correction, 0: no correction"
        },
    )
    rollout_rows: int = field(default=64, metadata={"help": "completions decoded at once by one process"})
    forward_rows: int = field(default=16, metadata={"help": "rows per forward of the loss (one process only)"})
    image_steps: int = field(default=20, metadata={"help": "a heat map and a histogram every so many steps, 0: never"})
    wandb: str = field(default="disabled", metadata={"help": "online, offline or disabled"})
    wandb_project: str = field(default="rlkv", metadata={"help": "W&B project"})
    resume: bool = field(default=True, metadata={"help": "go on from the last checkpoint in output_dir"})

    def __post_init__(self) -> None:
        if self.advantage not in NORMALIZATIONS:
            raise ValueError(f"advantage must be {' or '.join(NORMALIZATIONS)}, got {self.advantage!r}")
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"wandb must be one of {', '.join(WANDB_MODES)}, got {self.wandb!r}")
        if self.l1_beta < 0:
            raise ValueError(f"l1_beta must be 0 or more, got {self.l1_beta}")
        if self.init_gates is not None and self.init_value != 1.0:
            raise ValueError(f"init_gates and init_value={self.init_value} exclude each other: give one of them")
        if self.rollout not in ROLLOUTS:
            raise ValueError(f"rollout must be one of {', '.join(ROLLOUTS)}, got {self.rollout!r}")
        if self.importance_cap != 0 and self.importance_cap < 1:
            raise ValueError(f"importance_cap must be 0 (no correction) or at least 1, got {self.importance_cap}")
        if min(self.rollout_rows, self.forward_rows) < 1:
            raise ValueError("rollout_rows and forward_rows must be at least 1")


@dataclass
class GateTrainingArguments(GRPOConfig):
    """trl's GRPOConfig with the paper's defaults (arXiv 2510.08525): AdamW, constant lr 0.01, no KL, GRPO loss."""

    output_dir: str | None = field(default="outputs/gates", metadata={"help": "log, checkpoints and exported gates"})
    prompts_per_step: int | None = field(
        default=None,
        metadata={"help": "prompts of one optimizer step over all processes; sets gradient_accumulation_steps"},
    )
    learning_rate: float = field(default=0.01, metadata={"help": "AdamW learning rate of the gates"})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "learning rate schedule"})
    weight_decay: float = field(default=0.017, metadata={"help": "AdamW weight decay of the gates"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient clipping"})
    loss_type: str = field(default="grpo", metadata={"help": "grpo: mean over tokens, then over samples"})
    num_generations: int | None = field(default=4, metadata={"help": "samples per prompt"})
    logging_steps: float = field(default=1, metadata={"help": "the log has one record per step"})
    report_to: str | None = field(default="none", metadata={"help": "none: use the option wandb"})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "recompute activations in backward"})
    bf16: bool = field(default=False, metadata={"help": "autocast; off, as the frozen model has its dtype"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints to keep, at least 1"})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "batches are prompts as text"})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "every gate takes part in every step"}
    )
    disable_tqdm: bool | None = field(default=True, metadata={"help": "the trainer prints its own line per step"})

    def __post_init__(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.prompts_per_step is not None:
            samples, at_once = self.prompts_per_step * (self.num_generations or 0), self.per_device_train_batch_size
            if samples % (at_once * processes):
                raise ValueError(
                    f"prompts_per_step={self.prompts_per_step} x num_generations={self.num_generations} = {samples} "
                    f"samples do not split evenly over {processes} processes of per_device_train_batch_size={at_once}"
                )
            self.gradient_accumulation_steps = samples // (at_once * processes)
        super().__post_init__()
        for names, needed, why in _FIXED:
            for name in names.split():
                if getattr(self, name) != needed:
                    raise ValueError(f"{name} must be {needed}, got {getattr(self, name)!r}: {why}")
        if self.report_to and self.report_to not in ("none", ["none"]):
            raise ValueError(f"report_to must be none, got {self.report_to!r}: W&B is set by the option wandb")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}: greedy samples of a prompt are equal"
            )
        if self.save_total_limit is not None and self.save_total_limit < 1:
            raise ValueError(f"save_total_limit must be at least 1, got {self.save_total_limit}")


class _Parser(TrlParser):
    """Errors as ``ValueError`` instead of a screen of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(classes: Sequence[type], arguments: Sequence[str]) -> list[Any]:
    """One object per dataclass: ``--config FILE`` sets defaults, other ``--name value`` options override them.

    Raises:
        ValueError: for an unknown key or option, a value of the wrong type, or settings that contradict each other.
        OSError: if the file cannot be read.
    """
    parser = _Parser(cast(Any, classes), allow_abbrev=False)
    arguments = list(arguments)
    if "--config" in arguments and arguments.index("--config") == len(arguments) - 1:
        raise ValueError("--config needs a file: configs/tiny.yaml, configs/llama8b.yaml, ...")
    try:
        parsed: Any = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except yaml.YAMLError as error:
        raise ValueError(f"the config file is no valid YAML: {error}") from error
    *found, from_file, from_line = parsed
    unknown = [text.lstrip("-") for text in from_file[::2]] + [text for text in from_line if re.match("--", text)]
    unknown += [] if unknown else from_line
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}: --help lists all names")
    return found


def parse_config(arguments: Sequence[str]) -> tuple[RLKVSettings, GateTrainingArguments]:
    """Settings of ``train/grpo_gates.py``; errors as in :func:`parse`."""
    settings, training = parse((RLKVSettings, GateTrainingArguments), arguments)
    return settings, training
