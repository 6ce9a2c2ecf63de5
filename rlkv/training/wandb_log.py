"""Weights & Biases: figures in sections, sampled texts, plots, alerts, and the gates at the end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlkv.training.collapse import Alert
from rlkv.training.head_gate import gates_matrix
from rlkv.training.loggers import GateImages, SampleLog
from rlkv.training.logs import RunLogs
from rlkv.training.sections import SECTIONS, section_of
from rlkv.utils.extras import require


class WandbLog(TrainerCallback):
    """Everything that the folder of a run gets, to W&B; without a login it works offline and says so."""

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
            print("W&B: no login found, logging offline (later: wandb login, then wandb sync)", flush=True)
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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        import wandb

        step = state.global_step
        record: dict[str, Any] = {f"{section_of(name)}/{name.replace('/', '_')}": logs[name] for name in logs}
        record["heads/gates"] = wandb.Histogram(gates_matrix(model).flatten().tolist())
        paths = {} if self.images is None else self.images.paths(step)
        for kind, path in paths.items():
            record[f"heads/{kind}"] = wandb.Image(str(path))
        if paths:
            record["collapse/reward_against_sparsity"] = self._against_sparsity()
        if self.samples is not None and (rows := self.samples.due(step)):
            record["samples/texts"] = wandb.Table(list(rows[0]), [list(row.values()) for row in rows])
        self.run.log(record, step=step)

    def _against_sparsity(self) -> Any:
        """Curves of one chart, which W&B draws of a table only."""
        import wandb

        chart, logs = SECTIONS["collapse"][1][0], RunLogs.read(self.folder)
        curves = {label: logs.curve(name) for name, label in chart.drawn(logs.names).items()}
        xs, ys = ([[point[axis] for point in curve] for curve in curves.values()] for axis in (0, 1))
        return wandb.plot.line_series(xs, ys, keys=list(curves), title=chart.title, xname="optimizer step")

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
