"""The output folder of a run: its settings, checkpoints, logs, W&B, alerts, and the export."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from rlkv.attention.head_gate import gate_counts, gate_shares, gate_values, gates_matrix
from rlkv.gates import publish as share
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates, plot_histogram
from rlkv.models.layout import gated_places
from rlkv.models.loading import files_digest
from rlkv.models.shape import ModelShape
from rlkv.training.config import RESUMABLE_KEYS, UNPUBLISHED_KEYS, RunSettings
from rlkv.utils.files import (
    TEXT_SIZE,
    append_line,
    check_folder,
    curve_figure,
    read_json,
    read_log,
    save_figure,
    write_bytes,
    write_json,
    write_jsonl,
)
from rlkv.utils.runtime import provenance, require
from rlkv.utils.store import StoreInUseError, check_free, free_folder, hold_folder

LOG = "log.jsonl"  # a record per step
GATES_LOG = "gates.jsonl"  # all gates after every step
SAMPLES_LOG = "samples.jsonl"  # sampled texts with their verdict
LOGS = (LOG, GATES_LOG, SAMPLES_LOG)
HELD_OUT = "held_out/"  # how figures on held-out problems begin; not every record has them
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


# --- alerts

SPAN = 5  # steps that a mean is taken over
FALLEN = 0.5  # of the best mean reward so far
LEARNABLE = 0.2  # best mean reward below which nothing has fallen
SPREADLESS = 0.95  # share of groups
TRUNCATED = 0.5  # share of completions, and at least twice that of the first steps


class Alert(NamedTuple):
    """A sign that a run collapses, in words."""

    title: str
    text: str


def alerts(records: Sequence[dict[str, Any]]) -> list[Alert]:
    """Return what is wrong after the last of ``records``.

    Figures that a finder does not log raise no alert.
    """
    if not records:
        return []
    last = records[-1]
    found = []
    reward = _mean(records[-SPAN:], "reward/mean")
    best, end = _best_reward(records)
    if reward is not None and best >= LEARNABLE and reward < FALLEN * best:
        text = (
            f"The mean reward fell from {best:.2f} (steps {records[end - SPAN]['step']} to "
            f"{records[end - 1]['step']}) to {reward:.2f} (the last {SPAN} steps), with "
            f"{last['gates/below_0.5']:.0%} of the gates below 0.5. The penalty takes heads that "
            "the model needs: lower l1_beta or raise tau. gates.jsonl has the gates of the steps "
            "before the fall."
        )
        found.append(Alert("The reward has collapsed", text))
    spread = _mean(records[-SPAN:], "reward/zero_spread_share")
    if reward is not None and reward < 0.5 and spread is not None and spread >= SPREADLESS:
        text = (
            f"In the last {SPAN} steps {spread:.0%} of the groups had samples of equal reward, "
            f"with a mean reward of {reward:.2f}: nothing tells the gates what to keep. Take "
            "easier problems, more samples per prompt or a lower l1_beta."
        )
        found.append(Alert("No group has a spread", text))
    first = _mean(records[:SPAN], "response/truncated_share")
    cut = _mean(records[-SPAN:], "response/truncated_share")
    if first is not None and cut is not None and cut >= max(TRUNCATED, 2 * first):
        text = (
            f"In the last {SPAN} steps {cut:.0%} of the completions reached "
            f"max_completion_length, {first:.0%} in the first {SPAN}. Look whether the texts "
            "repeat themselves: a model does that after losing too many heads."
        )
        found.append(Alert("Completions no longer end", text))
    if last.get("gates/below_0.1", 0) >= 1:
        text = (
            f"Step {last['step']} leaves no head open: their order is that of noise and of the "
            "means over training. Lower the weight of the penalty, or take the gates of an earlier "
            "step from gates.jsonl."
        )
        found.append(Alert("All gates are below 0.1", text))
    if number := last.get("train/skipped_steps", 0):
        text = f"The gradients of {number} of {last['step']} steps were not finite."
        found.append(Alert("Steps were left out", text))
    return found


def _mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean over ``SPAN`` records, None if not all of them have the figure."""
    values = [record[name] for record in records if name in record]
    return fmean(values) if len(values) == SPAN else None


def _best_reward(records: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Return the best mean reward before the last ``SPAN`` steps, and where its span ends."""
    ends = range(SPAN, len(records) - SPAN + 1)
    means = [(_mean(records[end - SPAN : end], "reward/mean") or 0.0, end) for end in ends]
    return max(means, default=(0.0, SPAN))


# --- logs


def append_record(path: Path, step: int, record: Mapping[str, Any]) -> None:
    """Add a line to a log."""
    append_line(path, {"step": step, **record})


def append_gates(folder: Path, step: int, alpha: list[list[float]], heads: Sequence[int]) -> None:
    """Add a line to ``gates.jsonl``, with ``heads`` (of each layer) where not all are as many."""
    record: dict[str, Any] = {"alpha": alpha}
    if min(heads) < len(alpha[0]):
        record["heads"] = list(heads)
    append_record(folder / GATES_LOG, step, record)


class FinderLog:
    """Writes ``log.jsonl`` and ``gates.jsonl`` of a finder that has no trainer, from their start.

    heads: how many gates each layer has.
    """

    def __init__(self, run: RunFolder, name: str | None, heads: Sequence[int]) -> None:
        self.run = run
        self.heads = heads
        self.records: list[dict[str, Any]] = []
        for log in (LOG, GATES_LOG):
            (run.path / log).unlink(missing_ok=True)
        if run.wandb is not None:
            run.wandb.start(name)

    def append(self, record: Mapping[str, Any], alpha_LH: Tensor) -> None:
        """Log a step, to W&B too."""
        step = len(self.records) + 1
        self.records.append({"step": step, **record})
        append_record(self.run.path / LOG, step, record)
        append_gates(self.run.path, step, alpha_LH.tolist(), self.heads)
        if self.run.wandb is not None:
            has_gate = gated_places(self.heads, *alpha_LH.shape)
            self.run.wandb.log(self.records, alpha_LH[has_gate], {}, [])


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
        records, gates, samples = (_lines(folder / name) for name in LOGS)
        return cls(folder, config, records, gates, samples, finished)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return ``(step, value)`` of the records that have this figure."""
        found = [record for record in self.records if record.get(name) is not None]
        return [(record["step"], record[name]) for record in found]


def _lines(path: Path) -> list[dict[str, Any]]:
    records = read_log(path) if path.exists() else []
    if not all(isinstance(record, dict) and "step" in record for record in records):
        raise ValueError(f"{path} is not the log of a run: a line of it names no step")
    return records


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}: give the output folder of rlkv-train or "
            "rlkv-distill"
        )
    return content


def cut_logs(folder: Path, steps: int) -> None:
    """Drop the records beyond a checkpoint after ``steps`` steps."""
    for path in [folder / name for name in LOGS]:
        if path.exists():
            write_jsonl(path, [of for of in read_log(path) if of["step"] <= steps])


class RunLog(TrainerCallback):
    """Writes the logs, plots, sampled texts and alerts of a run, and sends them to W&B.

    After a resume the records beyond the checkpoint are dropped: their steps are repeated.

    Args:
        get_samples: returns the texts of the last rollout.
        sample_steps: steps between sampled texts, besides those of the first; 0: none.
    """

    def __init__(
        self,
        run: RunFolder,
        make_gates: Callable[[], HeadGates],
        get_samples: Callable[[], list[dict[str, Any]]] = list,
        sample_steps: int = 0,
    ) -> None:
        self.run = run
        self.make_gates = make_gates
        self.get_samples = get_samples
        self.sample_steps = sample_steps
        self.records: list[dict[str, Any]] = []
        self.known: set[str] = set()  # titles of alerts that were told

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        cut_logs(self.run.path, state.global_step)
        self.records = _lines(self.run.path / LOG)
        self.known = {alert.title for alert in alerts(self.records)}
        if self.run.wandb is not None:
            self.run.wandb.start(args.run_name)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if "gates/mean" not in logs:
            return
        folder = self.run.path
        step = state.global_step
        alpha = gates_matrix(model)
        rounded = [[round(value, 6) for value in row] for row in alpha.tolist()]
        append_record(folder / LOG, step, logs)
        append_gates(folder, step, rounded, gate_counts(model))
        every = self.sample_steps
        samples = self.get_samples() if every and (step == 1 or step % every == 0) else []
        for sample in samples:
            append_record(folder / SAMPLES_LOG, step, sample)
        images = {}
        if self.run.settings.image_steps and step % self.run.settings.image_steps == 0:
            for kind, plot in (("heat_map", plot_gates), ("histogram", plot_histogram)):
                images[kind] = folder / "images" / f"{kind}_{step:06d}.png"
                plot(self.make_gates(), images[kind])
        self.records.append({"step": step, **logs})
        wandb = self.run.wandb
        if wandb is not None:
            wandb.log(self.records, gate_values(model), images, samples)
        found = alerts(self.records)
        for alert in found:
            if alert.title not in self.known:
                print(f"warning: {alert.title}. {alert.text}", flush=True)
                if wandb is not None:
                    wandb.run.alert(title=alert.title, text=alert.text)
        self.known = {alert.title for alert in found}


# --- Weights & Biases

# sections and the beginnings of the figures that they show; the first that fits counts
SECTIONS = {
    "convergence": (
        "gates/grad_norm",
        "reward/std",
        "penalty/",
        "policy/loss",
        "loss/distill",
        "rollout/logprob_diff_mean",
        "rollout/truncated_share",
    ),
    "collapse": (
        "gates/below_0.5",
        "reward/",
        "response/",
        "held_out/",
        "teacher/right",
        "traces/kept",
        "train/skipped_steps",
    ),
    "heads": ("gates/",),
    "time": ("time/",),
    "other": ("",),
}
# figures on the chart of reward against sparsity
AGAINST_SPARSITY = ("reward/mean", "gates/below_0.5", "held_out/accuracy", "teacher/right")


@dataclass
class WandbLog:
    """A run in Weights & Biases; without a login it works offline and says so."""

    settings: RunSettings
    config: dict[str, Any]
    folder: Path
    run: Any = None

    def start(self, name: str | None) -> None:
        """Start the run, or continue that of an earlier attempt."""
        wandb = require("wandb", "wandb")
        mode = self.settings.wandb
        if mode == "online" and not wandb.login(prompt=False):
            print(
                "W&B: no login found, logging offline (later: wandb login, then wandb sync)",
                flush=True,
            )
            mode = "offline"
        identity = self.folder / "wandb_id.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=self.settings.wandb_project,
            name=name,
            id=identity.read_text().strip(),
            resume="allow",
            mode=mode,
            dir=str(self.folder),
            config=self.config,
        )
        print(f"W&B: {self.run.url or self.run.dir}", flush=True)  # its own output is silent

    def log(
        self,
        records: Sequence[dict[str, Any]],
        gates: Tensor,
        images: Mapping[str, Path],
        samples: Sequence[dict[str, Any]],
    ) -> None:
        """Send the last of ``records``, with the gates, plots and texts of its step."""
        import wandb

        sent: dict[str, Any] = {"heads/gates": wandb.Histogram(gates.tolist())}
        for name, value in records[-1].items():
            if name != "step":
                section = next(of for of, starts in SECTIONS.items() if name.startswith(starts))
                sent[f"{section}/{name.replace('/', '_')}"] = value
        for kind, path in images.items():
            sent[f"heads/{kind}"] = wandb.Image(str(path))
        if images:
            sent["collapse/reward_against_sparsity"] = _against_sparsity(records)
        if samples:
            rows = [list(row.values()) for row in samples]
            sent["samples/texts"] = wandb.Table(list(samples[0]), rows)
        self.run.log(sent, step=records[-1]["step"])

    def finish(self, exported: Iterable[Path]) -> None:
        """End the run with the exported gates as artifact, if a step was made."""
        if self.run is None:
            return
        import wandb

        artifact = wandb.Artifact(f"gates-{self.run.id}", type="gates")
        for path in exported:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()


def _against_sparsity(records: Sequence[dict[str, Any]]) -> Any:
    """Return several curves on one chart, which W&B draws of a table only."""
    import wandb

    steps: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name.partition("_at_")[0] in AGAINST_SPARSITY:
                steps.setdefault(name, []).append(record["step"])
                values.setdefault(name, []).append(value)
    return wandb.plot.line_series(
        list(steps.values()),
        list(values.values()),
        keys=list(steps),
        title="Reward against sparsity",
        xname="optimizer step",
    )


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
    differing = []
    for key, value in config.items():
        if key not in RESUMABLE_KEYS and before.get(key, value) != value:
            differing.append(f"{key} {before[key]!r} -> {value!r}")
    if differing:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(differing)}): use the same ones "
            "to continue it, or another --output-dir"
        )
    return newest


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
