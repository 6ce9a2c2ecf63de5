"""Options of ``rlkv-train``: our own, and trl's GRPOConfig with the paper's defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import torch
from trl import GRPOConfig, TrlParser

from rlkv.data.curriculum import curriculum_folder
from rlkv.data.problems import curriculum_template, other_models
from rlkv.models.prompts import choose_template
from rlkv.training.objective import RECIPES
from rlkv.utils.configs import read_config, take_config


def option(default: Any, text: str) -> Any:
    """A field with its text for ``--help``."""
    return field(default=default, metadata={"help": text})


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def passes(prompts: int, group: int, at_once: int) -> int:
    """The fewest forward passes of ``at_once`` samples for ``prompts`` groups.

    Trl wants them to hold whole groups.
    """
    fewest = -(-prompts * group // at_once)
    return next(number for number in range(fewest, fewest + group) if number * at_once % group == 0)


@dataclass
class RunSettings:
    """Model, data and logging."""

    model: str = option("tiny", "a built-in name (tiny, smol), a local folder or a hub id")
    dtype: str = option("auto", "dtype of the frozen model: auto, fast, float32, bfloat16, float16")
    curriculum: str | None = option(
        None, "the filter's .parquet or .jsonl (problem, answer, output)"
    )
    allow_foreign_curriculum: bool = option(False, "train on a curriculum that another model wrote")
    template: str | None = option(
        None, "prompt template: rlkv, boxed or plain; default: the curriculum's, else the model's"
    )
    sink: int = option(128, "S: first tokens that the local branch sees")
    window: int = option(256, "W: last tokens that the local branch sees")
    deploy_sink: int = option(16, "sink size recommended for serving, kept in the gates file")
    deploy_window: int = option(64, "window recommended for serving, kept in the gates file")
    image_steps: int = option(20, "heat map and histogram: steps between plots, 0: none")
    wandb: str = option("disabled", "online, offline or disabled")
    wandb_project: str = option("rlkv", "W&B project")
    resume: bool = option(True, "resume from the last checkpoint in output_dir")
    gates_link: str | None = option(
        None, "a link to the exported gates.pt, made at the end; a file there stays"
    )

    def __post_init__(self) -> None:
        check_choice("wandb", self.wandb, ("online", "offline", "disabled"))
        if self.image_steps < 0:
            raise ValueError(f"image_steps must be 0 or more, got {self.image_steps}")

    def filter_command(self) -> str:
        """What writes the curriculum."""
        folder = Path(self.curriculum or "").parent
        elsewhere = "" if folder == curriculum_folder(self.model) else f" --output-dir {folder}"
        return f"rlkv-filter --model {self.model}{elsewhere}"

    def with_curriculum(self) -> Self:
        """With the curriculum's prompt template where none was asked for.

        Raises:
            ValueError: if the curriculum is absent or unreadable, or another model wrote it, which
                was not allowed.
        """
        if self.curriculum is not None:
            if not Path(self.curriculum).exists():
                raise ValueError(
                    f"{self.curriculum}: there is no such file; `{self.filter_command()}` writes a "
                    "curriculum"
                )
            foreign = (
                [] if self.allow_foreign_curriculum else other_models(self.curriculum, self.model)
            )
            if foreign:
                raise ValueError(
                    f"{self.curriculum} holds what {', '.join(foreign)} solved, not {self.model}: "
                    "make its own with "
                    f"`rlkv-filter --model {self.model}`, or pass --allow_foreign_curriculum true"
                )
        named = self.template, curriculum_template(self.curriculum)
        return replace(self, template=choose_template(*named, model=self.model))


class _Parser(TrlParser):
    """Errors as ``ValueError`` instead of a screen of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(classes: Sequence[type], arguments: Sequence[str]) -> list[Any]:
    """One object per dataclass:

    ``--config NAME|FILE`` sets defaults, other ``--name value`` options override them.

    Raises:
        ValueError: for an unknown key or option, a value of the wrong type, or settings that
            contradict each other.
        OSError: if the file cannot be read.
    """
    parser = _Parser(cast(Any, classes), allow_abbrev=False)
    file, arguments = take_config(arguments, *classes)
    from_file = [] if file is None else parser.set_defaults_with_config(**read_config(file))
    parsed: Any = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    *found, from_line = parsed
    unknown = [text.lstrip("-") for text in from_file[::2]] + [
        text for text in from_line if re.match("--", text)
    ]
    unknown += [] if unknown else from_line
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}: --help lists all names")
    return found


TRUSTED_SPARSITY = 0.4  # up to which a distillation orders the heads of an elimination
LEAST_STEPS = 8  # of that distillation: gates move by at most 0.25 a step
DEFAULT_ROWS = 64  # of a rollout, where no GPU says what fits
_SAMPLING = "rollouts know temperature, top_p and top_k"
_OBJECTIVE = "the loss is that of the option recipe"
# options of trl that would be ignored or do harm: names, the only allowed value, why
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("beta", 0.0, "gate training has no KL term (the L1 weight is l1_beta)"),
    ("loss_type", "grpo", _OBJECTIVE),
    ("importance_sampling_level", "token", _OBJECTIVE),
    ("top_entropy_quantile", 1.0, _OBJECTIVE),
    ("entropy_coef", 0.0, _OBJECTIVE),
    ("use_adaptive_entropy sync_ref_model", False, _OBJECTIVE),
    (
        "use_liger_kernel",
        False,
        f"{_OBJECTIVE}; for kernels of the frozen layers set liger_kernels",
    ),
    ("delta off_policy_mask_threshold reward_weights", None, _OBJECTIVE),
    ("epsilon_high", None, "clipping is symmetric: set epsilon"),
    ("scale_rewards", "group", "advantages are those of the option recipe"),
    (
        "mask_truncated_completions",
        False,
        "truncated completions count, with the reward that they got",
    ),
    ("logging_steps", 1, "the log has one record per step"),
    ("log_completions", False, "the log holds figures only"),
    ("eval_strategy", "no", "evaluate the exported gates with the programs in inference/"),
    ("use_transformers_continuous_batching", False, "continuous batching bypasses the gates"),
    (
        "use_vllm",
        False,
        "trl's own rollouts of vLLM would not see the gates: set rollout to vllm or vllm-server",
    ),
    ("chat_template_kwargs", None, "prompts are rendered by the option template alone"),
    ("cache_implementation", None, "static caches do not work with gates"),
    (
        "fsdp",
        None,
        "FSDP2 is set by the launcher: accelerate launch --config_file "
        "configs/accelerate/fsdp2.yaml",
    ),
    ("min_p generation_kwargs pad_to_multiple_of", None, _SAMPLING),
    ("repetition_penalty", 1.0, _SAMPLING),
)


@dataclass
class RLKVSettings(RunSettings):
    """Gates, penalty and rollouts."""

    finder: str = option(
        "elimination",
        "elimination: a short distillation, then heads go one by one, each time the one that the "
        "curriculum's recorded "
        "solutions need least; rlkv: GRPO with the adaptive penalty, which all packaged configs "
        "name",
    )
    init_value: float = option(1.0, "where every gate starts")
    init_gates: str | None = option(
        None, "gates file to start from, instead of init_value for every gate"
    )
    l1_beta: float = option(1e-3, "beta of the L1 penalty (not trl's beta, which is KL)")
    tau: float = option(0.5, "mean reward above which the penalty acts")
    adaptive: bool = option(
        True,
        "weight the penalty by the mean reward (see recipe); false: l1_beta * (e - 1) whatever the "
        "reward",
    )
    rollout: str = option(
        "hf",
        "which engine samples: hf (the trainer's model), vllm (in each training process), "
        "vllm-server (other GPUs), or "
        "auto: vllm where it is installed and fits, else hf",
    )
    rollout_servers: str = option(
        "http://127.0.0.1:8700",
        "vllm-server: where rollout/serve_vllm.py listens; several with commas",
    )
    rollout_patience: float = option(
        600.0, "vllm-server: seconds without an answer before the training gives up"
    )
    rollout_kv_gib: float | None = option(
        None, "vllm: memory of its KV cache in GiB; default: what the GPU has left, without one 4"
    )
    rollout_eager: bool = option(False, "vllm: neither compile the model nor capture graphs")
    rollout_rows: int | None = option(
        None,
        "completions decoded at once by one process; default: what the GPU holds, without one 64",
    )
    target_sparsity: list[float] | None = option(  # noqa: RUF009  (as all fields here, but a list)
        None,
        "stop early, when the full heads at these sparsities have stayed the same for stable_steps "
        "steps",
    )
    stable_steps: int = option(15, "target_sparsity: steps without a change, 0: never stop early")
    held_out: int = option(
        0,
        "problems that are not trained on; greedy accuracy on them with hard masks at each "
        "target_sparsity",
    )
    held_out_steps: int = option(
        20, "held_out: steps between measurements; the last step has one too"
    )
    sample_steps: int = option(
        20, "sampled texts with their verdict: steps between those in samples.jsonl, 0: none"
    )
    plan: bool = option(
        False, "print steps, tokens, engine, memory and an estimate of the time, and stop"
    )
    plan_gpus: str | None = option(
        None, "plan: GPUs to plan for, such as 8xh100; default: what is here"
    )
    forward_rows: int = option(16, "rows per forward of the loss (one process only)")
    liger_kernels: bool = option(
        False,
        "Liger's RMSNorm, rotary and SwiGLU kernels in the frozen layers; needs a GPU and "
        "rlkv[liger]",
    )
    elimination_distillation: int = option(
        40,
        "elimination: steps of distillation before: they order four tenths of the heads, those "
        "needed least, and the "
        "order of the others is the mean of both, unless other solutions speak against it; 0: "
        "measurements alone",
    )
    elimination_traces: int = option(32, "elimination: solutions that heads are measured on")
    elimination_sparsity: float = option(0.7, "elimination: sparsity up to which heads go")
    elimination_prefill: str = option(
        "full",
        "elimination: how prompts are read where the heads will serve: full, as by rlkv-infer and "
        "rlkv.compress, or "
        "local, as by the vLLM plugin unless told otherwise",
    )
    elimination_budget: float = option(
        3.0, "elimination: most forwards of those solutions, per head of the model"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("finder", self.finder, ("rlkv", "elimination"))
        check_choice("elimination_prefill", self.elimination_prefill, ("full", "local"))
        check_choice("rollout", self.rollout, ("auto", "hf", "vllm", "vllm-server"))
        if self.l1_beta < 0:
            raise ValueError(f"l1_beta must be 0 or more, got {self.l1_beta}")
        if self.elimination_distillation < 0 or 0 < self.elimination_distillation < LEAST_STEPS:
            raise ValueError(
                f"elimination_distillation must be 0 or at least {LEAST_STEPS}, got "
                f"{self.elimination_distillation}"
            )
        if self.init_gates is not None and self.finder != "rlkv":
            raise ValueError(
                f"init_gates is where training starts, but --finder {self.finder} starts from "
                "none: take --finder "
                "rlkv, or re-rank gates with inference/rerank_heads.py"
            )
        if self.init_gates is not None and self.init_value != 1.0:
            raise ValueError(
                f"init_gates and init_value={self.init_value} exclude each other: give one of them"
            )
        if self.plan and self.finder != "rlkv":
            raise ValueError(
                f"plan is for --finder rlkv, which it needs: --finder {self.finder} shows its "
                "bound as it runs"
            )
        if self.plan_gpus is not None and not self.plan:
            raise ValueError("plan_gpus says what --plan counts with: add it")
        if (
            not all(0 < sparsity < 1 for sparsity in self.target_sparsity or ())
            or self.target_sparsity == []
        ):
            raise ValueError(
                f"target_sparsity needs numbers between 0 and 1, got {self.target_sparsity}"
            )
        for name, least in (
            ("stable_steps", 0),
            ("held_out", 0),
            ("held_out_steps", 1),
            ("sample_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.held_out and (self.target_sparsity is None or self.finder != "rlkv"):
            raise ValueError(
                "held_out is measured while --finder rlkv trains, at the sparsities of "
                "target_sparsity: set both, with "
                "stable_steps 0 to train to the last step"
            )
        if self.rollout_kv_gib is not None and not self.rollout_kv_gib > 0:
            raise ValueError(f"rollout_kv_gib must be above 0, got {self.rollout_kv_gib}")
        if (
            min(self.rollout_rows or 1, self.forward_rows, self.elimination_traces) < 1
            or self.rollout_rows == 0
        ):
            raise ValueError("rollout_rows, forward_rows and elimination_traces must be at least 1")

    @property
    def servers(self) -> list[str]:
        """Addresses of the rollout servers."""
        return [url.strip() for url in self.rollout_servers.split(",")]


@dataclass
class GateTrainingArguments(GRPOConfig):
    """trl's GRPOConfig with the paper's defaults (arXiv 2510.08525):

    AdamW, constant lr 0.01, no KL, GRPO loss.
    """

    output_dir: str | None = option("outputs/gates", "log, checkpoints and exported gates")
    prompts_per_step: int | None = option(
        None, "prompts of one optimizer step over all processes; sets gradient_accumulation_steps"
    )
    recipe: str = option(
        "paper",
        "paper: its formulas: advantages and mean reward of a group, loss averaged over samples; "
        "published: what its "
        "authors ran: both of the batch, loss averaged over tokens, without those above "
        "importance_cap",
    )
    # None until __post_init__
    epsilon: float = option(
        None,
        "clip range, which acts only with several updates per rollout; default: 0.2, of the recipe "
        "published 0.4",
    )
    importance_cap: float = option(
        None,
        "vllm, vllm-server: largest importance weight of a token, 0: no correction; default: 3, of "
        "the recipe "
        "published 5",
    )
    learning_rate: float = option(0.01, "AdamW learning rate of the gates")
    lr_scheduler_type: str = option("constant", "learning rate schedule")
    weight_decay: float = option(0.017, "AdamW weight decay of the gates")
    max_grad_norm: float = option(1.0, "gradient clipping")
    loss_type: str = option("grpo", "grpo: mean over tokens, then over samples")
    num_generations: int | None = option(4, "samples per prompt")
    logging_steps: float = option(1, "the log has one record per step")
    report_to: str | None = option("none", "none: use the option wandb")
    gradient_checkpointing: bool = option(False, "recompute activations in backward")
    bf16: bool = option(False, "autocast; off, as the frozen model has its dtype")
    save_total_limit: int | None = option(2, "checkpoints to keep, at least 1")
    dataloader_pin_memory: bool = option(False, "batches are prompts as text")
    ddp_find_unused_parameters: bool | None = option(False, "every gate takes part in every step")
    disable_tqdm: bool | None = option(True, "the trainer prints its own line per step")

    def __post_init__(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.prompts_per_step is not None:
            at_once = self.per_device_train_batch_size * processes
            self.gradient_accumulation_steps = passes(
                self.prompts_per_step, self.num_generations or 1, at_once
            )
        check_choice("recipe", self.recipe, list(RECIPES))
        recipe = RECIPES[self.recipe]
        self.epsilon = recipe.epsilon if self.epsilon is None else self.epsilon
        self.importance_cap = (
            recipe.importance_cap if self.importance_cap is None else self.importance_cap
        )
        if self.importance_cap != 0 and self.importance_cap < 1:
            raise ValueError(
                f"importance_cap must be 0 (no correction) or at least 1, got {self.importance_cap}"
            )
        super().__post_init__()
        for names, needed, why in _FIXED:
            for name in names.split():
                if getattr(self, name) != needed:
                    raise ValueError(f"{name} must be {needed}, got {getattr(self, name)!r}: {why}")
        if self.report_to and self.report_to not in ("none", ["none"]):
            raise ValueError(
                f"report_to must be none, got {self.report_to!r}: W&B is set by the option wandb"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}: greedy samples of a prompt "
                "are equal"
            )
        if self.save_total_limit is not None and self.save_total_limit < 1:
            raise ValueError(f"save_total_limit must be at least 1, got {self.save_total_limit}")
        if (
            (self.prompts_per_step or 0)
            * (self.steps_per_generation or 1)
            % self.gradient_accumulation_steps
        ):
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} splits "
                f"prompts_per_step={self.prompts_per_step} "
                f"unevenly: make it a multiple of the {self.gradient_accumulation_steps} forward "
                "passes of a step"
            )

    @property
    def samples_per_step(self) -> int:
        """Completions of one optimizer step over all processes."""
        if self.prompts_per_step is not None:
            return self.prompts_per_step * (self.num_generations or 1)
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def device(self) -> torch.device:
        """The process's; a CPU without the index that several processes give it, to which torch
        loads no checkpoint.
        """
        found = super().device
        return torch.device("cpu") if found.type == "cpu" else found

    @property
    def prompts_per_rollout(self) -> int:
        """Different prompts of one rollout over all processes."""
        samples = (
            self.samples_per_step
            * (self.steps_per_generation or 1)
            // self.gradient_accumulation_steps
        )
        return samples // (self.num_generations or 1)


def parse_config(arguments: Sequence[str]) -> tuple[RLKVSettings, GateTrainingArguments]:
    """The settings of ``rlkv-train``; errors as in :func:`parse`."""
    settings, training = parse((RLKVSettings, GateTrainingArguments), arguments)
    return settings, training


# data -> its usual loss, and the method that the gates file names
SOURCES = {"recall": ("distance", "duo_attention"), "traces": ("kl", "trace_distillation")}


@dataclass
class DistillSettings(RunSettings):
    """Data, loss and optimizer; defaults are DuoAttention's (arXiv 2410.10819, section on
    training).
    """

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    data: str = option(
        "recall",
        "recall: passkeys hidden in a long text; traces: the curriculum's own correct outputs",
    )
    loss: str = option(
        "auto",
        "distance of hidden states, or kl of next tokens; auto: distance for recall, kl for traces",
    )
    prefill: str = option(
        "local",
        "traces: how prompts are read: local, through the gates too, or full, as by rlkv-infer and "
        "rlkv.compress",
    )
    haystack: str | None = option(
        None, "recall: text file to hide passkeys in; default: words of the vocabulary"
    )
    passkeys: int = option(10, "recall: sequences to remember")
    passkey_words: int = option(32, "recall in text: words of one passkey")
    min_length: int = option(1000, "recall in text: tokens of the shortest sample")
    max_length: int = option(
        32000, "recall in text: tokens of the longest sample; traces: longer ones are cut"
    )
    l1_weight: float = option(0.05, "weight of the mean gate in the loss")
    learning_rate: float = option(0.02, "peak learning rate of AdamW")
    steps: int = option(2000, "optimizer steps")
    batch_size: int = option(1, "samples of one optimizer step")
    forward_rows: int = option(1, "samples of one forward and backward pass")
    gradient_checkpointing: bool = option(False, "recompute activations in backward")
    seed: int = option(0, "of the samples and their order")
    save_steps: int = option(100, "steps between checkpoints")
    image_steps: int = option(0, "heat map and histogram: steps between plots, 0: none")
    run_name: str | None = option(None, "name of the run in W&B")
    output_dir: str = option("outputs/distilled", "log, checkpoints and exported gates")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data", self.data, tuple(SOURCES))
        check_choice("loss", self.loss, ("auto", "distance", "kl"))
        check_choice("prefill", self.prefill, ("local", "full"))
        for name in (
            "steps",
            "batch_size",
            "forward_rows",
            "save_steps",
            "passkeys",
            "passkey_words",
            "min_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        least = self.min_length if self.data == "recall" else 1
        if self.max_length < least:
            raise ValueError(
                f"max_length must be at least {least}, got {self.max_length} (for recall, at least "
                "min_length)"
            )
        if self.l1_weight < 0 or not self.learning_rate > 0:
            raise ValueError(
                f"l1_weight must be 0 or more and learning_rate above 0, got {self.l1_weight} and "
                f"{self.learning_rate}"
            )
        if self.prefill == "full" and (self.data == "recall" or self.gradient_checkpointing):
            raise ValueError(
                "prefill full is for --data traces without gradient_checkpointing, which drops the "
                "prompts' keys and "
                "values: use prefill local"
            )
        if self.data == "traces" and self.haystack is not None:
            raise ValueError(
                "haystack belongs to --data recall: traces need no text to hide passkeys in"
            )
        if self.data == "recall" and self.curriculum is not None:
            raise ValueError(
                "curriculum belongs to --data traces: the recall task makes its own texts"
            )

    @property
    def loss_kind(self) -> str:
        """``distance`` or ``kl``."""
        return SOURCES[self.data][0] if self.loss == "auto" else self.loss

    @property
    def method(self) -> str:
        """The name in the gates file; another loss than usual is part of it."""
        usual, name = SOURCES[self.data]
        return name if self.loss_kind == usual else f"{name}_{self.loss_kind}"


def parse_distill_config(arguments: Sequence[str]) -> DistillSettings:
    """Errors as in :func:`rlkv.training.config.parse`."""
    return parse((DistillSettings,), arguments)[0]
