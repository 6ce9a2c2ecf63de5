"""What a run writes into its folder while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkv.utils.jsonl import append_line, read_json, read_log

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
        """Of a run of any finder, also while it trains; ``ValueError`` if ``folder`` is not that of a run."""
        config, summary = _object(folder / RUN_CONFIG), _object(folder / SUMMARY)
        if not config and not (folder / LOG).exists():
            raise ValueError(
                f"{folder} holds neither {RUN_CONFIG} nor {LOG}: give the output folder of rlkv-train or rlkv-distill"
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
        return [(record["step"], record[name]) for record in self.records if record.get(name) is not None]


def _lines(path: Path) -> list[dict[str, Any]]:
    records = read_log(path) if path.exists() else []
    if not all(isinstance(record, dict) and "step" in record for record in records):
        raise ValueError(f"{path} is not the log of a run: a line of it names no step")
    return records


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}: give the output folder of rlkv-train or rlkv-distill"
        )
    return content
