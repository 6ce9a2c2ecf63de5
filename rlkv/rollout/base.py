"""What every rollout engine takes and gives: rendered prompts in, completions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlkv.utils.numbers import check_number, check_whole
from rlkv.utils.runtime import digest

TEMPERATURES = (1e-6, 1e6)  # beyond them float32 logits are infinite or all the same
LEAST_TOP_P = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How to decode; ``temperature`` 0: greedy; ``top_k`` 0: no limit.

    ``seed`` fixes the draws of every prompt, whatever is decoded next to it.

    Raises:
        ValueError: for values of other types, or that no sampler can use, such as NaN or a
            temperature that makes every logit infinite.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        if self.temperature != 0 or isinstance(self.temperature, bool):
            check_number("temperature, if not 0 (greedy),", self.temperature, *TEMPERATURES)
        check_number("top_p", self.top_p, LEAST_TOP_P, 1)
        check_whole("top_k (0: no limit)", self.top_k, 0)
        check_whole("seed", self.seed, 0, 2**63 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class Completion:
    """One decoded answer: ``token_ids`` include the end token, ``text`` is without special tokens.

    ``finish_reason``: the model ended it, the limit, or a rule
    (:class:`rlkv.rollout.decoding.StopRule`); ``seconds``: its share of the time, where known.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seconds: float = field(default=0.0, compare=False)


class RolloutEngine(ABC):
    """Decodes rendered prompts (see :func:`rlkv.models.prompts.render_prompt`).

    No special tokens are added to them.
    """

    tokenizer: Any
    eos_ids: list[int]

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Most tokens of a prompt and its completion together."""

    @abstractmethod
    def stream(
        self, prompts: list[str], sampling: SamplingParams, numbers: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """Yield ``(index into prompts, completion)`` as completions finish, in any order, each
        index once.

        ``numbers``: one of each prompt, which with the seed fixes its draws; default: its index.
        """

    def generate(
        self, prompts: list[str], sampling: SamplingParams, **options: Any
    ) -> list[Completion]:
        """The completions in the order of ``prompts``; otherwise as :meth:`stream`."""
        found = dict(self.stream(prompts, sampling, **options))
        return [found[i] for i in range(len(prompts))]

    def tokenize(self, prompts: list[str]) -> list[list[int]]:
        """Token ids of each prompt."""
        return self.tokenizer(prompts, add_special_tokens=False).input_ids if prompts else []

    def prompt_lengths(self, prompts: list[str]) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.tokenize(prompts)]

    def check_prompts(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Raise ValueError if a prompt is empty, or does not fit together with ``max_new_tokens``."""
        for index, ids in enumerate(prompts):
            name = f"prompt {index}" if len(prompts) > 1 else "the prompt"
            if not ids:
                raise ValueError(f"{name} is empty: there is nothing to complete")
            check_length(name, len(ids), sampling.max_new_tokens, self.max_positions)


def check_length(name: str, tokens: int, max_new_tokens: int, positions: int) -> None:
    """Raise ``ValueError`` unless a prompt of ``tokens`` and its completion fit into a model's
    positions.
    """
    if tokens + max_new_tokens > positions:
        raise ValueError(
            f"{name} has {tokens} tokens, which with max_new_tokens={max_new_tokens} exceeds the "
            f"model's {positions} "
            "positions: shorten the prompt or lower max_new_tokens"
        )


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The end tokens that the generation config names, or else the tokenizer's.

    ValueError if neither names one.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    if eos is None:
        raise ValueError(
            "neither the model's generation config nor its tokenizer names an end token "
            "(eos_token_id)"
        )
    return [eos] if isinstance(eos, int) else list(eos)


@dataclass(frozen=True)
class Usage:
    """What one call cost.

    Attributes:
        tokens: new tokens, of all completions together.
        seconds: wall time, prompt included.
        kv_bytes: bytes of KV in use at the end, without the headroom of growing buffers and entries
            that are empty.
        kv_bytes_full: bytes of the full cache for the same tokens.
    """

    tokens: int
    seconds: float
    kv_bytes: int
    kv_bytes_full: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: Usage) -> Usage:
        """Both calls: tokens and seconds add up, the bytes are those of the call that held more."""
        larger = max(self, other, key=lambda usage: usage.kv_bytes_full)
        return Usage(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            larger.kv_bytes,
            larger.kv_bytes_full,
        )

    def summary(self) -> str:
        share = self.kv_bytes / self.kv_bytes_full if self.kv_bytes_full else 1.0
        return (
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s, bytes of KV in use / "
            "bytes the full cache "
            f"would hold: {self.kv_bytes:,} / {self.kv_bytes_full:,} ({share:.1%})"
        )


NO_USAGE = Usage(0, 0.0, 0, 0)

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
    """Prompts (token ids) of one rollout, and which rows of it they are, on which their draws
    depend.
    """

    prompts: list[list[int]]
    numbers: list[int]
    rollout: int

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.numbers):
            raise ValueError(f"{len(self.prompts)} prompts, but {len(self.numbers)} row numbers")

    def only(self, indices: list[int]) -> Rows:
        return Rows(
            [self.prompts[i] for i in indices], [self.numbers[i] for i in indices], self.rollout
        )


@dataclass(frozen=True)
class Sample:
    """A sampled completion with its end token, ``logprobs`` before top-k and top-p, and the version
    of its gates.

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

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
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
        version, rows, sampling, eos_ids = _only(
            body, "the request", [field.name for field in fields(cls)]
        )
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
            if type(value) is not int and (
                whole or type(value) is not float or not isfinite(value)
            ):
                raise ValueError(
                    f"{name} must be a {'whole ' if whole else ''}number, got {_short(value)}"
                )
        params = SamplingParams(**options)
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place} is empty: there is nothing to complete")
            if len(prompt) + params.max_new_tokens > facts.max_positions:
                raise ValueError(
                    f"prompt {place} has {len(prompt)} tokens, which with "
                    f"max_new_tokens={params.max_new_tokens} "
                    f"exceeds the server's {facts.max_positions} positions: shorten it or lower "
                    "max_new_tokens"
                )
        return cls(version, Rows(prompts, numbers, rollout), params, eos_ids)


def read_gates(body: Any, facts: EngineFacts) -> Tensor:
    """The gates in ``body``, which is any JSON, as float32.

    Raises:
        ValueError: unless they are numbers in [0, 1], one for each head of an engine with these
            ``facts``.
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
                raise ValueError(
                    f"the gate of layer {number}, head {head} must be in [0, 1], got {_short(gate)}"
                )
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
