"""What the training loop asks of an engine outside its own model: take these gates, complete these prompts.

Rollout server and client exchange it over HTTP; answers are lines of JSON.

    GET  /health   -> the fields of EngineFacts, "version" of the gates, "busy"
    POST /gates    {"alpha": [[...]]} -> {"version"}
    POST /sample   {"version", "rows", "sampling", "eos_ids"} -> one line per sample as it finishes, an empty line as a
                   heartbeat every few seconds, {"done": n} at the end; {"stale": version} if the gates are others

A request that the engine cannot serve gets status 400 with {"error"}, and changes nothing; one that
failed on the server 500. Requests are JSON (Content-Type: application/json) with a Content-Length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Protocol

import torch
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
    vocab_size: int


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


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples that an engine can serve."""

    version: str
    rows: Rows
    sampling: SamplingParams
    eos_ids: list[int]

    @classmethod
    def read(cls, body: Any, facts: EngineFacts) -> SampleRequest:
        """The request in ``body``, which is any JSON.

        Raises:
            ValueError: if it is none, or an engine with these ``facts`` cannot serve it.
        """
        version, rows, sampling, eos_ids = _only(body, "the request", [field.name for field in fields(cls)])
        prompts, numbers, rollout = _only(rows, "rows", [field.name for field in fields(Rows)])
        if not isinstance(version, str):
            raise ValueError("version must be a text")
        if not isinstance(prompts, list):
            raise ValueError("prompts must be a list of lists of token ids")
        for place, prompt in enumerate(prompts):
            _check_numbers(prompt, f"prompt {place}", facts.vocab_size)
        _check_numbers(eos_ids, "eos_ids", facts.vocab_size)
        _check_numbers(numbers, "numbers", 2**31)
        _check_numbers([rollout], "rollout", 2**31)
        names = [field.name for field in fields(SamplingParams)]
        options = dict(zip(names, _only(sampling, "sampling", names), strict=True))
        for name, value in options.items():
            whole = name not in ("temperature", "top_p")
            if type(value) is not int and (whole or type(value) is not float or not isfinite(value)):
                raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {_short(value)}")
        params = SamplingParams(**options)
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place} is empty: there is nothing to complete")
            if len(prompt) + params.max_new_tokens > facts.max_positions:
                raise ValueError(
                    f"prompt {place} has {len(prompt)} tokens, which with max_new_tokens={params.max_new_tokens} "
                    f"exceeds the server's {facts.max_positions} positions: shorten it or lower max_new_tokens"
                )
        return cls(version, Rows(prompts, numbers, rollout), params, eos_ids)


def read_gates(body: Any, facts: EngineFacts) -> Tensor:
    """The gates in ``body``, which is any JSON, as float32.

    Raises:
        ValueError: unless they are numbers in [0, 1], one for each head of an engine with these ``facts``.
    """
    (alpha,) = _only(body, "the request", ["alpha"])
    if not isinstance(alpha, list) or not all(isinstance(layer, list) for layer in alpha):
        raise ValueError('gates are sent as {"alpha": [[...]]}, a list of numbers for each layer')
    expected = [facts.num_layers, facts.num_kv_heads]
    if len(alpha) != facts.num_layers or any(len(layer) != facts.num_kv_heads for layer in alpha):
        found = [len(alpha), *sorted({len(layer) for layer in alpha})]
        raise ValueError(f"the model has gates {expected}, got {found}")
    for number, layer in enumerate(alpha):
        for head, gate in enumerate(layer):
            if type(gate) not in (int, float) or not 0 <= gate <= 1:
                raise ValueError(f"the gate of layer {number}, head {head} must be in [0, 1], got {_short(gate)}")
    return torch.tensor(alpha, dtype=torch.float32)


def _only(body: Any, what: str, names: list[str]) -> list[Any]:
    """The values of an object that has these names and no others."""
    if not isinstance(body, dict) or body.keys() != set(names):
        raise ValueError(f"{what} must be an object with {', '.join(names)}")
    return [body[name] for name in names]


def _check_numbers(values: Any, what: str, below: int) -> None:
    if not isinstance(values, list):
        raise ValueError(f"{what} must be a list of whole numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < below:
            raise ValueError(f"{what}: {_short(value)} is not a whole number from 0 to {below - 1}")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def gate_version(alpha_LH: Tensor) -> str:
    """A name of these gates: a digest of their float32 values and their shape."""
    values = alpha_LH.detach().float().cpu().contiguous()
    return digest(repr(tuple(values.shape)).encode() + values.numpy().tobytes())
