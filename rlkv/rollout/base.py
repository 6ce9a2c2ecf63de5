"""What every rollout engine takes and gives: rendered prompts in, completions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkv.utils.numbers import check_number, check_whole

TEMPERATURES = (1e-6, 1e6)  # beyond them float32 logits are infinite or all the same
LEAST_TOP_P = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How to decode; ``temperature`` 0: greedy; ``top_k`` 0: no limit.

    ``seed`` fixes the draws of every prompt, whatever is decoded next to it.

    Raises:
        ValueError: for values of other types, or that no sampler can use, such as NaN or a temperature that makes
            every logit infinite.
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

    ``finish_reason``: the model ended it, the limit, or a rule (:class:`rlkv.rollout.decoding.StopRule`); ``seconds``:
    its share of the time, where known.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seconds: float = field(default=0.0, compare=False)


class RolloutEngine(ABC):
    """Decodes rendered prompts (see :func:`rlkv.models.prompts.render_prompt`); no special tokens are added to them."""

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
        """Yield ``(index into prompts, completion)`` as completions finish, in any order, each index once.

        ``numbers``: one of each prompt, which with the seed fixes its draws; default: its index.
        """

    def generate(self, prompts: list[str], sampling: SamplingParams, **options: Any) -> list[Completion]:
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
    """Raise ``ValueError`` unless a prompt of ``tokens`` and its completion fit into a model's positions."""
    if tokens + max_new_tokens > positions:
        raise ValueError(
            f"{name} has {tokens} tokens, which with max_new_tokens={max_new_tokens} exceeds the model's {positions} "
            "positions: shorten the prompt or lower max_new_tokens"
        )


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The end tokens that the generation config names, or else the tokenizer's; ValueError if neither names one."""
    eos = getattr(generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    if eos is None:
        raise ValueError("neither the model's generation config nor its tokenizer names an end token (eos_token_id)")
    return [eos] if isinstance(eos, int) else list(eos)


@dataclass(frozen=True)
class Usage:
    """What one call cost.

    Attributes:
        tokens: new tokens, of all completions together.
        seconds: wall time, prompt included.
        kv_bytes: bytes of KV in use at the end, without the headroom of growing buffers and entries that are empty.
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
        return Usage(self.tokens + other.tokens, self.seconds + other.seconds, larger.kv_bytes, larger.kv_bytes_full)

    def summary(self) -> str:
        share = self.kv_bytes / self.kv_bytes_full if self.kv_bytes_full else 1.0
        return (
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s, bytes of KV in use / bytes the full cache "
            f"would hold: {self.kv_bytes:,} / {self.kv_bytes_full:,} ({share:.1%})"
        )


NO_USAGE = Usage(0, 0.0, 0, 0)
