"""Configuration of ``train/distill_gates.py``: YAML, overridden by the command line; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkv.training.config import WANDB_MODES, parse

# data -> its usual loss, and the method that the gates file names
SOURCES = {"recall": ("distance", "duo_attention"), "traces": ("kl", "trace_distillation")}
LOSSES = ("auto", "distance", "kl")


@dataclass
class DistillSettings:
    """Model, data, gates and optimizer; defaults are DuoAttention's (arXiv 2410.10819, section on training)."""

    model: str = field(default="tiny", metadata={"help": "'tiny' (built in), a local folder or a hub id"})
    dtype: str = field(default="auto", metadata={"help": "dtype of the frozen model: auto, float32, bfloat16, float16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    data: str = field(
        default="recall",
        metadata={"help": "recall: passkeys hidden in a long text; traces: the curriculum's own correct outputs"},
    )
    loss: str = field(
        default="auto",
        metadata={"help": "distance of hidden states, or kl of next tokens; auto: distance for recall, kl for traces"},
    )
    curriculum: str | None = field(
        default=None, metadata={"help": "traces: the filter's .parquet or .jsonl (problem, answer, output)"}
    )
    template: str = field(default="rlkv", metadata={"help": "traces: prompt template, a name in rlkv.models.prompts"})
    haystack: str | None = field(
        default=None, metadata={"help": "recall: text file to hide passkeys in; default: words of the vocabulary"}
    )
    passkeys: int = field(default=10, metadata={"help": "recall: sequences to remember"})
    passkey_words: int = field(default=32, metadata={"help": "recall in text: words of one passkey"})
    min_length: int = field(default=1000, metadata={"help": "recall in text: tokens of the shortest sample"})
    max_length: int = field(
        default=32000, metadata={"help": "recall in text: tokens of the longest sample; traces: longer ones are cut"}
    )
    sink: int = field(default=128, metadata={"help": "S: first tokens that the local branch sees"})
    window: int = field(default=256, metadata={"help": "W: last tokens that the local branch sees"})
    deploy_sink: int = field(default=16, metadata={"help": "sink size recommended for serving, kept in the gates file"})
    deploy_window: int = field(default=64, metadata={"help": "window recommended for serving, kept in the gates file"})
    l1_weight: float = field(default=0.05, metadata={"help": "weight of the mean gate in the loss"})
    learning_rate: float = field(default=0.02, metadata={"help": "peak learning rate of AdamW"})
    steps: int = field(default=2000, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=1, metadata={"help": "samples of one optimizer step"})
    forward_rows: int = field(default=1, metadata={"help": "samples of one forward and backward pass"})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "recompute activations in backward"})
    seed: int = field(default=0, metadata={"help": "of the samples and their order"})
    save_steps: int = field(default=100, metadata={"help": "a checkpoint every so many steps"})
    image_steps: int = field(default=0, metadata={"help": "a heat map and a histogram every so many steps, 0: never"})
    wandb: str = field(default="disabled", metadata={"help": "online, offline or disabled"})
    wandb_project: str = field(default="rlkv", metadata={"help": "W&B project"})
    run_name: str | None = field(default=None, metadata={"help": "name of the run in W&B"})
    resume: bool = field(default=True, metadata={"help": "go on from the last checkpoint in output_dir"})
    output_dir: str = field(default="outputs/distilled", metadata={"help": "log, checkpoints and exported gates"})

    def __post_init__(self) -> None:
        if self.data not in SOURCES:
            raise ValueError(f"data must be {' or '.join(SOURCES)}, got {self.data!r}")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"wandb must be one of {', '.join(WANDB_MODES)}, got {self.wandb!r}")
        for name in ("steps", "batch_size", "forward_rows", "save_steps", "passkeys", "passkey_words", "min_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        least = self.min_length if self.data == "recall" else 1
        if self.max_length < least:
            raise ValueError(
                f"max_length must be at least {least}, got {self.max_length} (for recall, at least min_length)"
            )
        if self.l1_weight < 0 or not self.learning_rate > 0:
            raise ValueError(
                f"l1_weight must be 0 or more and learning_rate above 0, got {self.l1_weight} and {self.learning_rate}"
            )
        if self.image_steps < 0:
            raise ValueError(f"image_steps must be 0 or more, got {self.image_steps}")
        if self.data == "traces" and self.haystack is not None:
            raise ValueError("haystack belongs to --data recall: traces need no text to hide passkeys in")
        if self.data == "recall" and self.curriculum is not None:
            raise ValueError("curriculum belongs to --data traces: the recall task makes its own texts")

    @property
    def loss_kind(self) -> str:
        """``distance`` or ``kl``."""
        return SOURCES[self.data][0] if self.loss == "auto" else self.loss

    @property
    def method(self) -> str:
        """The name in the gates file; with another loss than usual the name says so."""
        usual, name = SOURCES[self.data]
        return name if self.loss_kind == usual else f"{name}_{self.loss_kind}"


def parse_distill_config(arguments: Sequence[str]) -> DistillSettings:
    """Errors as in :func:`rlkv.training.config.parse`."""
    found: list[Any] = parse((DistillSettings,), arguments)
    return found[0]
