"""What every rollout engine takes and gives: rendered prompts in, completions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SamplingParams:
    """How to decode; ``temperature`` 0: greedy; ``top_k`` 0: no limit.

    ``seed`` fixes the draws of every prompt, whatever is decoded next to it.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or larger, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no limit) or larger, got {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")

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
            if len(ids) + sampling.max_new_tokens > self.max_positions:
                raise ValueError(
                    f"{name} has {len(ids)} tokens, which with max_new_tokens={sampling.max_new_tokens} "
                    f"exceeds the model's {self.max_positions} positions: shorten the prompt or lower max_new_tokens"
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
        kv_bytes: bytes held by the cache at the end.
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
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s, bytes of KV held / bytes the full cache "
            f"would hold: {self.kv_bytes:,} / {self.kv_bytes_full:,} ({share:.1%})"
        )


NO_USAGE = Usage(0, 0.0, 0, 0)
