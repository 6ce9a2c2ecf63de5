"""What the training loop asks of an engine outside its own model: take these gates, complete these prompts.

Rollout server and client exchange it over HTTP; answers are lines of JSON.

    GET  /health   -> the fields of EngineFacts, "version" of the gates, "busy"
    POST /gates    {"alpha": [[...]]} -> {"version"}
    POST /sample   {"version", "rows", "sampling", "eos_ids"} -> one line per sample as it finishes, an empty line as a
                   heartbeat every few seconds, {"done": n} at the end; {"stale": version} if the gates are others

A malformed request gets status 400 with {"error"}; one that failed on the server 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlkv.rollout.base import SamplingParams
from rlkv.utils.provenance import digest

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


@dataclass(frozen=True)
class Rows:
    """Prompts (token ids) of one rollout, and which rows of it they are, on which their draws depend."""

    prompts: list[list[int]]
    numbers: list[int]
    rollout: int

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.numbers):
            raise ValueError(f"{len(self.prompts)} prompts, but {len(self.numbers)} row numbers")

    def only(self, indices: list[int]) -> Rows:
        return Rows([self.prompts[i] for i in indices], [self.numbers[i] for i in indices], self.rollout)


@dataclass(frozen=True)
class Sample:
    """A sampled completion with its end token, ``logprobs`` before top-k and top-p, and the version of its gates.

    ``source``: which of several servers sampled it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: str
    source: int = 0


class GatedEngine(Protocol):
    """An engine with mixed attention whose gates can be exchanged."""

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; their version."""
        ...

    def sample(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as completions finish, each index once."""
        ...


def gate_version(alpha_LH: Tensor) -> str:
    """A name of these gates: a digest of their float32 values and their shape."""
    values = alpha_LH.detach().float().cpu().contiguous()
    return digest(repr(tuple(values.shape)).encode() + values.numpy().tobytes())
