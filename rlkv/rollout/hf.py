"""Rollouts of transformers models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention.mixed import fast_decoding
from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.growing import full_cache
from rlkv.rollout.base import Completion, FinishReason, SamplingParams
from rlkv.rollout.decoding import Decoding, StopRule


class HFEngine:
    """Decodes with a transformers model, as it is patched at the time of the call.

    ``batch_size`` rows are decoded at once, the longest prompts first (what does not fit into memory fails at once); a
    row that ends leaves its place to the next prompt.  Results do not depend on the batch, up to float rounding.
    Penalties and sampling defaults of the model's own generation config are not applied.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16) -> None:
        """``model`` should be in eval mode, on its device; model or tokenizer must name an end token."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.eos_ids = _end_tokens(model, tokenizer)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def max_positions(self) -> int:
        """The model's ``max_position_embeddings`` (no limit if its config has none)."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def prompt_lengths(self, prompts: list[str]) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self._encode(prompts)]

    def stream(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        stop: StopRule | None = None,
        numbers: Sequence[int] | None = None,
        before_change: Callable[[Cache], None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Yield ``(index into prompts, completion)`` as rows end.

        Args:
            stop: ends rows early, with the finish reason ``repetition``.
            numbers: one of each prompt, which fixes its draws; default: its index.
            before_change: called with the cache before rows leave it.

        Raises:
            ValueError: before anything is decoded, if a prompt is empty or does not fit into the model's
                positions together with ``max_new_tokens``.
        """
        encoded = self._encode(prompts)
        for index, ids in enumerate(encoded):
            if not ids:
                raise ValueError(f"prompt {index} is empty: there is nothing to complete")
            if len(ids) + sampling.max_new_tokens > self.max_positions:
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens, which with max_new_tokens={sampling.max_new_tokens} "
                    f"exceeds the model's {self.max_positions} positions: shorten the prompt or lower max_new_tokens"
                )
        with fast_decoding(self.model):
            rows = (self.eos_ids, self.pad_id, self.batch_size, self._new_cache)
            decoding = Decoding(self.model, sampling, *rows, stop=stop, before_change=before_change)
            for row in decoding.run(encoded, numbers):
                yield row.index, self._completion(row.token_ids, row.finish_reason)

    def generate(self, prompts: list[str], sampling: SamplingParams, stop: StopRule | None = None) -> list[Completion]:
        """The completions in the order of ``prompts``; otherwise as :meth:`stream`."""
        found = dict(self.stream(prompts, sampling, stop))
        return [found[i] for i in range(len(prompts))]

    def _encode(self, prompts: list[str]) -> list[list[int]]:
        return self.tokenizer(prompts, add_special_tokens=False).input_ids if prompts else []

    def _new_cache(self, limit: int) -> Cache | None:
        """An empty cache for ``limit`` tokens; None where compress(...) brings its own."""
        compressed = self.model.config._attn_implementation == COMPRESSED
        return None if compressed else full_cache(self.model.config, limit)

    def _completion(self, ids: list[int], reason: FinishReason | None) -> Completion:
        assert reason is not None
        return Completion(ids, str(self.tokenizer.decode(ids, skip_special_tokens=True)), reason)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("neither the model's generation config nor its tokenizer names an end token (eos_token_id)")
    return [eos] if isinstance(eos, int) else list(eos)
