"""Configuration of ``rlkv-distill``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkv.training.run_settings import RunSettings, check_choice, option, parse

# data -> its usual loss, and the method that the gates file names
SOURCES = {"recall": ("distance", "duo_attention"), "traces": ("kl", "trace_distillation")}


@dataclass
class DistillSettings(RunSettings):
    """Data, loss and optimizer; defaults are DuoAttention's (arXiv 2410.10819, section on training)."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    data: str = option("recall", "recall: passkeys hidden in a long text; traces: the curriculum's own correct outputs")
    loss: str = option(
        "auto", "distance of hidden states, or kl of next tokens; auto: distance for recall, kl for traces"
    )
    prefill: str = option(
        "local",
        "traces: how prompts are read: local, through the gates too, or full, as by rlkv-infer and rlkv.compress",
    )
    haystack: str | None = option(None, "recall: text file to hide passkeys in; default: words of the vocabulary")
    passkeys: int = option(10, "recall: sequences to remember")
    passkey_words: int = option(32, "recall in text: words of one passkey")
    min_length: int = option(1000, "recall in text: tokens of the shortest sample")
    max_length: int = option(32000, "recall in text: tokens of the longest sample; traces: longer ones are cut")
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
        if self.prefill == "full" and (self.data == "recall" or self.gradient_checkpointing):
            raise ValueError(
                "prefill full is for --data traces without gradient_checkpointing, which drops the prompts' keys and "
                "values: use prefill local"
            )
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
        """The name in the gates file; another loss than usual is part of it."""
        usual, name = SOURCES[self.data]
        return name if self.loss_kind == usual else f"{name}_{self.loss_kind}"


def parse_distill_config(arguments: Sequence[str]) -> DistillSettings:
    """Errors as in :func:`rlkv.training.config.parse`."""
    return parse((DistillSettings,), arguments)[0]
