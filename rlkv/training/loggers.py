"""Where a training run is seen: a JSONL file, one line per step on the terminal, figures, and W&B.

All of them run on the main process only.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates, plot_histogram
from rlkv.training.head_gate import gates_matrix
from rlkv.utils.atomic import atomic_path
from rlkv.utils.extras import require
from rlkv.utils.progress import duration

LOG = "log.jsonl"
GATES_LOG = "gates.jsonl"
IMAGES = "images"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole records of a JSONL log; the last line may be cut off where a process died."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class JsonlLog(TrainerCallback):
    """``log.jsonl``: one record per step; ``gates.jsonl``: all gates after every step.

    After a resume the records beyond the checkpoint are dropped: their steps are made again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (LOG, GATES_LOG):
            path = self.folder / name
            kept = [r for r in read_log(path) if r["step"] <= state.global_step] if path.exists() else []
            with atomic_path(path) as partial:
                partial.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if "gates/mean" in logs:
            alpha = [[round(value, 6) for value in row] for row in gates_matrix(model).tolist()]
            self._append(LOG, {"step": state.global_step, **logs})
            self._append(GATES_LOG, {"step": state.global_step, "alpha": alpha})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as out:
            out.write(json.dumps(record) + "\n")


class StepLine(TrainerCallback):
    """One line per step on stdout: how far, reward, gates, and how long still."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        per_step = (time.monotonic() - self._started) / max(1, state.global_step - self._first)
        left = duration(per_step * (state.max_steps - state.global_step))
        print(
            f"step {state.global_step}/{state.max_steps}  reward {logs['reward/mean']:.3f}  "
            f"gates {logs['gates/mean']:.3f}  below 0.5: {logs['gates/below_0.5']:.2f}  "
            f"beta' {logs['penalty/beta_prime']:.4g}  {logs['time/step_s']:.1f} s, {left} left",
            flush=True,
        )


class GateImages(TrainerCallback):
    """A heat map and a histogram every ``every`` steps, in ``images/``; ``gates`` makes the gates as they are."""

    def __init__(self, folder: Path, every: int, gates: Callable[[], HeadGates]) -> None:
        self.folder, self.every, self.gates = folder / IMAGES, every, gates

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def paths(self, step: int) -> dict[str, Path]:
        return {kind: self.folder / f"{kind}_{step:06d}.png" for kind in ("heat_map", "histogram")}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.due(state.global_step):
            paths = self.paths(state.global_step)
            plot_gates(self.gates(), paths["heat_map"])
            plot_histogram(self.gates(), paths["histogram"])


class WandbLog(TrainerCallback):
    """Records and figures to W&B, sections as in the records; without a login it works offline and says so."""

    def __init__(self, mode: str, project: str, config: dict[str, Any], folder: Path, images: GateImages) -> None:
        self.mode, self.project, self.config, self.folder, self.images = mode, project, config, folder, images
        self.run: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wandb = require("wandb", "wandb")
        mode = self.mode
        if mode == "online" and not wandb.login(prompt=False):
            print("W&B: no login found, logging offline (later: wandb login, then wandb sync)", flush=True)
            mode = "offline"
        identity = self.folder / "wandb_id.txt"  # a resumed run goes on under the same id
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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if self.run is None or "gates/mean" not in logs:
            return
        import wandb

        record: dict[str, Any] = dict(logs)
        record["gates/all"] = wandb.Histogram(gates_matrix(model).flatten().tolist())
        if self.images.due(state.global_step):
            paths = self.images.paths(state.global_step)
            record.update({f"images/{kind}": wandb.Image(str(path)) for kind, path in paths.items()})
        self.run.log(record, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run is not None:
            self.run.finish()
