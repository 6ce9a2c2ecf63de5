"""Input and output of every rollout engine: rendered prompts in, completions out.

Seeds: one number is drawn per (seed, rollout, row, token), with a Philox stream for each row
(:func:`rlkv.rollout.decoding.row_draws`).  A row is numbered by its place in its file or rollout,
so that neither the batch, nor a resume, nor the number of processes changes what is drawn for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from rlkv.utils.numbers import check_number, check_whole
from rlkv.utils.runtime import digest
from rlkv.verifier.extraction import THINKING, THINKING_END

TEMPERATURES = (1e-6, 1e6)  # beyond them float32 logits are infinite or all the same
LEAST_TOP_P = 1e-6
DEFAULT_PORT = 8700  # of a rollout server


@dataclass(frozen=True)
class SamplingParams:
    """Settings of decoding; ``temperature`` 0: greedy; ``top_k`` 0: no limit.

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
    """One decoded answer: ``token_ids`` include the end token, ``text`` has no special tokens.

    ``text`` is that of :func:`completion_text`.
    ``finish_reason``: the model ended it, the limit, or a rule
    (:class:`rlkv.rollout.decoding.StopRule`); ``seconds``: its share of the time, where known.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seconds: float = field(default=0.0, compare=False)


class RolloutEngine(ABC):
    """Decodes rendered prompts (:func:`rlkv.models.prompts.render_prompt`), adding no tokens."""

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
        """Yield ``(index into prompts, completion)`` as completions finish, each index once.

        ``numbers``: of the rows, which with the seed fix their draws; default: the indices.
        """

    def generate(
        self, prompts: list[str], sampling: SamplingParams, **options: Any
    ) -> list[Completion]:
        """Return the completions in the order of ``prompts``; otherwise as :meth:`stream`."""
        found = dict(self.stream(prompts, sampling, **options))
        return [found[index] for index in range(len(prompts))]

    def tokenize(self, prompts: list[str]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return self.tokenizer(prompts, add_special_tokens=False).input_ids if prompts else []

    def prompt_lengths(self, prompts: list[str]) -> list[int]:
        """Count the tokens of each prompt."""
        return [len(ids) for ids in self.tokenize(prompts)]

    def check_prompts(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Raise ValueError if a prompt is empty or, with ``max_new_tokens``, too long."""
        for index, ids in enumerate(prompts):
            name = f"prompt {index}" if len(prompts) > 1 else "the prompt"
            if not ids:
                raise ValueError(f"{name} is empty: there is nothing to complete")
            check_length(name, len(ids), sampling.max_new_tokens, self.max_positions)


def check_length(name: str, tokens: int, max_new_tokens: int, positions: int) -> None:
    """Raise ValueError unless a prompt and its completion fit into a model's positions."""
    if tokens + max_new_tokens > positions:
        raise ValueError(
            f"{name} has {tokens} tokens, which with max_new_tokens={max_new_tokens} exceeds the "
            f"model's {positions} positions: shorten the prompt or lower max_new_tokens"
        )


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the generation config and the tokenizer's, as trl and vLLM do.

    ValueError if neither names one.
    """
    found: list[int] = []
    for source in (generation_config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if isinstance(eos, int):
            eos = [eos]
        found += eos or []
    if not found:
        raise ValueError(
            "neither the model's generation config nor its tokenizer names an end token "
            "(eos_token_id)"
        )
    return list(dict.fromkeys(found))


def completion_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of a completion without special tokens, but with the marks of thoughts.

    In some tokenizers these marks are special tokens too.  Without the mark of their end, thoughts
    that the prompt opened would never end, and no answer after them would count.
    """
    marks = {}
    for mark in (THINKING, THINKING_END):
        token = tokenizer.convert_tokens_to_ids(mark)
        if token not in token_ids or tokenizer.decode([token]).strip() != mark:
            continue  # it is missing here, or has no token of its own
        if not tokenizer.decode([token], skip_special_tokens=True):
            marks[token] = mark
    text = ""
    start = 0
    for place, token in enumerate(token_ids):
        if token in marks:
            text += tokenizer.decode(token_ids[start:place], skip_special_tokens=True)
            text += marks[token]
            start = place + 1
    return text + str(tokenizer.decode(token_ids[start:], skip_special_tokens=True))


@dataclass(frozen=True)
class Usage:
    """The cost of one call.

    Attributes:
        tokens: new tokens, of all completions together.
        seconds: wall time, prompt included.
        kv_bytes: bytes of KV in use at the end, without the headroom of growing buffers and entries
            that are empty.
        kv_bytes_full: bytes of the full cache for the same tokens.
        kv_bytes_unchanged: the part of both that compression leaves as it is: sliding windows and
            linear states.
    """

    tokens: int
    seconds: float
    kv_bytes: int
    kv_bytes_full: int
    kv_bytes_unchanged: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: Usage) -> Usage:
        """Add tokens and seconds; the bytes are those of the call that held more."""
        larger = max(self, other, key=lambda usage: usage.kv_bytes_full)
        return Usage(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            larger.kv_bytes,
            larger.kv_bytes_full,
            larger.kv_bytes_unchanged,
        )

    def summary(self) -> str:
        held = f"{share_held(self.kv_bytes, self.kv_bytes_full):.1%}"
        if self.kv_bytes_unchanged:
            gated = share_held(self.kv_bytes, self.kv_bytes_full, self.kv_bytes_unchanged)
            held += f"; {gated:.1%} in the layers with gates"
        return (
            f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s, bytes of KV in use / "
            f"bytes the full cache would hold: {self.kv_bytes:,} / {self.kv_bytes_full:,} ({held})"
        )


def share_held(held: int, full: int, unchanged: int = 0) -> float:
    """Return bytes in use over those of the full cache, without what is ``unchanged`` in both.

    1 if nothing is left.
    """
    return (held - unchanged) / (full - unchanged) if full > unchanged else 1.0


NO_USAGE = Usage(0, 0.0, 0, 0)


# --- rollouts of a training run


@dataclass(frozen=True)
class EngineFacts:
    """Facts that a server states about its engine; ``model_files``: their digest, if known."""

    model: str
    sink: int
    window: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    vocab_size: int
    model_files: str | None = None


@dataclass(frozen=True)
class Rows:
    """Prompts (token ids) of one rollout, and the numbers of its rows, which fix their draws."""

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
    """A sampled completion with its end token.

    ``logprobs``: after temperature, vLLM's also after top-k and top-p; ``version``: of its gates;
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


def gate_version(alpha_LH: Tensor) -> str:
    """Return a name of these gates: a digest of their float32 values and their shape."""
    values = alpha_LH.detach().float().cpu().contiguous()
    return digest(repr(tuple(values.shape)).encode() + values.numpy().tobytes())
