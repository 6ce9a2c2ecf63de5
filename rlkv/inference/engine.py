"""Decoding under an allocation: single prompts with streamed text, chats that continue with their
cache, batches.

Every call also runs with transformers' own full cache on request, so that both can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from rlkv.cache import CacheSettings, HeadReallocationCache
from rlkv.eviction.base import EvictionPolicy
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.compress import CompressedSession, compress
from rlkv.models.prompts import fill_template, render_prompt
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage
from rlkv.rollout.decoding import StopRule
from rlkv.rollout.hf import HFEngine

OnText = Callable[[str], None]


def cache_nbytes(cache: Cache) -> int:
    """Bytes of KV that a cache holds, ours or transformers' own."""
    if isinstance(cache, HeadReallocationCache):
        return cache.nbytes()
    layers: list[Any] = list(cache.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)


@dataclass(frozen=True)
class Reply:
    """One completion, the cache that holds it (all but its last token), and what it cost."""

    completion: Completion
    cache: Cache
    usage: Usage


class _CallbackStreamer(TextStreamer):
    """Hands finished words to a callback instead of printing them."""

    def __init__(self, tokenizer: Any, on_text: OnText) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


class InferenceEngine(HFEngine):
    """A model under an allocation, as a rollout engine and for single prompts.

    Raises:
        ValueError: as :func:`rlkv.compress`, at the first call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allocation: HeadAllocation,
        sink: int = 16,
        window: int = 64,
        prefill: str = "full",
        batch_size: int = 8,
        eviction: EvictionPolicy | None = None,
        record: bool = False,
        protect_prompt: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        CacheSettings(sink, window, prefill, eviction, protect_prompt).check_positions(
            self.max_positions
        )
        self.allocation, self.eviction, self.record = allocation, eviction, record
        self._session: CompressedSession | None = None
        self._planned: torch.Tensor | None = None
        self.sizes: dict[str, Any] = {"sink": sink, "window": window, "prefill": prefill}
        if (
            protect_prompt
        ):  # left out otherwise: answers that were decoded before there was the setting stay valid
            self.sizes["protect_prompt"] = True

    def describe(self) -> dict[str, Any]:
        """What completions depend on: numbers, device, and what the compressible heads keep."""
        eviction = self.eviction.describe() if self.eviction is not None else None
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {
            "dtype": dtype,
            "device": self.model.device.type,
            **self.sizes,
            "eviction": eviction,
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt; nothing is added to it."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def reply(
        self,
        ids: list[int],
        sampling: SamplingParams,
        on_text: OnText | None = None,
        cache: Cache | None = None,
        full: bool = False,
    ) -> Reply:
        """Complete ``ids`` (the whole text so far), on top of ``cache`` if given.

        Args:
            on_text: called with each piece of text as it is decoded.
            full: decode with transformers' full cache instead, uncompressed.

        Raises:
            ValueError: if there is nothing to complete or the text exceeds the model's positions.
        """
        self.check_prompts([ids], sampling)
        input_ids = torch.tensor([ids], device=self.model.device)
        generate: Any = self.model.generate
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with (
            self._caches(full) as new_cache,
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
        ):
            torch.manual_seed(sampling.seed)
            cache = cache if cache is not None else new_cache()
            start = time.perf_counter()
            output = generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=self._generation_config(sampling),
                past_key_values=cache,
                streamer=_CallbackStreamer(self.tokenizer, on_text) if on_text else None,
            )
            new = output[0, len(ids) :].tolist()
            seconds = time.perf_counter() - start
        completion = self._completion(new, "stop" if new[-1] in self.eos_ids else "length", seconds)
        return Reply(completion, cache, self._usage(len(new), seconds, cache))

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
        """As :meth:`HFEngine.stream`, under the allocation.

        Args:
            full: with the full cache instead.
            planned: for each prompt the length of a text, of which the policy's ratio is taken from
                the start.
        """
        with self._caches(full):
            self._planned = None if planned is None else torch.tensor(planned)
            yield from super().stream(prompts, sampling, numbers, stop, before_change)

    def batch(
        self, prompts: list[str], sampling: SamplingParams, full: bool = False
    ) -> tuple[list[Completion], Usage]:
        """The completions of rendered ``prompts`` in their order; as :meth:`reply` for the rest."""
        usages: list[Usage] = []

        def before_change(cache: Cache) -> None:
            usages.append(self._usage(0, 0.0, cache))

        start = time.perf_counter()
        completions = self.generate(prompts, sampling, before_change=before_change, full=full)
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.token_ids) for completion in completions)
        return completions, replace(sum(usages, NO_USAGE), tokens=tokens, seconds=seconds)

    def _new_cache(self, limit: int, rows: list[int]) -> Cache | None:
        if self._session is None:
            return super()._new_cache(limit, rows)
        return self._session.new_cache(
            limit, None if self._planned is None else self._planned[rows]
        )

    @contextmanager
    def _caches(self, full: bool) -> Iterator[Callable[[], Cache]]:
        """Yields what makes a new cache; inside, the model decodes with this kind."""
        if full:
            yield lambda: DynamicCache(config=self.model.config)
            return
        options = {**self.sizes, "eviction": self.eviction, "record": self.record}
        with compress(self.model, self.allocation, **options) as self._session:
            try:
                yield self._session.new_cache
            finally:
                self._session = None

    def _generation_config(self, sampling: SamplingParams) -> GenerationConfig:
        # every field left out here would be taken from the model's own generation config
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            use_cache=True,
            min_new_tokens=0,
            num_beams=1,
            do_sample=not sampling.greedy,
            temperature=1.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=50
            if sampling.greedy
            else sampling.top_k,  # 50 is what transformers takes for unset
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=self.eos_ids,
            pad_token_id=self.pad_id,
        )

    @staticmethod
    def _usage(tokens: int, seconds: float, cache: Cache) -> Usage:
        if isinstance(cache, HeadReallocationCache):
            return Usage(tokens, seconds, cache.used_nbytes(), cache.full_nbytes())
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
        self.engine, self.sampling, self.template = engine, sampling, template
        self.restarted = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []
        self._cache: Cache | None = None

    def say(self, message: str, on_text: OnText | None = None) -> Reply:
        """The model's answer to ``message``, at most up to the model's positions.

        Raises:
            ValueError: as :meth:`InferenceEngine.reply`; the conversation is then as before.
        """
        text = self._render(message)
        ids, cache = self.engine.encode(text), self._cache
        held = [] if cache is None else self._ids[: cache.get_seq_length()]
        if ids[: len(held)] != held or len(ids) <= len(held):
            cache = None
        longest = max(1, min(self.sampling.max_new_tokens, self.engine.max_positions - len(ids)))
        try:
            reply = self.engine.reply(
                ids, replace(self.sampling, max_new_tokens=longest), on_text, cache
            )
        except BaseException:
            self._cache = None  # holds a part of an answer that the conversation does not have
            raise
        self.restarted += self._cache is not None and cache is None
        self._cache, self._ids = reply.cache, ids + reply.completion.token_ids
        self._text = text + reply.completion.text
        self.messages += [
            {"role": "user", "content": fill_template(message, self.template)},
            {"role": "assistant", "content": reply.completion.text},
        ]
        return reply

    def _render(self, message: str) -> str:
        tokenizer: Any = self.engine.tokenizer
        filled = fill_template(message, self.template)
        if not tokenizer.chat_template:  # a model without chat format continues the plain text
            return (
                f"{self._text}\n\n{filled}"
                if self._text
                else render_prompt(tokenizer, message, self.template)
            )
        messages = [*self.messages, {"role": "user", "content": filled}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
