"""Options of every training, and how they are read from a config file and the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self, cast

from trl import TrlParser

from rlkv.data.curriculum import curriculum_folder
from rlkv.data.deepscaler import curriculum_template, other_models
from rlkv.models.prompts import choose_template
from rlkv.utils.configs import read_config, take_config


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

    model: str = option("tiny", "a built-in name (tiny, smol), a local folder or a hub id")
    dtype: str = option("auto", "dtype of the frozen model: auto, fast, float32, bfloat16, float16")
    curriculum: str | None = option(None, "the filter's .parquet or .jsonl (problem, answer, output)")
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
    gates_link: str | None = option(None, "a link to the exported gates.pt, made at the end; a file there stays")

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
            ValueError: if the curriculum is absent or unreadable, or another model wrote it, which was not allowed.
        """
        if self.curriculum is not None:
            if not Path(self.curriculum).exists():
                raise ValueError(
                    f"{self.curriculum}: there is no such file; `{self.filter_command()}` writes a curriculum"
                )
            foreign = [] if self.allow_foreign_curriculum else other_models(self.curriculum, self.model)
            if foreign:
                raise ValueError(
                    f"{self.curriculum} holds what {', '.join(foreign)} solved, not {self.model}: make its own with "
                    f"`rlkv-filter --model {self.model}`, or pass --allow_foreign_curriculum true"
                )
        named = self.template, curriculum_template(self.curriculum)
        return replace(self, template=choose_template(*named, model=self.model))


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
    file, arguments = take_config(arguments, *classes)
    from_file = [] if file is None else parser.set_defaults_with_config(**read_config(file))
    parsed: Any = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    *found, from_line = parsed
    unknown = [text.lstrip("-") for text in from_file[::2]] + [text for text in from_line if re.match("--", text)]
    unknown += [] if unknown else from_line
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}: --help lists all names")
    return found
