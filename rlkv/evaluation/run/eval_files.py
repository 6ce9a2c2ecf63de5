"""Where an evaluation keeps its rows: ``TASK/METHOD/rows-RANK-of-PROCESSES.jsonl`` in its folder.

Rows do not depend on which process decoded them, so a run with another number of processes goes on from all files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.evaluation.run.rows import stored_rows

_NAME = re.compile(r"rows-\d+-of-(\d+)\.jsonl")


@dataclass(frozen=True)
class RowFiles:
    """The files of one method on one task."""

    output_dir: Path
    task: str
    method: str

    @property
    def folder(self) -> Path:
        return self.output_dir / self.task.replace(":", "_") / self.method

    def own(self, rank: int, processes: int) -> Path:
        """The file that a process writes."""
        return self.folder / f"rows-{rank}-of-{processes}.jsonl"

    def of_others(self, processes: int) -> list[Path]:
        """Files of runs with another number of processes: they may hold units of any process of this run.

        Those of this number hold the shares of their own processes only.
        """
        return [file for file, found in self._all() if found != processes]

    def rows(self, keys: list[str], num_samples: int) -> list[dict[str, Any]]:
        """The rows of all files when all are written, in the order of the problems ``keys``."""
        found = {(row["key"], row["sample"]): row for file, _ in self._all() for row in stored_rows(file)}
        return [found[key, sample] for key in keys for sample in range(num_samples)]

    def _all(self) -> list[tuple[Path, int]]:
        matches = [(file, _NAME.fullmatch(file.name)) for file in sorted(self.folder.glob("rows-*.jsonl"))]
        return [(file, int(match.group(1))) for file, match in matches if match]
