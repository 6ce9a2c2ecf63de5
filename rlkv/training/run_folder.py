"""The output folder of a run: its settings, checkpoints, loggers, and the export at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from rlkv.gates import share
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates, plot_histogram
from rlkv.models.shape import ModelShape
from rlkv.training.checkpoints import last_checkpoint
from rlkv.training.head_gate import gate_shares, gates_matrix
from rlkv.training.loggers import CollapseWatch, GateImages, JsonlLog, SampleLog
from rlkv.training.logs import EXPORTED, HELD_OUT, LOG, LOGS, RUN_CONFIG, SUMMARY
from rlkv.training.run_settings import RunSettings
from rlkv.training.wandb_log import WandbLog
from rlkv.utils.atomic import write_json
from rlkv.utils.figures import TEXT_SIZE, curve_figure, save_figure
from rlkv.utils.jsonl import read_json, read_log
from rlkv.utils.provenance import provenance
from rlkv.utils.store import StoreInUseError, check_free, free_folder, hold_folder

# what may differ between a run and its continuation; the problems themselves are compared by their digest
RESUMABLE_KEYS = {"wandb", "wandb_project", "resume", "image_steps", "output_dir", "save_steps", "save_total_limit"}
RESUMABLE_KEYS |= {"run_name", "rollout_servers", "rollout_patience", "rollout_kv_gib", "rollout_eager"}
RESUMABLE_KEYS |= {"max_steps", "num_train_epochs", "curriculum", "rollout_rows"}
RESUMABLE_KEYS |= {"allow_foreign_curriculum", "gates_link", "target_sparsity", "stable_steps"}
RESUMABLE_KEYS |= {"plan", "plan_gpus"}
RESUMABLE_KEYS |= {"held_out_steps", "sample_steps", "forward_rows", "elimination_sparsity", "elimination_budget"}
# what a gates file does not say of its training: files of this machine, and what does not belong to the method
UNPUBLISHED_KEYS = {"curriculum", "haystack", "output_dir", "run_name", "model", "wandb", "wandb_project", "resume"}
UNPUBLISHED_KEYS |= {"rollout_servers", "save_steps", "image_steps", "sample_steps", "gates_link"}
UNPUBLISHED_KEYS |= {"plan", "plan_gpus"}
UNPUBLISHED_KEYS |= {"rollout_kv_gib", "rollout_rows", "allow_foreign_curriculum", "forward_rows"}
UNPUBLISHED_KEYS |= {"rollout_patience", "rollout_eager", "save_total_limit", "held_out_steps"}
# what a run leaves in its folder besides checkpoints
GATES_FILES = ("gates.safetensors", "adapter_weights.tsv", "adapter")
FIGURES = ("heat_map.png", "histogram.png", "training_curves.png")
WRITTEN = (EXPORTED, *GATES_FILES, *FIGURES, *LOGS, SUMMARY)
SHARED_SECONDS = 60  # in which a network disk shows what another machine wrote


def check_output_dir(folder: Path, config: dict[str, Any], resume: bool) -> Path | None:
    """The checkpoint to resume from, None if there is none yet.

    Raises:
        ValueError: if the folder holds another run, files that no run wrote, or this run and ``resume`` is off.
        StoreInUseError: if another process is writing it.
    """
    noted = folder / RUN_CONFIG
    check_free(folder)
    if not noted.exists():
        found = [name for name in WRITTEN if (folder / name).exists()]
        if found or last_checkpoint(folder) is not None:
            names = ", ".join(found) or "checkpoints"
            raise ValueError(
                f"{folder} holds {names}, but no {RUN_CONFIG}, which every run notes first: take another --output_dir"
            )
        return None
    if not resume:
        raise ValueError(f"{folder} holds a run already: continue it with --resume true, or take another --output_dir")
    before = read_json(noted)
    # another version has a few settings more or less, another program has others
    if not isinstance(before, dict) or 2 * len(before.keys() ^ config.keys()) > len(before.keys() | config.keys()):
        raise ValueError(f"{folder} holds a run of another command: take another --output_dir")
    newest = last_checkpoint(folder)
    log = folder / LOG
    if newest is None and not (folder / EXPORTED).exists() and not (log.exists() and log.stat().st_size):
        return None  # nothing that a new run would overwrite
    differing = [key for key in config if key not in RESUMABLE_KEYS and before.get(key, config[key]) != config[key]]
    if differing:
        changes = ", ".join(f"{key} {before[key]!r} -> {config[key]!r}" for key in differing)
        raise ValueError(
            f"{folder} holds a run with other settings ({changes}): use the same ones to continue it, or another "
            "--output_dir"
        )
    return newest


def link(place: Path, target: Path) -> None:
    """Make ``place`` a link to ``target``; an older link is replaced, a file or folder is not."""
    if place.exists() and not place.is_symlink():
        print(f"{place} is a file of its own and was left as it is: the gates are in {target}", flush=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))
    print(f"{place} -> {target}", flush=True)


class RunFolder:
    """One run of ``settings`` in ``path``; ``config`` is all that defines it, JSON-able.

    ``checkpoint`` is the one to resume from, None for a new run; errors as in :func:`check_output_dir`.
    """

    def __init__(self, path: Path, settings: RunSettings, config: dict[str, Any]) -> None:
        self.path, self.settings, self.config = path, settings, config
        self.checkpoint = check_output_dir(path, config, settings.resume)
        self.wandb_log: WandbLog | None = None

    def write_config(self) -> None:
        """Take the folder for this process, and record the settings, for the comparison when the run is resumed.

        Raises:
            StoreInUseError: if another process is writing the folder, or has since this one looked.
        """
        hold_folder(self.path)
        if check_output_dir(self.path, self.config, self.settings.resume) != self.checkpoint:
            raise StoreInUseError(f"{self.path} was written by another process meanwhile: run the command again")
        write_json(self.path / RUN_CONFIG, self.config)

    def check_shared(self) -> None:
        """Raise ValueError unless this process sees the settings that the main one has recorded."""
        for _ in range(SHARED_SECONDS):
            if (self.path / RUN_CONFIG).exists() and read_json(self.path / RUN_CONFIG) == self.config:
                return
            time.sleep(1)
        else:
            raise ValueError(
                f"{self.path} is not the main process's folder: with several machines --output_dir must be on a disk "
                "that all of them share"
            )

    def loggers(self, make_gates: Callable[[], HeadGates], samples: SampleLog | None = None) -> list[TrainerCallback]:
        """Figures, the logs, W&B and alerts."""
        settings = self.settings
        images = GateImages(self.path, settings.image_steps, make_gates)
        found: list[TrainerCallback] = [images, JsonlLog(self.path), *([] if samples is None else [samples])]
        if wandb := self.open_wandb(images, samples):
            found.append(wandb)
        tell = [] if self.wandb_log is None else [self.wandb_log.alert]
        return [*found, CollapseWatch(self.path, tell)]

    def open_wandb(self, images: GateImages | None = None, samples: SampleLog | None = None) -> WandbLog | None:
        """W&B, where it is asked for; :meth:`export` ends its run."""
        mode, project = self.settings.wandb, self.settings.wandb_project
        if mode != "disabled":
            self.wandb_log = WandbLog(mode, project, self.config, self.path, images, samples)
        return self.wandb_log

    def published(self) -> dict[str, Any]:
        """The settings that a gates file tells."""
        return {key: value for key, value in self.config.items() if key not in UNPUBLISHED_KEYS}

    def gates(self, model: Any, mean_alpha: Tensor, method: str, steps: int) -> HeadGates:
        """The gates of ``model`` after ``steps`` steps, with what a gates file says of their training."""
        settings = self.settings
        return HeadGates(
            alpha=gates_matrix(model),
            mean_alpha=mean_alpha,
            model=ModelShape.from_config(model.config),
            sink=settings.sink,
            window=settings.window,
            deploy_sink=settings.deploy_sink,
            deploy_window=settings.deploy_window,
            training={**self.published(), "method": method, "steps": steps},
        )

    def export(self, gates: HeadGates, curves: Sequence[tuple[str, str]]) -> None:
        """Write the finished gates in every format, figures and ``summary.json``.

        ``gates.pt`` comes last: its presence says that the export is complete.

        Args:
            curves: keys and labels of the shares and means of the log that ``training_curves.png`` shows.
        """
        records = read_log(self.path / LOG)
        gates.training["final"] = gate_shares(gates.alpha)
        figures = [{k.removeprefix(HELD_OUT): v for k, v in r.items() if k.startswith(HELD_OUT)} for r in records]
        if last := [found for found in figures if found][-1:]:
            gates.training[share.HELD_OUT] = last[0]
        for name in GATES_FILES:
            gates.save(self.path / name)
        plot_gates(gates, self.path / "heat_map.png")
        plot_histogram(gates, self.path / "histogram.png")
        figure, axes = curve_figure("Training of the gates", "optimizer step", "share or mean, 0 to 1")
        for key, label in curves:
            axes.plot([record["step"] for record in records], [record[key] for record in records], label=label)
        axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=TEXT_SIZE)
        save_figure(figure, self.path / "training_curves.png")
        summary = {"training": gates.training, "config": self.config, **provenance()}
        write_json(self.path / SUMMARY, summary)
        gates.save(self.path / EXPORTED)
        free_folder(self.path)
        if self.settings.gates_link is not None:
            link(Path(self.settings.gates_link), self.path / EXPORTED)
        if self.wandb_log is not None:
            self.wandb_log.finish([self.path / "gates.safetensors", self.path / "heat_map.png"])
