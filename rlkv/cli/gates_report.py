"""rlkv-gates report: the page of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Report:
    """Write one HTML page of a training run: is it collapsing, is it converging, which heads are left?

    RUN_DIR is the output folder of rlkv-train (any finder) or rlkv-distill, also while it trains.

    rlkv-gates report outputs/gates
    """

    run_dir: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """Output folder of the run."""
    out: Path | None = None
    """Page to write; default: report.html in RUN_DIR."""

    def run(self) -> None:
        from rlkv.evaluation.report.training_page import write_training_page  # torch is slow to load

        out = self.out or self.run_dir / "report.html"
        write_training_page(self.run_dir, out)
        print(out)
