"""What rollout server and client exchange: HTTP with JSON, answers as lines of JSON.

    GET  /health   -> the fields of EngineFacts, "version" of the gates, "busy"
    POST /gates    {"alpha": [[...]]} -> {"version"}
    POST /sample   {"version", "rows", "sampling", "eos_ids"} -> one line per sample as it finishes, an empty line as a
                   heartbeat every few seconds, {"done": n} at the end; {"stale": version} if the gates are others

A malformed request gets status 400 with {"error"}; one that failed on the server 500.
"""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_SECONDS = 2.0
DEFAULT_PORT = 8700


@dataclass(frozen=True)
class EngineFacts:
    """What a server says about its engine."""

    model: str
    sink: int
    window: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
