"""The output folder of a run: its settings, checkpoints, loggers, and the export at its end."""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlkv.attention.head_gate import gate_shares, gates_matrix
from rlkv.gates import publish as share
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates, plot_histogram
from rlkv.models.shape import ModelShape
from rlkv.training.config import RunSettings
from rlkv.utils.files import (
    TEXT_SIZE,
    append_line,
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

_NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"  # where a checkpoint is written until it is complete
CHECKSUMS = "checksums.json"  # SHA-256 of all other files of a checkpoint


@contextmanager
def new_checkpoint(
    output_dir: Path,
    step: int,
    keep: int | None,
    is_main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> Iterator[Path]:
    """A path to write the checkpoint of ``step`` to.

    It becomes ``checkpoint-STEP`` when the block ends without error.

    Then damaged checkpoints and all but the ``keep`` newest are deleted (None: all others stay).
    After an error, such as a full disk, the earlier ones are as they were.

    Args:
        is_main: whether this process moves and deletes folders.
        wait: barrier of all processes.
    """
    target, partial = output_dir / f"checkpoint-{step}", output_dir / PARTIAL
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    wait()
    yield partial / target.name
    wait()
    if is_main:
        _seal(partial / target.name)
        if target.exists():  # a damaged one, behind the one that the run resumed from
            shutil.rmtree(target)
        (partial / target.name).rename(target)
        _to_disk(output_dir)
        older = [path for other, path in sorted(_checkpoints(output_dir).items()) if other <= step]
        damaged = [path for path in older if _damaged(path) is not None]
        whole = [path for path in older if path not in damaged]
        for path in [*damaged, *whole[: -keep if keep else 0]]:
            shutil.rmtree(
                path.rename(partial / path.name)
            )  # renamed first: what is half deleted cannot be resumed
        partial.rmdir()
    wait()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose files are as they were written, with a warning for newer ones.

    None if none exists.

    Raises:
        ValueError: if there are checkpoints, and all of them are damaged.
    """
    found = _checkpoints(folder)
    for step in sorted(found, reverse=True):
        damaged = _damaged(found[step])
        if damaged is None:
            return found[step]
        warnings.warn(
            f"{found[step]} is damaged ({damaged}): looking for an earlier checkpoint", stacklevel=2
        )
    if found:
        raise ValueError(
            f"all checkpoints in {folder} are damaged: remove them to start again, or restore one"
        )
    return None


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    buffer = (
        io.BytesIO()
    )  # torch reports a full disk as an error of its own, without the file's name
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def load_tensors(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints by their steps; other folders, such as a copy named ``checkpoint-40-best``, are
    the user's.
    """
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(match[1]): path for match, path in found if match}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)


def _to_disk(path: Path) -> None:
    """What was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(folder: Path) -> None:
    """Note the checksums of the files, and have all of them on the disk."""
    files = _files(folder)
    sums = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    for path in files:
        _to_disk(path)
    write_json(folder / CHECKSUMS, sums)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _to_disk(path)


def _damaged(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None: nothing, or it has no checksums, as those of trl's own
    trainers.
    """
    noted = folder / CHECKSUMS
    if not noted.exists():
        return None
    try:
        sums = read_json(noted).items()
    except (ValueError, AttributeError, OSError):
        return f"{CHECKSUMS} is not readable"
    for name, wanted in sums:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            return f"{name} has changed since it was written"
    return None


SPAN = 5  # steps that a mean is taken over
FALLEN = 0.5  # of the best mean reward so far
LEARNABLE = 0.2  # best mean reward below which nothing has fallen
SPREADLESS = 0.95  # share of groups
TRUNCATED = 0.5  # share of completions, and at least twice that of the first steps


class Alert(NamedTuple):
    title: str
    text: str


def alerts(records: Sequence[dict[str, Any]]) -> list[Alert]:
    """What is wrong after the last of ``records``.

    Figures that a finder does not log raise no alert.
    """
    if not records:
        return []
    found = [
        _reward(records),
        _no_signal(records),
        _truncation(records),
        _gates(records[-1]),
        _skipped(records[-1]),
    ]
    return [alert for alert in found if alert is not None]


def _mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return fmean(values) if len(values) == SPAN else None


def _reward(records: Sequence[dict[str, Any]]) -> Alert | None:
    now = _mean(records[-SPAN:], "reward/mean")
    means = [
        _mean(records[end - SPAN : end], "reward/mean")
        for end in range(SPAN, len(records) - SPAN + 1)
    ]
    known = [(mean, end) for end, mean in enumerate(means, start=SPAN) if mean is not None]
    if now is None or not known:
        return None
    best, end = max(known)
    if best < LEARNABLE or now >= FALLEN * best:
        return None
    steps = f"{records[end - SPAN]['step']} to {records[end - 1]['step']}"
    return Alert(
        "The reward has collapsed",
        f"The mean reward fell from {best:.2f} (steps {steps}) to {now:.2f} (the last {SPAN} "
        "steps), with "
        f"{records[-1]['gates/below_0.5']:.0%} of the gates below 0.5. The penalty takes heads "
        "that the model needs: "
        "lower l1_beta or raise tau. gates.jsonl has the gates of the steps before the fall.",
    )


def _no_signal(records: Sequence[dict[str, Any]]) -> Alert | None:
    spread, reward = (
        _mean(records[-SPAN:], name) for name in ("reward/zero_spread_share", "reward/mean")
    )
    if spread is None or reward is None or spread < SPREADLESS or reward >= 0.5:
        return None
    return Alert(
        "No group has a spread",
        f"In the last {SPAN} steps {spread:.0%} of the groups had samples of equal reward, with a "
        "mean reward of "
        f"{reward:.2f}: nothing tells the gates what to keep. Take easier problems, more samples "
        "per prompt or a lower "
        "l1_beta.",
    )


def _truncation(records: Sequence[dict[str, Any]]) -> Alert | None:
    name = "response/truncated_share"
    first, now = _mean(records[:SPAN], name), _mean(records[-SPAN:], name)
    if first is None or now is None or now < TRUNCATED or now < 2 * first:
        return None
    return Alert(
        "Completions no longer end",
        f"In the last {SPAN} steps {now:.0%} of the completions reached max_completion_length, "
        f"{first:.0%} in the "
        f"first {SPAN}. Look whether the texts repeat themselves: a model does that after losing "
        "too many heads.",
    )


def _gates(last: dict[str, Any]) -> Alert | None:
    if last.get("gates/below_0.1", 0) < 1:
        return None
    return Alert(
        "All gates are below 0.1",
        f"Step {last['step']} leaves no head open: their order is that of noise and of the means "
        "over training. Lower "
        "the weight of the penalty, or take the gates of an earlier step from gates.jsonl.",
    )


def _skipped(last: dict[str, Any]) -> Alert | None:
    number = last.get("train/skipped_steps", 0)
    if not number:
        return None
    return Alert(
        "Steps were left out",
        f"The gradients of {number} of {last['step']} steps were not finite; nonfinite_step_*.pt "
        "has such batches.",
    )


LOG = "log.jsonl"  # a record per step
GATES_LOG = "gates.jsonl"  # all gates after every step
SAMPLES_LOG = "samples.jsonl"  # sampled texts with their verdict
LOGS = (LOG, GATES_LOG, SAMPLES_LOG)
HELD_OUT = "held_out/"  # how figures on held-out problems begin; not every record has them
RUN_CONFIG = "run_config.json"
SUMMARY = "summary.json"
EXPORTED = "gates.pt"  # written last


def append_record(path: Path, step: int, record: Mapping[str, Any]) -> None:
    """Add a line to a log."""
    append_line(path, {"step": step, **record})


@dataclass(frozen=True)
class RunLogs:
    """What a run has written so far.

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
        """Of a run of any finder, also while it trains.

        ``ValueError`` if ``folder`` is not that of a run.
        """
        config, summary = _object(folder / RUN_CONFIG), _object(folder / SUMMARY)
        if not config and not (folder / LOG).exists():
            raise ValueError(
                f"{folder} holds neither {RUN_CONFIG} nor {LOG}: give the output folder of "
                "rlkv-train or rlkv-distill"
            )
        # a run that is continued with other settings notes them at its start
        finished = (folder / EXPORTED).exists() and summary.get("config", config) == config
        records, gates, samples = (_lines(folder / name) for name in LOGS)
        return cls(folder, config, records, gates, samples, finished)

    @property
    def names(self) -> list[str]:
        """Of all figures, in the order of the log."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """``(step, value)`` of the records that have this figure."""
        return [
            (record["step"], record[name])
            for record in self.records
            if record.get(name) is not None
        ]


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


class JsonlLog(TrainerCallback):
    """``log.jsonl``: one record per step; ``gates.jsonl``: all gates after every step.

    It comes before whatever else writes to the folder or reads the log.

    After a resume the records beyond the checkpoint are dropped: their steps are repeated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for path in (self.folder / name for name in LOGS):
            if path.exists():
                write_jsonl(path, [r for r in read_log(path) if r["step"] <= state.global_step])

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if "gates/mean" in logs:
            alpha = [[round(value, 6) for value in row] for row in gates_matrix(model).tolist()]
            append_record(self.folder / LOG, state.global_step, logs)
            append_record(self.folder / GATES_LOG, state.global_step, {"alpha": alpha})


class GateImages(TrainerCallback):
    """A heat map and a histogram every ``every`` steps (0: never) in ``images/``."""

    def __init__(self, folder: Path, every: int, make_gates: Callable[[], HeadGates]) -> None:
        self.folder, self.every, self.make_gates = folder / "images", every, make_gates

    def paths(self, step: int) -> dict[str, Path]:
        """The figures of ``step``; empty if none are due."""
        due = ("heat_map", "histogram") if self.every and step % self.every == 0 else ()
        return {kind: self.folder / f"{kind}_{step:06d}.png" for kind in due}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if paths := self.paths(state.global_step):
            plot_gates(self.make_gates(), paths["heat_map"])
            plot_histogram(self.make_gates(), paths["histogram"])


class SampleLog(TrainerCallback):
    """``samples.jsonl``: texts that ``get_samples`` returns, every ``every`` steps and after the
    first (0: never).
    """

    def __init__(
        self, folder: Path, every: int, get_samples: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self.path, self.every, self.get_samples = folder / SAMPLES_LOG, every, get_samples

    def due(self, step: int) -> list[dict[str, Any]]:
        """The samples of ``step``; empty if none are due."""
        return self.get_samples() if self.every and (step == 1 or step % self.every == 0) else []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" in logs:
            for sample in self.due(state.global_step):
                append_record(self.path, state.global_step, sample)


class CollapseWatch(TrainerCallback):
    """Tells signs of a collapse (:mod:`rlkv.training.run_folder`) when they appear, on stdout and
    to ``tell``.
    """

    def __init__(self, folder: Path, tell: Sequence[Callable[[Alert], None]]) -> None:
        self.log, self.tell = folder / LOG, tell

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records = read_log(self.log) if self.log.exists() else []
        self.known = {alert.title for alert in alerts(self.records)}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        self.records.append({"step": state.global_step, **logs})
        found = alerts(self.records)
        for alert in found:
            if alert.title not in self.known:
                print(f"warning: {alert.title}. {alert.text}", flush=True)
                for tell in self.tell:
                    tell(alert)
        self.known = {alert.title for alert in found}


class Chart(NamedTuple):
    """Figures of the log on one pair of axes: labels by name, and whether all of them lie in [0,
    1].
    """

    title: str
    lines: Mapping[str, str]
    share: bool = False

    def drawn(self, names: Iterable[str]) -> dict[str, str]:
        """Labels of those of ``names`` that belong here.

        ``NAME_at_0.5`` is NAME at a sparsity of 0.5.
        """
        found = {}
        for name in names:
            base, _, sparsity = name.partition("_at_")
            if name in self.lines:
                found[name] = self.lines[name]
            elif base in self.lines and sparsity:
                found[name] = f"{self.lines[base]} at sparsity {sparsity}"
        return found


# question and charts by the name that the section has in W&B
SECTIONS: dict[str, tuple[str, tuple[Chart, ...]]] = {
    "collapse": (
        "Is it collapsing?",
        (
            Chart(
                "Reward against sparsity",
                {
                    "reward/mean": "mean reward",
                    "gates/below_0.5": "gates below 0.5",
                    "held_out/accuracy": "held-out accuracy",
                    "teacher/right": "teacher's accuracy",
                    "traces/kept": "exp(-loss): solutions that stay as they are",
                },
                share=True,
            ),
            Chart(
                "Groups and completions",
                {
                    "reward/zero_spread_share": "groups without spread",
                    "response/truncated_share": "truncated completions",
                    "held_out/truncated_share": "truncated held-out completions",
                },
                share=True,
            ),
            Chart(
                "Length of completions, tokens",
                {
                    "response/length_mean": "mean",
                    "response/length_max": "longest",
                    "held_out/length_mean": "held-out mean",
                },
            ),
            Chart("Steps left out", {"train/skipped_steps": "gradients not finite, so far"}),
        ),
    ),
    "convergence": (
        "Is it converging?",
        (
            Chart("Penalty", {"penalty/beta_prime": "beta'", "penalty/value": "beta' * mean gate"}),
            Chart(
                "Loss",
                {
                    "policy/loss": "policy",
                    "loss/distill": "distillation",
                    "loss": "loss of the solutions",
                },
            ),
            Chart("Gradient of the gates", {"gates/grad_norm": "norm"}),
            Chart("Standard deviation of rewards", {"reward/std": "over the step"}),
            Chart(
                "Rollout against trainer, log-probabilities",
                {
                    "rollout/logprob_diff_mean": "mean difference",
                    "rollout/truncated_share": "weights above the cap",
                },
            ),
        ),
    ),
    "heads": (
        "Which heads are left?",
        (
            Chart(
                "Gates",
                {
                    "gates/mean": "mean",
                    "gates/below_0.1": "below 0.1",
                    "gates/at_0": "at 0",
                    "gates/at_1": "at 1",
                },
                share=True,
            ),
        ),
    ),
    "time": (
        "Where does the time go?",
        (
            Chart(
                "Seconds per step",
                {
                    "time/step_s": "step",
                    "time/rollout_s": "rollout",
                    "time/reward_s": "reward",
                    "time/update_s": "update",
                    "time/held_out_s": "held-out problems",
                },
            ),
            Chart("CPU seconds per step", {"time/step_cpu_s": "all threads"}),
        ),
    ),
}


def section_of(name: str) -> str:
    """The section of a figure; those of no chart are in ``other``."""
    for section, (_, charts) in SECTIONS.items():
        if any(chart.drawn([name]) for chart in charts):
            return section
    return "other"


class WandbLog(TrainerCallback):
    """Everything that the folder of a run gets, to W&B.

    Without a login it works offline and says so.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        config: dict[str, Any],
        folder: Path,
        images: GateImages | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        self.mode, self.project, self.config, self.folder = mode, project, config, folder
        self.images, self.samples = images, samples
        self.run: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wandb = require("wandb", "wandb")
        mode = self.mode
        if mode == "online" and not wandb.login(prompt=False):
            print(
                "W&B: no login found, logging offline (later: wandb login, then wandb sync)",
                flush=True,
            )
            mode = "offline"
        identity = self.folder / "wandb_id.txt"  # a resumed run keeps its id
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=self.project,
            name=args.run_name,
            id=identity.read_text().strip(),
            resume="allow",
            mode=mode,
            dir=str(self.folder),
            config=self.config,
        )
        print(f"W&B: {self.run.url or self.run.dir}", flush=True)  # its own output is silent

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
        import wandb

        step = state.global_step
        record: dict[str, Any] = {
            f"{section_of(name)}/{name.replace('/', '_')}": logs[name] for name in logs
        }
        record["heads/gates"] = wandb.Histogram(gates_matrix(model).flatten().tolist())
        paths = {} if self.images is None else self.images.paths(step)
        for kind, path in paths.items():
            record[f"heads/{kind}"] = wandb.Image(str(path))
        if paths:
            record["collapse/reward_against_sparsity"] = self._against_sparsity()
        if self.samples is not None and (rows := self.samples.due(step)):
            record["samples/texts"] = wandb.Table(
                list(rows[0]), [list(row.values()) for row in rows]
            )
        self.run.log(record, step=step)

    def _against_sparsity(self) -> Any:
        """Curves of one chart, which W&B draws of a table only."""
        import wandb

        chart, logs = SECTIONS["collapse"][1][0], RunLogs.read(self.folder)
        curves = {label: logs.curve(name) for name, label in chart.drawn(logs.names).items()}
        xs, ys = (
            [[point[axis] for point in curve] for curve in curves.values()] for axis in (0, 1)
        )
        return wandb.plot.line_series(
            xs, ys, keys=list(curves), title=chart.title, xname="optimizer step"
        )

    def alert(self, alert: Alert) -> None:
        self.run.alert(title=alert.title, text=alert.text)

    def finish(self, exported: Iterable[Path]) -> None:
        """End the run with the exported gates as artifact; nothing if no step was made."""
        if self.run is None:
            return
        import wandb

        artifact = wandb.Artifact(f"gates-{self.run.id}", type="gates")
        for path in exported:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()


# what may differ between a run and its continuation; the problems themselves are compared by their
# digest
RESUMABLE_KEYS = {
    "wandb",
    "wandb_project",
    "resume",
    "image_steps",
    "output_dir",
    "save_steps",
    "save_total_limit",
}
RESUMABLE_KEYS |= {
    "run_name",
    "rollout_servers",
    "rollout_patience",
    "rollout_kv_gib",
    "rollout_eager",
}
RESUMABLE_KEYS |= {"max_steps", "num_train_epochs", "curriculum", "rollout_rows"}
RESUMABLE_KEYS |= {"allow_foreign_curriculum", "gates_link", "target_sparsity", "stable_steps"}
RESUMABLE_KEYS |= {"plan", "plan_gpus"}
RESUMABLE_KEYS |= {
    "held_out_steps",
    "sample_steps",
    "forward_rows",
    "elimination_sparsity",
    "elimination_budget",
}
# what a gates file does not say of its training: files of this machine, and what does not belong to
# the method
UNPUBLISHED_KEYS = {
    "curriculum",
    "haystack",
    "output_dir",
    "run_name",
    "model",
    "wandb",
    "wandb_project",
    "resume",
}
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
        ValueError: if the folder holds another run, files that no run wrote, or this run and
            ``resume`` is off.
        StoreInUseError: if another process is writing it.
    """
    noted = folder / RUN_CONFIG
    check_free(folder)
    if not noted.exists():
        found = [name for name in WRITTEN if (folder / name).exists()]
        if found or last_checkpoint(folder) is not None:
            names = ", ".join(found) or "checkpoints"
            raise ValueError(
                f"{folder} holds {names}, but no {RUN_CONFIG}, which every run notes first: take "
                "another --output_dir"
            )
        return None
    if not resume:
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume true, or take another "
            "--output_dir"
        )
    before = read_json(noted)
    # another version has a few settings more or less, another program has others
    if not isinstance(before, dict) or 2 * len(before.keys() ^ config.keys()) > len(
        before.keys() | config.keys()
    ):
        raise ValueError(f"{folder} holds a run of another command: take another --output_dir")
    newest = last_checkpoint(folder)
    log = folder / LOG
    if (
        newest is None
        and not (folder / EXPORTED).exists()
        and not (log.exists() and log.stat().st_size)
    ):
        return None  # nothing that a new run would overwrite
    differing = [
        key
        for key in config
        if key not in RESUMABLE_KEYS and before.get(key, config[key]) != config[key]
    ]
    if differing:
        changes = ", ".join(f"{key} {before[key]!r} -> {config[key]!r}" for key in differing)
        raise ValueError(
            f"{folder} holds a run with other settings ({changes}): use the same ones to continue "
            "it, or another "
            "--output_dir"
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
    """One run of ``settings`` in ``path``; ``config`` is all that defines it, JSON-able.

    ``checkpoint`` is the one to resume from, None for a new run; errors as in
    :func:`check_output_dir`.
    """

    def __init__(self, path: Path, settings: RunSettings, config: dict[str, Any]) -> None:
        self.path, self.settings, self.config = path, settings, config
        self.checkpoint = check_output_dir(path, config, settings.resume)
        self.wandb_log: WandbLog | None = None

    def write_config(self) -> None:
        """Take the folder for this process, and record the settings, for the comparison when the
        run is resumed.

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
        """Raise ValueError unless this process sees the settings that the main one has recorded."""
        for _ in range(SHARED_SECONDS):
            if (self.path / RUN_CONFIG).exists() and read_json(
                self.path / RUN_CONFIG
            ) == self.config:
                return
            time.sleep(1)
        else:
            raise ValueError(
                f"{self.path} is not the main process's folder: with several machines --output_dir "
                "must be on a disk "
                "that all of them share"
            )

    def loggers(
        self, make_gates: Callable[[], HeadGates], samples: SampleLog | None = None
    ) -> list[TrainerCallback]:
        """Figures, the logs, W&B and alerts."""
        settings = self.settings
        images = GateImages(self.path, settings.image_steps, make_gates)
        found: list[TrainerCallback] = [
            images,
            JsonlLog(self.path),
            *([] if samples is None else [samples]),
        ]
        if wandb := self.open_wandb(images, samples):
            found.append(wandb)
        tell = [] if self.wandb_log is None else [self.wandb_log.alert]
        return [*found, CollapseWatch(self.path, tell)]

    def open_wandb(
        self, images: GateImages | None = None, samples: SampleLog | None = None
    ) -> WandbLog | None:
        """W&B, where it is asked for; :meth:`export` ends its run."""
        mode, project = self.settings.wandb, self.settings.wandb_project
        if mode != "disabled":
            self.wandb_log = WandbLog(mode, project, self.config, self.path, images, samples)
        return self.wandb_log

    def published(self) -> dict[str, Any]:
        """The settings that a gates file tells."""
        return {key: value for key, value in self.config.items() if key not in UNPUBLISHED_KEYS}

    def gates(self, model: Any, mean_alpha: Tensor, method: str, steps: int) -> HeadGates:
        """The gates of ``model`` after ``steps`` steps, with what a gates file says of their
        training.
        """
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
            curves: keys and labels of the shares and means of the log that ``training_curves.png``
                shows.
        """
        records = read_log(self.path / LOG)
        gates.training["final"] = gate_shares(gates.alpha)
        figures = [
            {k.removeprefix(HELD_OUT): v for k, v in r.items() if k.startswith(HELD_OUT)}
            for r in records
        ]
        if last := [found for found in figures if found][-1:]:
            gates.training[share.HELD_OUT] = last[0]
        for name in GATES_FILES:
            gates.save(self.path / name)
        plot_gates(gates, self.path / "heat_map.png")
        plot_histogram(gates, self.path / "histogram.png")
        figure, axes = curve_figure(
            "Training of the gates", "optimizer step", "share or mean, 0 to 1"
        )
        for key, label in curves:
            axes.plot(
                [record["step"] for record in records],
                [record[key] for record in records],
                label=label,
            )
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
