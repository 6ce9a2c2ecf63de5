"""Rollouts of transformers models: plain or compressed ones, and gated ones for training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention import LocalSizes
from rlkv.attention.mixed import fast_decoding
from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.reallocation import full_cache
from rlkv.models.shape import max_positions
from rlkv.rollout.base import (
    Completion,
    RolloutEngine,
    Rows,
    Sample,
    SamplingParams,
    completion_text,
    end_tokens,
    gate_version,
)
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
        return max_positions(self.model.config)

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
        text = completion_text(self.tokenizer, row.token_ids)
        return Completion(row.token_ids, text, row.finish_reason, row.seconds)


def roll_out(
    model: PreTrainedModel,
    rows: Rows,
    sampling: SamplingParams,
    eos_ids: list[int],
    pad_id: int,
    max_rows: int,
    sharded: bool = False,
) -> Iterator[Row]:
    """Yield a completion per row, with log-probabilities, in the order of their ends.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start
            of training.
        max_rows: rows decoded at once.
        sharded: as of :class:`~rlkv.rollout.decoding.Decoding`.
    """
    decoding = Decoding(
        model,
        sampling,
        eos_ids,
        pad_id,
        max_rows,
        new_cache=lambda limit, rows: full_cache(model.config, limit),
        rollout=rows.rollout,
        logprobs=True,
        sharded=sharded,
    )
    return decoding.run(rows.prompts, rows.numbers)


class GatedHFEngine:
    """A :class:`~rlkv.rollout.base.GatedEngine`: a model with gates, ``max_rows`` rows at once."""

    def __init__(
        self, model: PreTrainedModel, sizes: LocalSizes, pad_id: int, max_rows: int = 64
    ) -> None:
        """``model`` should be on its device; all gates are 1 at first."""
        from peft import get_peft_model  # not needed to serve: the extra `train` has it

        from rlkv.attention import head_gate

        config = head_gate.HeadGateConfig(sink=sizes.sink, window=sizes.window)
        self.model: Any = get_peft_model(model, config).eval()
        self.pad_id = pad_id
        self.max_rows = max_rows
        self._head_gate = head_gate

    def gates(self) -> Tensor:
        """Return the gates, float32 ``[num_layers, num_kv_heads]``."""
        return self._head_gate.gates_matrix(self.model)

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on, and return their version."""
        self._head_gate.set_gates(self.model, alpha_LH)
        return gate_version(self.gates())

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as rows end, the longest prompts first."""
        base = self.model.get_base_model()
        version = gate_version(self.gates())
        for row in roll_out(base, rows, sampling, eos_ids, self.pad_id, self.max_rows):
            assert row.finish_reason is not None
            yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason, version)
