"""Rollouts of transformers models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention.mixed import fast_decoding
from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.base import Completion, RolloutEngine, SamplingParams, end_tokens
from rlkv.rollout.decoding import Decoding, Row, StopRule

NewCache = Callable[[int, list[int]], Cache | None]


class HFEngine(RolloutEngine):
    """Decodes with a transformers model, as it is patched at the time of the call.

    ``batch_size`` rows at once, the longest prompts first; a row that ends leaves its place to the
    next prompt. Results do not depend on the batch, up to float rounding.
    Sampling defaults and penalties of the model's own generation config are not applied.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16
    ) -> None:
        """Take a model in eval mode, on its device.

        It or the tokenizer must name an end token.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.eos_ids = end_tokens(model.generation_config, tokenizer)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def max_positions(self) -> int:
        """The model's ``max_position_embeddings`` (no limit if its config has none)."""
        config = self.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or sys.maxsize

    def stream(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        numbers: Sequence[int] | None = None,
        stop: StopRule | None = None,
        before_change: Callable[[Cache], None] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield ``(index into prompts, completion)`` as rows end.

        Args:
            numbers: of the rows, which with the seed fix their draws; default: the indices.
            stop: ends rows early, with the finish reason ``repetition``.
            before_change: called with the cache before rows leave it.

        Raises:
            ValueError: as :meth:`check_prompts`.
        """
        encoded = self.tokenize(prompts)
        self.check_prompts(encoded, sampling)
        with fast_decoding(self.model):
            decoding = self._decoding(
                sampling, self._new_cache, stop=stop, before_change=before_change
            )
            for row in decoding.run(encoded, numbers):
                yield row.index, self._completion(row)

    def _decoding(self, sampling: SamplingParams, new_cache: NewCache, **options: Any) -> Decoding:
        return Decoding(
            self.model,
            sampling,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            max_rows=self.batch_size,
            new_cache=new_cache,
            **options,
        )

    def _new_cache(self, limit: int, rows: list[int]) -> Cache | None:
        """Make an empty cache for ``limit`` tokens; None where compress(...) brings its own."""
        compressed = self.model.config._attn_implementation == COMPRESSED
        return None if compressed else full_cache(self.model.config, limit)

    def _completion(self, row: Row) -> Completion:
        assert row.finish_reason is not None
        text = str(self.tokenizer.decode(row.token_ids, skip_special_tokens=True))
        return Completion(row.token_ids, text, row.finish_reason, row.seconds)
