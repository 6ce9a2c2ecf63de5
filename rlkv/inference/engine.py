"""Decoding under an allocation: single prompts with streamed text, chats, batches.

All of it is one decoding loop (:mod:`rlkv.rollout.decoding`).  Every call also runs with the full
cache on request, so that both can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from rlkv.attention.mixed import fast_decoding
from rlkv.cache import CacheSettings, HeadReallocationCache
from rlkv.cache.plan import COMPRESSIBLE
from rlkv.cache.reallocation import cached_states, full_cache
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import CompressedSession, compress
from rlkv.models.prompts import fill_template, render_messages, render_prompt
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage, completion_text
from rlkv.rollout.decoding import StopRule
from rlkv.rollout.hf import HFEngine

OnText = Callable[[str], None]


def cache_nbytes(cache: Cache) -> int:
    """Count the bytes of KV that a cache holds, ours or transformers' own."""
    if isinstance(cache, HeadReallocationCache):
        return cache.nbytes()
    return sum(state.nbytes for layer in cache.layers for state in cached_states(layer))


@dataclass(frozen=True)
class Reply:
    """One completion, the cache that holds it (all but its last token), and what it cost."""

    completion: Completion
    cache: Cache
    usage: Usage


class _TextStream(TextStreamer):
    """Hands whole words to a callback, as soon as they are decoded."""

    def __init__(self, tokenizer: Any, on_text: OnText) -> None:
        reader: Any = SimpleNamespace(decode=partial(completion_text, tokenizer))
        super().__init__(reader)
        self.on_text = on_text
        self.line_end: list[int] = []

    def on_token(self, index: int, token: int) -> None:
        self.put(torch.tensor([token]))
        if not self.token_cache:  # after a line
            # a token of it stays: some tokenizers strip a space with which what they decode begins
            if self.tokenizer.decode([token]):  # not a special one, which is left out
                self.line_end = [token]
            self.token_cache = list(self.line_end)
            self.print_len = len(self.tokenizer.decode(self.line_end))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


class InferenceEngine(HFEngine):
    """A model under an allocation, as a rollout engine and for single prompts.

    ``settings``: what compressible heads keep.

    Raises:
        ValueError: as :func:`rlkv.compress`, at the first call or in :meth:`check`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allocation: HeadAllocation,
        settings: CacheSettings | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        settings = settings or CacheSettings()
        settings.check_positions(self.max_positions)
        self.allocation = allocation
        self.settings = settings
        self._session: CompressedSession | None = None
        self._planned: torch.Tensor | None = None

    def describe(self) -> dict[str, Any]:
        """Return what completions depend on: dtype, device, what the compressible heads keep."""
        settings = self.settings
        own: dict[str, Any] = {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "sink": settings.sink,
            "window": settings.window,
            "prefill": settings.prefill,
            "eviction": settings.eviction and settings.eviction.describe(),
        }
        # left out otherwise: answers of before the settings stay
        if settings.protect_prompt:
            own["protect_prompt"] = True
        if settings.evict_from != COMPRESSIBLE:
            own["evict_from"] = settings.evict_from
        return own

    def reply(
        self,
        ids: list[int],
        sampling: SamplingParams,
        on_text: OnText | None = None,
        cache: Cache | None = None,
        full: bool = False,
        turn: int = 0,
    ) -> Reply:
        """Complete ``ids`` (the whole text so far), on top of ``cache`` if given.

        Args:
            on_text: called with each piece of text as it is decoded.
            full: decode with the full cache instead, uncompressed.
            turn: of a chat; each draws other random numbers.

        Raises:
            ValueError: if there is nothing to complete, the cache holds as many tokens, or the text
                exceeds the model's positions.
        """
        self.check_prompts([ids], sampling)
        if cache is not None and cache.get_seq_length() >= len(ids):
            raise ValueError(
                f"the cache holds {cache.get_seq_length()} tokens and the text has {len(ids)}: "
                "pass the whole text, with new tokens at its end"
            )
        stream = None if on_text is None else _TextStream(self.tokenizer, on_text)
        with self._compressed(full), fast_decoding(self.model):
            limit = len(ids) + sampling.max_new_tokens
            used: Any = self._new_cache(limit, [0]) if cache is None else cache
            if isinstance(used, HeadReallocationCache):
                used.state.limit = limit
            decoding = self._decoding(
                sampling,
                lambda limit, rows: used,
                rollout=turn,
                on_token=stream and stream.on_token,
            )
            (row,) = decoding.run([ids])
            if stream is not None:
                stream.end()
        usage = self._usage(len(row.token_ids), row.seconds, used)
        return Reply(self._completion(row), used, usage)

    def stream(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        numbers: Sequence[int] | None = None,
        stop: StopRule | None = None,
        before_change: Callable[[Cache], None] | None = None,
        full: bool = False,
        planned: Sequence[int] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield completions as :meth:`HFEngine.stream` does, under the allocation.

        Args:
            full: with the full cache instead.
            planned: for each prompt the length of a text, of which the policy's ratio is taken from
                the start.
        """
        if planned is not None and len(planned) != len(prompts):
            raise ValueError(
                f"planned has {len(planned)} lengths for {len(prompts)} prompts: give one for each"
            )
        with self._compressed(full):
            self._planned = None if full or planned is None else torch.tensor(planned)
            yield from super().stream(prompts, sampling, numbers, stop, before_change)

    def batch(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        full: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> tuple[list[Completion], Usage]:
        """Return the completions of rendered ``prompts`` in their order, and what they cost.

        Arguments as of :meth:`stream`.
        """
        usages: list[Usage] = []

        def before_change(cache: Cache) -> None:
            usages.append(self._usage(0, 0.0, cache))

        start = time.perf_counter()
        completions = self.generate(
            prompts, sampling, numbers=numbers, before_change=before_change, full=full
        )
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.token_ids) for completion in completions)
        return completions, replace(sum(usages, NO_USAGE), tokens=tokens, seconds=seconds)

    def check(self) -> None:
        """Raise ``ValueError`` now for what the first compressed call would be refused for."""
        with self._compressed(full=False):
            pass

    def _new_cache(self, limit: int, rows: list[int]) -> Cache | None:
        if self._session is None:
            return full_cache(self.model.config, limit)
        planned = None if self._planned is None else self._planned[rows]
        return self._session.new_cache(limit, planned)

    @contextmanager
    def _compressed(self, full: bool) -> Iterator[None]:
        """Let the model decode under the allocation, unless the full cache is asked for."""
        if full:
            if self._session is not None:
                raise ValueError(
                    "the model is compressed by a stream that has not ended: end it, or close it, "
                    "before the full cache is asked for"
                )
            yield
            return
        settings = self.settings
        sizes: dict[str, Any] = {}
        if settings.policy_of(is_full=False) is None:
            for name in ("sink", "window", "protect_prompt"):
                sizes[name] = getattr(settings, name)
        with compress(
            self.model,
            self.allocation,
            prefill=settings.prefill,
            eviction=settings.eviction,
            evict_from=settings.evict_from,
            **sizes,
        ) as self._session:
            try:
                yield
            finally:
                self._session = None
                self._planned = None

    @staticmethod
    def _usage(tokens: int, seconds: float, cache: Cache) -> Usage:
        if isinstance(cache, HeadReallocationCache):
            unchanged = cache.unchanged_nbytes()
            return Usage(tokens, seconds, cache.used_nbytes(), cache.full_nbytes(), unchanged)
        held = cache_nbytes(cache)
        return Usage(tokens, seconds, held, held)


class Chat:
    """A conversation whose cache is kept from turn to turn.

    Where the rendered conversation does not begin with the cached tokens (some templates cut
    earlier reasoning out), the turn starts a new cache, which ``restarted`` counts.
    """

    def __init__(
        self, engine: InferenceEngine, sampling: SamplingParams, template: str = "rlkv"
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.template = template
        self.restarted = 0
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []
        self._cache: Cache | None = None

    def say(self, message: str, on_text: OnText | None = None) -> Reply:
        """Return the model's answer to ``message``, at most up to the model's positions.

        Raises:
            ValueError: as :meth:`InferenceEngine.reply`; the conversation is then as before.
        """
        text = self._render(message)
        (ids,) = self.engine.tokenize([text])
        cache = self._cache
        held = [] if cache is None else self._ids[: cache.get_seq_length()]
        if ids[: len(held)] != held or len(ids) <= len(held):
            cache = None
        longest = max(1, min(self.sampling.max_new_tokens, self.engine.max_positions - len(ids)))
        sampling = replace(self.sampling, max_new_tokens=longest)
        self.engine.check_prompts([ids], sampling)  # before the cache is touched
        try:
            reply = self.engine.reply(ids, sampling, on_text, cache, turn=self._turns)
        except BaseException:
            self._cache = None  # holds a part of an answer that the conversation does not have
            raise
        self.restarted += self._cache is not None and cache is None
        self._turns += 1
        self._cache = reply.cache
        self._ids = ids + reply.completion.token_ids
        self._text = text + reply.completion.text
        self.messages += [
            {"role": "user", "content": fill_template(message, self.template)},
            {"role": "assistant", "content": reply.completion.text},
        ]
        return reply

    def _render(self, message: str) -> str:
        tokenizer: Any = self.engine.tokenizer
        filled = fill_template(message, self.template)
        if tokenizer.chat_template:
            messages = [*self.messages, {"role": "user", "content": filled}]
            return render_messages(tokenizer, messages)
        if self._text:  # a model without chat format continues the plain text
            return f"{self._text}\n\n{filled}"
        return render_prompt(tokenizer, message, self.template)
