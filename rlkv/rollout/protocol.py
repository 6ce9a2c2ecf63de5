"""What rollout server and client say to each other: HTTP with JSON, answers as lines of JSON.

    GET  /health   -> {"model", "sink", "window", "max_positions", "num_layers", "num_kv_heads", "version", "busy"}
    POST /gates    {"alpha": [[...]]} -> {"version"}
    POST /sample   {"version", "rows", "sampling", "eos_ids"} -> one line per sample as it finishes, an empty line as a
                   heartbeat every few seconds, {"done": n} at the end; {"stale": version} if the gates are others

A request that cannot be right gets status 400 with {"error"}; one that failed on the server 500.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import Rows, Sample

HEARTBEAT_SECONDS = 2.0  # seconds between empty lines
DEFAULT_PORT = 8700


@dataclass(frozen=True)
class EngineFacts:
    """What a server tells about its engine."""

    model: str
    sink: int
    window: int
    max_positions: int
    num_layers: int
    num_kv_heads: int


def sample_request(version: str, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> dict[str, Any]:
    return {"version": version, "rows": asdict(rows), "sampling": asdict(sampling), "eos_ids": eos_ids}


def read_sample_request(body: dict[str, Any]) -> tuple[str, Rows, SamplingParams, list[int]]:
    """The parts of :func:`sample_request`; ``ValueError`` if the body is not one."""
    try:
        return body["version"], Rows(**body["rows"]), SamplingParams(**body["sampling"]), list(body["eos_ids"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request for samples: {error}") from None


def sample_line(index: int, sample: Sample) -> dict[str, Any]:
    return {"index": index, **asdict(sample)}


def read_sample_line(line: dict[str, Any]) -> tuple[int, Sample]:
    fields = dict(line)
    return fields.pop("index"), Sample(**fields)
