"""Rollouts of transformers models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence

from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention.mixed import fast_decoding
from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.base import Completion, FinishReason, RolloutEngine, SamplingParams, end_tokens
from rlkv.rollout.decoding import Decoding, StopRule


class HFEngine(RolloutEngine):
    """Decodes with a transformers model, as it is patched at the time of the call.

    ``batch_size`` rows at once, the longest prompts first; a row that ends leaves its place to the
    next prompt. Results do not depend on the batch, up to float rounding.
    Sampling defaults and penalties of the model's own generation config are not applied.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16
    ) -> None:
        """``model`` should be in eval mode, on its device.

        Model or tokenizer must name an end token.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.eos_ids = end_tokens(model.generation_config, tokenizer)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def max_positions(self) -> int:
        """The model's ``max_position_embeddings`` (no limit if its config has none)."""
        return (
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            or sys.maxsize
        )

    def stream(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        numbers: Sequence[int] | None = None,
        stop: StopRule | None = None,
        before_change: Callable[[Cache], None] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield ``(index into prompts, completion)`` as rows end.

        ValueError as :meth:`check_prompts`.

        Args:
            numbers: one of each prompt, which fixes its draws; default: its index.
            stop: ends rows early, with the finish reason ``repetition``.
            before_change: called with the cache before rows leave it.
        """
        encoded = self.tokenize(prompts)
        self.check_prompts(encoded, sampling)
        with fast_decoding(self.model):
            rows = (self.eos_ids, self.pad_id, self.batch_size, self._new_cache)
            decoding = Decoding(self.model, sampling, *rows, stop=stop, before_change=before_change)
            for row in decoding.run(encoded, numbers):
                assert row.finish_reason is not None
                yield row.index, self._completion(row.token_ids, row.finish_reason, row.seconds)

    def _new_cache(self, limit: int, rows: list[int]) -> Cache | None:
        """An empty cache for ``limit`` tokens of the prompts ``rows``.

        None where compress(...) brings its own.
        """
        compressed = self.model.config._attn_implementation == COMPRESSED
        return None if compressed else full_cache(self.model.config, limit)

    def _completion(self, ids: list[int], reason: FinishReason, seconds: float) -> Completion:
        return Completion(
            ids, str(self.tokenizer.decode(ids, skip_special_tokens=True)), reason, seconds
        )
