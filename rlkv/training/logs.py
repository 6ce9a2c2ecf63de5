"""The logs of a run: a record of every step, alerts, sampled texts, and Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import TrainerCallback

from rlkv.attention.head_gate import gate_counts, gate_values, gates_matrix
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.publish import plot_gates, plot_histogram
from rlkv.models.layout import gated_places
from rlkv.training.config import RunSettings
from rlkv.utils.files import append_line, read_log, write_jsonl
from rlkv.utils.runtime import require

LOG = "log.jsonl"  # a record per step
GATES_LOG = "gates.jsonl"  # all gates after every step
SAMPLES_LOG = "samples.jsonl"  # sampled texts with their verdict
LOGS = (LOG, GATES_LOG, SAMPLES_LOG)
HELD_OUT = "held_out/"  # how figures on held-out problems begin; not every record has them


class LoggedRun(Protocol):
    """What logs need of a :class:`~rlkv.training.run_folder.RunFolder`."""

    path: Path
    settings: RunSettings
    wandb: WandbLog | None


# --- records


def append_record(path: Path, step: int, record: Mapping[str, Any]) -> None:
    """Add a line to a log."""
    append_line(path, {"step": step, **record})


def append_gates(folder: Path, step: int, alpha: list[list[float]], heads: Sequence[int]) -> None:
    """Add a line to ``gates.jsonl``, with ``heads`` (of each layer) where not all are as many."""
    record: dict[str, Any] = {"alpha": alpha}
    if min(heads) < len(alpha[0]):
        record["heads"] = list(heads)
    append_record(folder / GATES_LOG, step, record)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; ValueError if it is another file."""
    records = read_log(path) if path.exists() else []
    if not all(isinstance(record, dict) and "step" in record for record in records):
        raise ValueError(f"{path} is not the log of a run: a line of it names no step")
    return records


def cut_logs(folder: Path, steps: int) -> None:
    """Drop the records beyond a checkpoint after ``steps`` steps."""
    for path in [folder / name for name in LOGS]:
        if path.exists():
            write_jsonl(path, [of for of in read_log(path) if of["step"] <= steps])


class FinderLog:
    """Writes ``log.jsonl`` and ``gates.jsonl`` of a finder that has no trainer, from their start.

    heads: how many gates each layer has.
    """

    def __init__(self, run: LoggedRun, name: str | None, heads: Sequence[int]) -> None:
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


class RunLog(TrainerCallback):
    """Writes the logs, plots, sampled texts and alerts of a run, and sends them to W&B.

    After a resume the records beyond the checkpoint are dropped: their steps are repeated.

    Args:
        get_samples: returns the texts of the last rollout.
        sample_steps: steps between sampled texts, besides those of the first; 0: none.
    """

    def __init__(
        self,
        run: LoggedRun,
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
        self.records = read_records(self.run.path / LOG)
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
