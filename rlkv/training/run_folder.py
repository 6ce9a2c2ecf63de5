"""The output folder of a run: its settings, checkpoints, the export, and reading it back."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from rlkv.attention.head_gate import gate_counts, gate_shares, gates_matrix
from rlkv.gates import publish as share
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates, plot_histogram
from rlkv.models.loading import files_digest
from rlkv.models.shape import ModelShape
from rlkv.training.config import RESUMABLE_KEYS, UNPUBLISHED_KEYS, RunSettings
from rlkv.training.logs import HELD_OUT, LOG, LOGS, WandbLog, read_records
from rlkv.utils.files import (
    TEXT_SIZE,
    check_folder,
    curve_figure,
    read_json,
    read_log,
    save_figure,
    write_bytes,
    write_json,
)
from rlkv.utils.runtime import provenance, require
from rlkv.utils.store import StoreInUseError, check_free, free_folder, hold_folder

RUN_CONFIG = "run_config.json"
SUMMARY = "summary.json"
EXPORTED = "gates.pt"  # written last
GATES_FILES = ("gates.safetensors", "adapter_weights.tsv", "adapter")
FIGURES = ("heat_map.png", "histogram.png", "training_curves.png")
WRITTEN = (EXPORTED, *GATES_FILES, *FIGURES, *LOGS, SUMMARY)
PARTIAL = ".partial"  # where a checkpoint is written until it is complete
FORMAT = 2  # of what a run needs to be continued; 0.1 noted none
SHARED_SECONDS = 60  # in which a network disk shows what another machine wrote


# --- checkpoints


@contextmanager
def new_checkpoint(
    output_dir: Path,
    step: int,
    keep: int | None,
    is_main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> Iterator[Path]:
    """Yield a path to write the checkpoint of ``step`` to.

    It becomes ``checkpoint-STEP`` when the block ends without error, and is then complete on the
    disk.  After an error, such as a full disk, the earlier ones are as they were.

    Args:
        keep: how many stay; None: all.
        is_main: whether this process moves and deletes folders.
        wait: barrier of all processes.
    """
    partial = output_dir / PARTIAL
    name = f"checkpoint-{step}"
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    wait()
    yield partial / name
    wait()
    if is_main:
        # a rename may reach the disk before the content: power that fails between would leave
        # empty files under the final name
        for path in [*(partial / name).rglob("*"), partial / name]:
            _flush(path)
        (partial / name).rename(output_dir / name)
        _flush(output_dir)
        partial.rmdir()
        rotate_checkpoints(str(output_dir), save_total_limit=keep)
    wait()


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, None if there is none."""
    newest = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return None if newest is None else Path(newest)


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values atomically."""
    # torch reports a full disk as an error of its own, without the file's name
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def load_tensors(path: Path) -> dict[str, Any]:
    """Read what :func:`save_tensors` wrote, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _flush(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the folder


def check_output_dir(folder: Path, config: dict[str, Any], resume: bool) -> Path | None:
    """Return the checkpoint to resume from, None if there is none yet.

    Raises:
        ValueError: if the folder holds another run, files that no run wrote, a run of an earlier
            version, or this run and ``resume`` is off.
        StoreInUseError: if another process is writing it.
    """
    check_folder(folder)
    noted = folder / RUN_CONFIG
    check_free(folder)
    newest = last_checkpoint(folder)
    if not noted.exists():
        found = [name for name in WRITTEN if (folder / name).exists()]
        if found or newest is not None:
            names = ", ".join(found) or "checkpoints"
            raise ValueError(
                f"{folder} holds {names}, but no {RUN_CONFIG}, which every run notes first: take "
                "another --output-dir"
            )
        return None
    if not resume:
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume, or take another --output-dir"
        )
    before = read_json(noted)
    # another version has a few settings more or less, another program has others
    if not isinstance(before, dict) or 2 * len(before.keys() ^ config.keys()) > len(
        before.keys() | config.keys()
    ):
        raise ValueError(f"{folder} holds a run of another command: take another --output-dir")
    log = folder / LOG
    has_log = log.exists() and log.stat().st_size
    if newest is None and not (folder / EXPORTED).exists() and not has_log:
        return None  # nothing that a new run would overwrite
    if before.get("format", 1) != config.get("format", 1):
        raise ValueError(
            f"{folder} holds a run of another version of rlkv, which this one does not continue: "
            "finish it with that version, or take another --output-dir"
        )
    may_change = RESUMABLE_KEYS
    if _rates_follow_from_steps(config):
        may_change = may_change - {"max_steps", "num_train_epochs"}
    differing = []
    for key, value in config.items():
        if key not in may_change and before.get(key, value) != value:
            differing.append(f"{key} {before[key]!r} -> {value!r}")
    if differing:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(differing)}): use the same ones "
            "to continue it, or another --output-dir"
        )
    return newest


def _rates_follow_from_steps(config: dict[str, Any]) -> bool:
    """Return whether the learning rate of a step depends on the number of all steps."""
    kind = config.get("lr_scheduler_type", "constant")
    if kind == "constant":
        return False
    is_share = 0 < config.get("trl", {}).get("warmup_steps", 0) < 1  # of all steps
    return is_share or kind not in ("constant_with_warmup", "inverse_sqrt")


def refuse_retraining(folder: Path) -> None:
    """Raise ValueError if a finished run has no checkpoint, so that it would be trained anew."""
    if (folder / EXPORTED).exists() and last_checkpoint(folder) is None:
        raise ValueError(
            f"{folder} holds a finished run whose checkpoints are gone, and training again would "
            "overwrite it: take another --output-dir"
        )


def link(place: Path, target: Path) -> None:
    """Make ``place`` a link to ``target``; an older link is replaced, a file or folder is not."""
    if place.exists() and not place.is_symlink():
        print(
            f"{place} is a file of its own and was left as it is: the gates are in {target}",
            flush=True,
        )
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))
    print(f"{place} -> {target}", flush=True)


class RunFolder:
    """The folder of one run.

    Args:
        config: all that defines the run, JSON-able.

    Attributes:
        checkpoint: the one to resume from, None for a new run.

    Raises:
        ValueError, StoreInUseError: as :func:`check_output_dir`.
    """

    def __init__(self, path: Path, settings: RunSettings, config: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.config = {"format": FORMAT, "model_files": files_digest(settings.model), **config}
        self.checkpoint = check_output_dir(path, self.config, settings.resume)
        self.wandb: WandbLog | None = None
        if settings.wandb != "disabled":
            require("wandb", "wandb")  # missing, it is said before a model is loaded
            self.wandb = WandbLog(settings, self.config, path)

    def write_config(self) -> None:
        """Take the folder for this process, and note the settings, which a continued run must have.

        Raises:
            StoreInUseError: if another process is writing the folder, or has since this one looked.
        """
        hold_folder(self.path)
        if check_output_dir(self.path, self.config, self.settings.resume) != self.checkpoint:
            raise StoreInUseError(
                f"{self.path} was written by another process meanwhile: run the command again"
            )
        write_json(self.path / RUN_CONFIG, self.config)

    def check_shared(self) -> None:
        """Raise ValueError unless this process sees the settings that the main one has noted."""
        noted = self.path / RUN_CONFIG
        for _ in range(SHARED_SECONDS):
            found = read_json(noted) if noted.exists() else {}
            if found == self.config:
                return
            time.sleep(1)
        if found | {"model_files": self.config["model_files"]} == self.config:
            raise ValueError(
                f"{self.settings.model} has other files on this machine than on the main "
                "process's: copy them"
            )
        raise ValueError(
            f"{self.path} is not the main process's folder: with several machines --output-dir "
            "must be on a disk that all of them share"
        )

    def published(self) -> dict[str, Any]:
        """Return the settings that a gates file tells."""
        hidden = UNPUBLISHED_KEYS | {"format", "model_files"}
        return {key: value for key, value in self.config.items() if key not in hidden}

    def gates(self, model: Any, mean_alpha: Tensor, method: str, steps: int) -> HeadGates:
        """Return the gates of ``model`` after ``steps`` steps, with what a gates file tells."""
        settings = self.settings
        return HeadGates(
            alpha=gates_matrix(model),
            mean_alpha=mean_alpha,
            heads=gate_counts(model),
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
            curves: keys and labels of the shares and means of the log that ``training_curves.png``
                shows.
        """
        records = read_log(self.path / LOG)
        gates.training["final"] = gate_shares(gates.alpha[gates.gated])
        for record in records:  # the newest figures on held-out problems, without their prefix
            names = [name for name in record if name.startswith(HELD_OUT)]
            if names:
                found = {name.removeprefix(HELD_OUT): record[name] for name in names}
                gates.training[share.HELD_OUT] = found
        for name in GATES_FILES:
            if name.endswith(".tsv") and gates.heads is not None:
                continue  # it has no place for layers without gates
            gates.save(self.path / name)
        plot_gates(gates, self.path / "heat_map.png")
        plot_histogram(gates, self.path / "histogram.png")
        figure, axes = curve_figure(
            "Training of the gates", "optimizer step", "share or mean, 0 to 1"
        )
        steps = [record["step"] for record in records]
        for key, label in curves:
            axes.plot(steps, [record[key] for record in records], label=label)
        axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=TEXT_SIZE)
        save_figure(figure, self.path / "training_curves.png")
        summary = {"training": gates.training, "config": self.config, **provenance()}
        write_json(self.path / SUMMARY, summary)
        gates.save(self.path / EXPORTED)
        free_folder(self.path)
        if self.settings.gates_link is not None:
            link(Path(self.settings.gates_link), self.path / EXPORTED)
        if self.wandb is not None:
            self.wandb.finish([self.path / "gates.safetensors", self.path / "heat_map.png"])


# --- reading it back


@dataclass(frozen=True)
class RunLogs:
    """Logs that a run has written so far.

    Attributes:
        config: its settings; empty if it has noted none.
        records, gates, samples: of ``log.jsonl``, ``gates.jsonl`` and ``samples.jsonl``.
        finished: whether the gates were exported after the last step.
    """

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    gates: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    finished: bool

    @classmethod
    def read(cls, folder: Path) -> RunLogs:
        """Read the logs of a run of any finder, also while it trains.

        Raises:
            ValueError: if ``folder`` is not that of a run.
        """
        config = _object(folder / RUN_CONFIG)
        summary = _object(folder / SUMMARY)
        if not config and not (folder / LOG).exists():
            raise ValueError(
                f"{folder} holds neither {RUN_CONFIG} nor {LOG}: give the output folder of "
                "rlkv-train or rlkv-distill"
            )
        # a run that is continued with other settings notes them at its start
        finished = (folder / EXPORTED).exists() and summary.get("config", config) == config
        records, gates, samples = (read_records(folder / name) for name in LOGS)
        return cls(folder, config, records, gates, samples, finished)


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}: give the output folder of rlkv-train or "
            "rlkv-distill"
        )
    return content
