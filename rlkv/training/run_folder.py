"""The output folder of a run: its settings, the checkpoint to go on from, its loggers, and the export at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.training.checkpoint import last_checkpoint
from rlkv.training.export import export_run
from rlkv.training.head_gate import gates_matrix
from rlkv.training.loggers import LOG, GateImages, JsonlLog, WandbLog, read_log
from rlkv.training.records import gate_shares
from rlkv.training.settings import RunSettings
from rlkv.utils.atomic import atomic_path

RUN_CONFIG = "run_config.json"
# what may differ between a run and its continuation; the problems themselves are compared by their digest
RESUMABLE_KEYS = {"wandb", "wandb_project", "resume", "image_steps", "output_dir", "save_steps", "save_total_limit"}
RESUMABLE_KEYS |= {"run_name", "rollout_url", "rollout_patience", "rollout_kv_gib", "rollout_eager"}
RESUMABLE_KEYS |= {"max_steps", "num_train_epochs", "curriculum"}
# what a gates file does not say of its training: files of this machine, and what does not belong to the method
UNPUBLISHED_KEYS = {"curriculum", "haystack", "output_dir", "run_name", "model", "wandb", "wandb_project", "resume"}
UNPUBLISHED_KEYS |= {"rollout_url", "save_steps", "image_steps"}


def check_output_dir(folder: Path, config: dict[str, Any], resume: bool) -> Path | None:
    """The checkpoint to go on from.

    Raises:
        ValueError: if the folder holds another run, or this one and ``resume`` is off.
    """
    noted = folder / RUN_CONFIG
    checkpoint = last_checkpoint(folder)
    if noted.exists() and not resume:
        raise ValueError(f"{folder} holds a run already: continue it with --resume true, or take another --output_dir")
    if noted.exists() and checkpoint is not None:
        before = json.loads(noted.read_text())
        differing = [key for key in config if key not in RESUMABLE_KEYS and before.get(key, config[key]) != config[key]]
        if differing:
            changes = ", ".join(f"{key} {before[key]!r} -> {config[key]!r}" for key in differing)
            raise ValueError(
                f"{folder} holds a run with other settings ({changes}): use the same ones to continue it, or another "
                "--output_dir"
            )
    elif checkpoint is not None:
        raise ValueError(f"{folder} holds checkpoints of unknown origin: take another --output_dir")
    return checkpoint


class RunFolder:
    """One run of ``settings`` in ``path``; ``config`` is all that defines it, JSON-able.

    Attributes:
        checkpoint: to go on from; None: the run starts.

    Raises:
        ValueError: as :func:`check_output_dir`.
    """

    def __init__(self, path: Path, settings: RunSettings, config: dict[str, Any]) -> None:
        self.path, self.settings, self.config = path, settings, config
        self.checkpoint = check_output_dir(path, config, settings.resume)

    def write_config(self) -> None:
        """Note the settings down for the next time."""
        with atomic_path(self.path / RUN_CONFIG) as partial:
            partial.write_text(json.dumps(self.config, indent=2) + "\n")

    def loggers(self, make_gates: Callable[[], HeadGates]) -> list[TrainerCallback]:
        """Figures, the JSONL log and W&B."""
        settings = self.settings
        images = GateImages(self.path, settings.image_steps, make_gates)
        found: list[TrainerCallback] = [images, JsonlLog(self.path)]
        if settings.wandb != "disabled":
            found.append(WandbLog(settings.wandb, settings.wandb_project, self.config, self.path, images))
        return found

    def gates(self, model: Any, mean_alpha: Tensor, method: str, steps: int) -> HeadGates:
        """The gates of ``model`` after ``steps`` steps, with what a gates file says of their training."""
        settings = self.settings
        published = {key: value for key, value in self.config.items() if key not in UNPUBLISHED_KEYS}
        return HeadGates(
            alpha=gates_matrix(model),
            mean_alpha=mean_alpha,
            model=ModelShape.from_config(model.config),
            sink=settings.sink,
            window=settings.window,
            deploy_sink=settings.deploy_sink,
            deploy_window=settings.deploy_window,
            training={**published, "method": method, "steps": steps},
        )

    def export(self, gates: HeadGates, curves: Sequence[tuple[str, str]]) -> None:
        """Write the finished gates, figures and summary; see :func:`rlkv.training.export.export_run`."""
        gates.training["final"] = gate_shares(gates.alpha)
        export_run(self.path, gates, read_log(self.path / LOG), self.config, curves)
