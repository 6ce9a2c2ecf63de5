"""Callbacks that keep what a training does in its folder: records, gates, sampled texts, figures; and that warn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates, plot_histogram
from rlkv.training.collapse import Alert, alerts
from rlkv.training.head_gate import gates_matrix
from rlkv.training.logs import GATES_LOG, LOG, LOGS, SAMPLES_LOG, append_record
from rlkv.utils.jsonl import read_log, write_jsonl


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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
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
    """``samples.jsonl``: texts that ``get_samples`` returns, every ``every`` steps and after the first (0: never)."""

    def __init__(self, folder: Path, every: int, get_samples: Callable[[], list[dict[str, Any]]]) -> None:
        self.path, self.every, self.get_samples = folder / SAMPLES_LOG, every, get_samples

    def due(self, step: int) -> list[dict[str, Any]]:
        """The samples of ``step``; empty if none are due."""
        return self.get_samples() if self.every and (step == 1 or step % self.every == 0) else []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" in logs:
            for sample in self.due(state.global_step):
                append_record(self.path, state.global_step, sample)


class CollapseWatch(TrainerCallback):
    """Tells signs of a collapse (:mod:`rlkv.training.collapse`) when they appear, on stdout and to ``tell``."""

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
