"""What every way of training takes, and its options: YAML, overridden by the command line; unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import yaml
from trl import TrlParser

from rlkv.utils.configs import find_config, packaged


def option(default: Any, text: str) -> Any:
    """A field with its text for ``--help``."""
    return field(default=default, metadata={"help": text})


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass
class RunSettings:
    """Model, data and logging."""

    model: str = option("tiny", "'tiny' (built in), a local folder or a hub id")
    dtype: str = option("auto", "dtype of the frozen model: auto, float32, bfloat16, float16")
    curriculum: str | None = option(None, "the filter's .parquet or .jsonl (problem, answer, output)")
    template: str = option("rlkv", "prompt template, a name in rlkv.models.prompts")
    sink: int = option(128, "S: first tokens that the local branch sees")
    window: int = option(256, "W: last tokens that the local branch sees")
    deploy_sink: int = option(16, "sink size recommended for serving, kept in the gates file")
    deploy_window: int = option(64, "window recommended for serving, kept in the gates file")
    image_steps: int = option(20, "a heat map and a histogram every so many steps, 0: never")
    wandb: str = option("disabled", "online, offline or disabled")
    wandb_project: str = option("rlkv", "W&B project")
    resume: bool = option(True, "go on from the last checkpoint in output_dir")

    def __post_init__(self) -> None:
        check_choice("wandb", self.wandb, ("online", "offline", "disabled"))
        if self.image_steps < 0:
            raise ValueError(f"image_steps must be 0 or more, got {self.image_steps}")


class _Parser(TrlParser):
    """Errors as ``ValueError`` instead of a screen of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(classes: Sequence[type], arguments: Sequence[str]) -> list[Any]:
    """One object per dataclass: ``--config NAME|FILE`` sets defaults, other ``--name value`` options override them.

    Raises:
        ValueError: for an unknown key or option, a value of the wrong type, or settings that contradict each other.
        OSError: if the file cannot be read.
    """
    parser = _Parser(cast(Any, classes), allow_abbrev=False)
    arguments = list(arguments)
    if "--config" in arguments:
        place = arguments.index("--config") + 1
        if place == len(arguments):
            raise ValueError(f"--config needs a file or a packaged name: {', '.join(packaged())}")
        arguments[place] = str(find_config(arguments[place]))
    try:
        parsed: Any = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except yaml.YAMLError as error:
        raise ValueError(f"the config file is not valid YAML: {error}") from error
    *found, from_file, from_line = parsed
    unknown = [text.lstrip("-") for text in from_file[::2]] + [text for text in from_line if re.match("--", text)]
    unknown += [] if unknown else from_line
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}: --help lists all names")
    return found
