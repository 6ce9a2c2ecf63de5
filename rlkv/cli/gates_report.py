"""rlkv-gates report: the page of a training run, once or for as long as it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Report:
    """Write one HTML page of a training run: is it collapsing, is it converging, which heads are left?

    RUN_DIR is the output folder of rlkv-train (any finder) or rlkv-distill, also while it trains.

    rlkv-gates report outputs/gates
    rlkv-gates report outputs/gates --watch          a second terminal: the page follows the training
    """

    run_dir: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """Output folder of the run."""
    out: Path | None = None
    """Page to write; default: report.html in RUN_DIR."""
    watch: bool = False
    """Write the page again and again until the run has ended; in the browser it reloads itself."""
    every: float = 10.0
    """With --watch: seconds between two pages."""

    def check(self) -> None:
        if not self.every > 0:
            raise ValueError(f"--every is {self.every:g}: it must be above 0 seconds")

    def run(self) -> None:
        from rlkv.evaluation.report.training_page import training_page  # torch is slow to load
        from rlkv.training.logs import RunLogs

        out = self.out or self.run_dir / "report.html"
        shown = False
        while True:
            logs = RunLogs.read(self.run_dir)
            goes_on = self.watch and not logs.finished
            training_page(logs, self.every if goes_on else None).write(out)
            if not shown:
                print(out, flush=True)
            if not goes_on:
                return
            shown = True
            time.sleep(self.every)
