"""Options of a training run: our own, and trl's GRPOConfig with the paper's defaults.

Every option says in its metadata what is done with it, so that no list of names is kept elsewhere:

- ``help`` and ``group``: what ``--help`` shows, and under which heading;
- ``resume``: whether a continued run may have another value; None: runs do not note the option;
- ``publish``: whether a gates file says it of its training; files of this machine are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import torch
from trl import GRPOConfig

from rlkv.data.curriculum import curriculum_folder
from rlkv.data.problems import curriculum_template, other_models
from rlkv.inference.options import check_least
from rlkv.models.prompts import choose_template
from rlkv.rollout.base import SamplingParams
from rlkv.training.objective import RECIPES

# what a run notes of an option: (may be changed when it is resumed, is published with the gates)
METHOD = (False, True)
EXTENT = (True, True)  # how far a run goes, and by which kernels
LOCAL = (True, False)  # what belongs to this machine, not to the method
INPUT = (False, False)  # published as a digest or a name of its own
UNNOTED = (None, True)

TRUSTED_SPARSITY = 0.4  # up to which a distillation orders the heads of an elimination
LEAST_STEPS = 8  # of that distillation: gates move by at most 0.25 a step
DEFAULT_ROWS = 64  # of a rollout, where no GPU says what fits


def option(default: Any, text: str, group: str, noted: tuple[bool | None, bool] = METHOD) -> Any:
    """Declare a field with the metadata that the module describes."""
    resume, publish = noted
    metadata = {"help": text, "group": group, "resume": resume, "publish": publish}
    return field(default=default, metadata=metadata)


def option_names(*kinds: Any, **wanted: Any) -> set[str]:
    """Return the names of the options whose metadata has all ``wanted`` values."""
    found = [of for kind in kinds for of in fields(kind) if "group" in of.metadata]
    return {of.name for of in found if wanted.items() <= of.metadata.items()}


def passes(prompts: int, group: int, at_once: int) -> int:
    """Return the fewest forward passes of ``at_once`` samples for ``prompts`` whole groups."""
    number = -(-prompts * group // at_once)
    while number * at_once % group:
        number += 1
    return number


def check_choices(settings: Any) -> None:
    """Raise ``ValueError`` if an option has a value that is not among its choices."""
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")


# options that have no effect unless another one, named first, has one of these values, or is set
_READ_WITH = {
    ("finder", "rlkv"): ("init_gates", "plan", "held_out"),
    ("finder", "elimination"): (
        "elimination_distillation",
        "elimination_sparsity",
        "elimination_prefill",
        "elimination_budget",
    ),
    ("finder", "elimination", "attention"): ("elimination_traces",),
    ("rollout", "vllm-server"): ("rollout_servers", "rollout_patience"),
    ("rollout", "vllm", "auto"): ("rollout_kv_gib", "rollout_eager"),
    ("rollout", "hf", "vllm", "auto"): ("rollout_rows",),
    ("data", "recall"): ("haystack", "passkeys", "passkey_words", "min_length"),
    ("data", "traces"): ("template", "curriculum", "allow_foreign_curriculum"),
    ("adaptive",): ("tau",),
    ("held_out",): ("held_out_steps",),
    ("wandb", "online", "offline"): ("wandb_project",),
}


# inputs and modes among them: who asks for one expects another run
_REFUSED = {"init_gates", "plan", "held_out", "haystack", "template", "curriculum"}


def unread_options(settings: Any) -> dict[str, str]:
    """Return options that were set and have no effect, with what they would have one with."""
    found = {}
    for (switch, *values), names in _READ_WITH.items():
        if not hasattr(settings, switch):  # programs differ in what they have
            continue
        chosen = getattr(settings, switch)
        has_effect = chosen in values if values else bool(chosen)
        if has_effect:
            continue
        needed = " ".join([f"--{switch.replace('_', '-')}", " or ".join(values)]).strip()
        for name in names:
            if getattr(settings, name) != getattr(type(settings), name):
                found[name] = needed
    return found


def check_effects(settings: Any) -> None:
    """Raise ``ValueError`` for an input or a mode that was asked for and has no effect."""
    for name, needed in unread_options(settings).items():
        if name in _REFUSED:
            given = getattr(settings, name)
            raise ValueError(
                f"{name}={given!r} has no effect without {needed}: leave it out, or add that"
            )


def print_unread(unread: Mapping[str, str]) -> None:
    """Say which other options have no effect, which a config may hold for another use."""
    for name, needed in unread.items():
        print(f"{name} has no effect without {needed}", flush=True)


@dataclass
class RunSettings:
    """Model, data and logging: what all finders have."""

    model: str = option(
        "tiny", "built-in name (tiny, smol), local folder, GGUF file or hub id", "model", INPUT
    )
    dtype: str = option("auto", "of the model: auto, fast, float32, bfloat16, float16", "model")
    curriculum: str | None = option(
        None, "solved problems with outputs: .parquet or .jsonl of rlkv-filter", "model", LOCAL
    )
    allow_foreign_curriculum: bool = option(
        False, "train on a curriculum that another model wrote", "model", LOCAL
    )
    template: str | None = option(
        None, "rlkv, boxed or plain; default: the curriculum's, else the model's", "model"
    )
    sink: int = option(128, "S: first tokens that the local branch sees", "gates")
    window: int = option(256, "W: last tokens that the local branch sees", "gates")
    deploy_sink: int = option(16, "sink for serving: noted with the gates", "model")
    deploy_window: int = option(64, "window for serving: noted with the gates", "model")
    image_steps: int = option(20, "steps between plots of the gates, 0: none", "logs", LOCAL)
    wandb: Literal["online", "offline", "disabled"] = option(
        "disabled", "Weights & Biases; online without a login becomes offline", "run", LOCAL
    )
    wandb_project: str = option("rlkv", "W&B project", "run", LOCAL)
    resume: bool = option(True, "resume from the last checkpoint in --output-dir", "run", LOCAL)
    gates_link: str | None = option(
        None, "a link to the exported gates.pt, made at the end; a file there stays", "run", LOCAL
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_least(self, 0, "image_steps", "sink", "deploy_sink")
        check_least(self, 1, "window", "deploy_window")

    def filter_command(self) -> str:
        """Return the command that writes the curriculum."""
        folder = Path(self.curriculum or "").parent
        elsewhere = "" if folder == curriculum_folder(self.model) else f" --output-dir {folder}"
        return f"rlkv-filter --model {self.model}{elsewhere}"

    def with_curriculum(self) -> Self:
        """Return the settings with the curriculum's prompt template where none was asked for.

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
            foreign = other_models(self.curriculum, self.model)
            if foreign and not self.allow_foreign_curriculum:
                raise ValueError(
                    f"{self.curriculum} holds what {', '.join(foreign)} solved, not {self.model}: "
                    f"make its own with `rlkv-filter --model {self.model}`, or pass "
                    "--allow-foreign-curriculum"
                )
        of_rows = None if self.template else curriculum_template(self.curriculum)
        template = choose_template(self.template, of_rows, model=self.model)
        return replace(self, template=template)


@dataclass
class RLKVSettings(RunSettings):
    """Gates, penalty and rollouts of ``rlkv-train``."""

    finder: Literal["rlkv", "elimination", "attention"] = option(
        "rlkv",
        "rlkv: GRPO; elimination: a short distillation, then head after head; attention: one pass "
        "over solutions",
        "finder",
    )
    init_value: float = option(1.0, "where every gate starts", "gates")
    init_gates: str | None = option(None, "gates to start from, not --init-value", "gates")
    l1_beta: float = option(1e-3, "beta of the L1 penalty (trl's --beta is KL: 0)", "gates")
    tau: float = option(0.5, "mean reward above which the penalty acts", "gates")
    adaptive: bool = option(
        True, "weight the penalty by the mean reward; off: l1_beta * (e - 1) always", "gates"
    )
    rollout: Literal["auto", "hf", "vllm", "vllm-server"] = option(
        "hf",
        "what samples: hf (the trainer's model), vllm (in each training process), vllm-server "
        "(other GPUs), auto (vllm where it is installed and fits, else hf)",
        "rollouts",
    )
    rollout_servers: str = option(
        "http://127.0.0.1:8700", "vllm-server: addresses, with commas between", "rollouts", LOCAL
    )
    rollout_patience: float = option(
        600.0, "vllm-server: seconds without an answer that end the training", "rollouts", LOCAL
    )
    rollout_kv_gib: float | None = option(
        None, "vllm: GiB of KV cache; default: what the GPU has left, else 4", "rollouts", LOCAL
    )
    rollout_eager: bool = option(False, "vllm: no compilation, no graphs", "rollouts", LOCAL)
    rollout_rows: int | None = option(
        None, "completions at once per process; default: what fits, else 64", "rollouts", LOCAL
    )
    target_sparsity: list[float] | None = option(  # noqa: RUF009  (a list, as no other is)
        None, "end when the full heads at these have been the same for a while", "logs", EXTENT
    )
    stable_steps: int = option(15, "how many steps that is, 0: never end early", "logs", EXTENT)
    held_out: int = option(
        0, "problems kept out of training: accuracy with hard masks at --target-sparsity", "logs"
    )
    held_out_steps: int = option(20, "steps between these measurements", "logs", LOCAL)
    sample_steps: int = option(20, "steps between sampled texts, 0: none", "logs", LOCAL)
    plan: bool = option(False, "print steps, engine, memory, rough time, and stop", "run", LOCAL)
    plan_gpus: str | None = option(
        None, "GPUs that --plan counts with, such as 8xh100; default: those here", "run", LOCAL
    )
    forward_rows: int = option(16, "rows per forward of the loss (one process)", "model", LOCAL)
    liger_kernels: bool = option(
        False, "Liger's kernels in the frozen layers; needs a GPU and rlkv[liger]", "steps", EXTENT
    )
    elimination_distillation: int = option(
        40, "steps of distillation that order four tenths of the heads; 0: none", "elimination"
    )
    elimination_traces: int = option(
        32, "solutions that heads are measured on, by attention too", "elimination"
    )
    elimination_sparsity: float = option(
        0.7, "sparsity up to which heads go", "elimination", EXTENT
    )
    elimination_prefill: Literal["full", "local"] = option(
        "full",
        "how prompts are read where the heads will serve: full, as by rlkv-infer and "
        "rlkv.compress; local, as by the vLLM plugin unless told otherwise",
        "elimination",
    )
    elimination_budget: float = option(
        3.0, "most forwards of the solutions, per head of the model", "elimination", EXTENT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "l1_beta", "tau", "stable_steps", "held_out", "sample_steps")
        check_least(self, 0, "elimination_distillation", "elimination_budget")
        check_least(self, 1, "held_out_steps", "rollout_rows", "forward_rows", "elimination_traces")
        if 0 < self.elimination_distillation < LEAST_STEPS:
            raise ValueError(
                f"elimination_distillation must be 0 or at least {LEAST_STEPS}, got "
                f"{self.elimination_distillation}"
            )
        check_effects(self)
        if self.init_gates is not None and self.init_value != 1.0:
            raise ValueError(
                f"init_gates and init_value={self.init_value} exclude each other: give one of them"
            )
        if self.plan_gpus is not None and not self.plan:
            raise ValueError("plan_gpus says what --plan counts with: add it")
        sparsities = self.target_sparsity
        if sparsities == [] or not all(0 < sparsity < 1 for sparsity in sparsities or ()):
            raise ValueError(f"target_sparsity needs numbers between 0 and 1, got {sparsities}")
        if self.held_out and sparsities is None:
            raise ValueError(
                "held_out is measured at the sparsities of target_sparsity: set both, with "
                "stable_steps 0 to train to the last step"
            )
        if self.rollout_kv_gib is not None and not self.rollout_kv_gib > 0:
            raise ValueError(f"rollout_kv_gib must be above 0, got {self.rollout_kv_gib}")

    @property
    def servers(self) -> list[str]:
        """Addresses of the rollout servers."""
        return [url.strip() for url in self.rollout_servers.split(",")]


_SAMPLING = "rollouts know temperature, top_p and top_k"
_OBJECTIVE = "the loss is that of the option recipe"
# options of trl that would be ignored or do harm: names, the only allowed value, why
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("beta", 0.0, "gate training has no KL term (the L1 weight is l1_beta)"),
    ("loss_type", "grpo", _OBJECTIVE),
    ("importance_sampling_level", "token", _OBJECTIVE),
    ("use_liger_kernel", False, f"{_OBJECTIVE}; liger_kernels is for the frozen layers"),
    ("epsilon_high", None, "clipping is symmetric: set epsilon"),
    ("scale_rewards", "group", "advantages are those of the option recipe"),
    ("mask_truncated_completions", False, "truncated completions count, with their reward"),
    ("logging_steps", 1, "the log has one record per step"),
    ("log_completions", False, "the log holds figures only"),
    ("logging_strategy", "steps", "the log has one record per step"),
    ("eval_strategy", "no", "evaluate the exported gates with the programs in inference/"),
    ("use_transformers_continuous_batching", False, "continuous batching bypasses the gates"),
    ("use_vllm", False, "trl's own rollouts of vLLM would not see the gates: set rollout to vllm"),
    (
        "mixed_precision",
        "no",
        "the model has the dtype of --dtype (accelerate launch --mixed_precision no)",
    ),
    ("model_init_kwargs", None, "the model is loaded by the options model and dtype"),
    ("multi_objective_aggregation", "sum_then_normalize", "there is one reward"),
    ("chat_template_kwargs", None, "prompts are rendered by the option template alone"),
    ("cache_implementation", None, "static caches do not work with gates"),
    ("fsdp", None, "the launcher sets FSDP2: --config_file configs/accelerate/fsdp2.yaml"),
    ("disable_dropout", True, "rollouts have no dropout"),
    ("cast_lm_head_to_fp32", False, "the head has the dtype of --dtype"),
    ("neftune_noise_alpha", None, _OBJECTIVE),
    ("data_seed", None, "all draws follow the option seed"),
    ("train_sampling_strategy", "random", "problems are drawn at random: see shuffle_dataset"),
    ("remove_unused_columns", False, "the answers are a column that only the reward reads"),
    ("trust_remote_code", False, "no code from a repository is run"),
    ("resume_from_checkpoint", None, "the same command resumes from its output_dir"),
    ("save_only_model ignore_data_skip", False, "a resumed run goes on as if never stopped"),
    ("save_strategy", "steps", "save_steps says how often"),
    ("enable_jit_checkpoint", False, "SIGTERM writes a checkpoint anyway"),
    ("push_to_hub", False, "rlkv-gates push takes the exported gates to the hub"),
    ("min_p generation_kwargs pad_to_multiple_of", None, _SAMPLING),
    ("repetition_penalty", 1.0, _SAMPLING),
)
# beginnings of the options of trl that are heeded: first those of the method
_HEEDED = (
    "adam_epsilon",
    "full_determinism",
    "lr_scheduler_kwargs",
    "optim",
    "shuffle_dataset",
    "tf32",
    "warmup_",
)
# those that say nothing of it
_OF_THE_MACHINE = (
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_",
    "ddp_",
    "debug",
    "deepspeed",
    "disable_tqdm",
    "ds3_",
    "fsdp",
    "gradient_checkpointing",
    "local_rank",
    "log_level",
    "log_on_each_node",
    "logging_",
    "report_to",
    "save_",
    "skip_memory_metrics",
    "torch_compile",
    "torch_empty_cache",
)


@dataclass
class GateTrainingArguments(GRPOConfig):
    """trl's GRPOConfig with the paper's defaults (arXiv 2510.08525).

    AdamW, constant learning rate 0.01, no KL, GRPO loss.  Some options of trl that are not named
    here are accepted too (those of the optimizer, of warm-up and of the machine), and not shown by
    ``--help``.

    Attributes:
        given: names of the listed options that do not have their defaults.
    """

    output_dir: str | None = option(
        "outputs/gates", "folder of the log, checkpoints and exported gates", "run", LOCAL
    )
    run_name: str | None = option(None, "name in W&B", "run", LOCAL)
    seed: int = option(42, "of the problems' order and of sampling", "run")
    save_steps: float = option(500, "steps between checkpoints", "run", LOCAL)
    save_total_limit: int | None = option(2, "checkpoints to keep, at least 1", "run", LOCAL)
    use_cpu: bool = option(False, "train on the CPU although there is a GPU", "model", UNNOTED)
    gradient_checkpointing: bool = option(False, "recompute in backward", "model", UNNOTED)
    max_steps: int = option(-1, "optimizer steps; -1: by the epochs", "steps", EXTENT)
    num_train_epochs: float = option(3.0, "passes over the curriculum", "steps", EXTENT)
    prompts_per_step: int | None = option(
        None, "prompts of a step over all processes; sets the forward passes", "steps"
    )
    recipe: Literal["paper", "published"] = option(
        "paper",
        "paper: its formulas: advantages and mean reward of a group, loss averaged over samples; "
        "published: what its authors ran: both of the batch, loss averaged over tokens, without "
        "those above --importance-cap",
        "steps",
    )
    # None: they follow from others, in __post_init__
    gradient_accumulation_steps: int = option(
        None, "passes of a step; default: what --prompts-per-step takes, else 1", "steps"
    )
    epsilon: float = option(
        None, "clip range of several updates per rollout; default: 0.2, published 0.4", "steps"
    )
    importance_cap: float = option(
        None, "vllm: largest importance weight, 0: none; default: 3, published 5", "steps"
    )
    steps_per_generation: int = option(None, "passes per rollout", "rollouts")
    generation_batch_size: int = option(None, "or completions per rollout", "rollouts")
    learning_rate: float = option(0.01, "AdamW learning rate of the gates", "steps")
    lr_scheduler_type: str = option("constant", "learning rate schedule", "steps")
    weight_decay: float = option(0.017, "AdamW weight decay of the gates", "steps")
    adam_beta1: float = option(0.9, "AdamW beta1", "steps")
    adam_beta2: float = option(0.999, "AdamW beta2", "steps")
    max_grad_norm: float = option(1.0, "gradient clipping", "steps")
    per_device_train_batch_size: int = option(8, "completions of a pass per process", "steps")
    num_iterations: int = option(1, "updates per rollout", "rollouts")
    num_generations: int = option(4, "samples per prompt", "rollouts")
    temperature: float = option(1.0, "of sampling", "rollouts")
    top_p: float = option(1.0, "of sampling", "rollouts")
    top_k: int = option(0, "of sampling, 0: all tokens", "rollouts")
    max_completion_length: int = option(512, "most tokens of a sample", "rollouts")
    # other defaults than trl's
    loss_type: str = "grpo"
    logging_steps: float = 1
    report_to: str | None = "none"
    bf16: bool = False  # no autocast, as the frozen model has its dtype
    dataloader_pin_memory: bool = False  # batches are prompts as text
    ddp_find_unused_parameters: bool | None = False  # every gate takes part in every step
    pad_to_multiple_of: int | None = None  # as trl's "auto" becomes
    disable_dropout: bool = True  # as in rollouts
    # seconds: with rollout servers the other processes wait in a collective for the whole rollout
    ddp_timeout: int = 4 * 3600
    disable_tqdm: bool | None = True  # the trainer prints its own line per step

    def __post_init__(self) -> None:
        listed = option_names(type(self))
        self.given = {name for name in listed if getattr(self, name) != getattr(type(self), name)}
        given_of_trl = self.unlisted()  # before trl fills in what follows from others
        check_least(self, 1, "per_device_train_batch_size", "gradient_accumulation_steps")
        check_least(self, 1, "prompts_per_step", "num_generations", "num_iterations")
        check_least(self, 1, "steps_per_generation", "generation_batch_size")
        check_least(self, 1, "max_completion_length")
        if not self.output_dir:
            raise ValueError("output_dir is empty: name the folder of the run")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(
                f"max_steps must be at least 1, or -1 (by the epochs), got {self.max_steps}"
            )
        epochs = self.num_train_epochs
        if self.max_steps > 0 and epochs != type(self).num_train_epochs:
            raise ValueError(
                f"max_steps={self.max_steps} would end the run whatever num_train_epochs={epochs} "
                "says: add --max-steps -1, or leave num_train_epochs out"
            )
        if self.prompts_per_step is not None:
            at_once = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
            needed = passes(self.prompts_per_step, self.num_generations, at_once)
            if self.gradient_accumulation_steps not in (None, needed):
                raise ValueError(
                    f"gradient_accumulation_steps={self.gradient_accumulation_steps} and "
                    f"prompts_per_step={self.prompts_per_step}, which takes {needed} passes, "
                    "exclude each other: give one of them, or --prompts-per-step None"
                )
            self.gradient_accumulation_steps = needed
        elif self.gradient_accumulation_steps is None:
            self.gradient_accumulation_steps = 1
        check_choices(self)
        recipe = RECIPES[self.recipe]
        if self.epsilon is None:
            self.epsilon = recipe.epsilon
        if self.importance_cap is None:
            self.importance_cap = recipe.importance_cap
        if self.importance_cap != 0 and not self.importance_cap >= 1:
            raise ValueError(
                f"importance_cap must be 0 (no correction) or at least 1, got {self.importance_cap}"
            )
        super().__post_init__()
        if self.report_to not in ([], ["none"], "none"):
            raise ValueError(
                f"report_to must be none, got {self.report_to!r}: W&B is set by the option wandb"
            )
        for names, needed, why in _FIXED:
            for name in names.split():
                value = getattr(self, name)
                if value != needed:
                    raise ValueError(f"{name} must be {needed}, got {value!r}: {why}")
        fixed = {name for names, _, _ in _FIXED for name in names.split()}
        for name, value in given_of_trl.items():
            if name.startswith("vllm_"):
                raise ValueError(
                    f"{name}={value!r} is for trl's own rollouts of vLLM, which would not see the "
                    "gates: leave it out; rollout_kv_gib, rollout_rows and importance_cap are ours"
                )
            if name not in fixed and not name.startswith(_HEEDED + _OF_THE_MACHINE):
                raise ValueError(
                    f"{name}={value!r} is an option of trl that gate training does not heed: "
                    "leave it out"
                )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}: greedy samples of a prompt "
                "are equal"
            )
        SamplingParams(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, self.seed
        )
        check_least(self, 0, "epsilon", "max_grad_norm", "weight_decay", "learning_rate")
        check_least(self, 1, "save_total_limit")
        prompts = (self.prompts_per_step or 0) * self.steps_per_generation
        if prompts % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} splits prompts_per_step="
                f"{self.prompts_per_step} unevenly: make it a multiple of the "
                f"{self.gradient_accumulation_steps} forward passes of a step"
            )

    def unlisted(self) -> dict[str, Any]:
        """Return options of trl that ``--help`` does not list and that were given a value."""
        found = {}
        for of in fields(self):
            default = of.default if of.default_factory is MISSING else of.default_factory()
            value = getattr(self, of.name)
            if "group" not in of.metadata and value != default:
                found[of.name] = value
        return found

    def noted(self) -> dict[str, Any]:
        """Return the options that a run notes, those of trl under ``trl``."""
        names = sorted(of.name for of in fields(self) if of.metadata.get("resume") is not None)
        values = {name: getattr(self, name) for name in names}
        values["trl"] = {
            name: value
            for name, value in self.unlisted().items()
            if not name.startswith(_OF_THE_MACHINE)
        }
        return values

    @property
    def samples_per_step(self) -> int:
        """Completions of one optimizer step over all processes."""
        if self.prompts_per_step is not None:
            return self.prompts_per_step * self.num_generations
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def prompts_per_rollout(self) -> int:
        """Different prompts of one rollout over all processes."""
        steps = self.steps_per_generation
        samples = self.samples_per_step * steps // self.gradient_accumulation_steps
        return samples // self.num_generations

    @property
    def device(self) -> torch.device:
        """The process's device.

        A CPU comes without the index that several processes give it, to which torch loads no
        checkpoint.
        """
        found = super().device
        return torch.device("cpu") if found.type == "cpu" else found


# data -> its usual loss, and the method that the gates file names
SOURCES = {"recall": ("distance", "duo_attention"), "traces": ("kl", "trace_distillation")}


@dataclass
class DistillSettings(RunSettings):
    """Data, loss and optimizer of ``rlkv-distill``.

    Defaults are DuoAttention's (arXiv 2410.10819, section on training).
    """

    device: str = option("auto", "auto, cpu, cuda or cuda:N", "model")
    data: Literal["recall", "traces"] = option(
        "recall", "recall: passkeys hidden in a long text; traces: the curriculum's outputs", "data"
    )
    loss: Literal["auto", "distance", "kl"] = option(
        "auto", "distance of hidden states (auto for recall), kl of tokens (for traces)", "data"
    )
    prefill: Literal["local", "full"] = option(
        "local", "traces: prompts are read through the gates, or in full as by rlkv-infer", "data"
    )
    haystack: str | None = option(
        None, "recall: text file to hide passkeys in; default: random words", "data", INPUT
    )
    passkeys: int = option(10, "recall: sequences to remember", "data")
    passkey_words: int = option(32, "recall in text: words of one passkey", "data")
    min_length: int = option(1000, "recall in text: tokens of the shortest sample", "data")
    max_length: int = option(32000, "tokens of the longest sample; traces are cut", "data")
    l1_weight: float = option(0.05, "weight of the mean gate in the loss", "steps")
    learning_rate: float = option(0.02, "peak learning rate of AdamW", "steps")
    steps: int = option(2000, "optimizer steps", "steps")
    batch_size: int = option(1, "samples of one optimizer step", "steps")
    forward_rows: int = option(1, "samples of one forward and backward", "steps", LOCAL)
    gradient_checkpointing: bool = option(False, "recompute in backward", "steps")
    seed: int = option(0, "of the samples and their order", "steps")
    save_steps: int = option(100, "steps between checkpoints", "run", LOCAL)
    image_steps: int = option(0, "steps between plots of the gates, 0: none", "logs", LOCAL)
    run_name: str | None = option(None, "name in W&B", "run", LOCAL)
    output_dir: str = option(
        "outputs/distilled", "folder of the log, checkpoints and exported gates", "run", LOCAL
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "steps", "batch_size", "forward_rows", "save_steps")
        check_least(self, 1, "passkeys", "passkey_words", "min_length")
        least = self.min_length if self.data == "recall" else 1
        if self.max_length < least:
            raise ValueError(
                f"max_length must be at least {least}, got {self.max_length} (for recall, at least "
                "min_length)"
            )
        check_least(self, 0, "l1_weight")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.prefill == "full" and (self.data == "recall" or self.gradient_checkpointing):
            raise ValueError(
                "prefill full is for --data traces without gradient_checkpointing, which drops the "
                "prompts' keys and values: use prefill local"
            )
        check_effects(self)

    @property
    def loss_kind(self) -> str:
        """``distance`` or ``kl``."""
        return SOURCES[self.data][0] if self.loss == "auto" else self.loss

    @property
    def method(self) -> str:
        """The name in the gates file; another loss than usual is part of it."""
        usual, name = SOURCES[self.data]
        return name if self.loss_kind == usual else f"{name}_{self.loss_kind}"


_ALL = (RLKVSettings, GateTrainingArguments, DistillSettings)
RESUMABLE_KEYS = option_names(*_ALL, resume=True)
UNPUBLISHED_KEYS = option_names(*_ALL, publish=False)
