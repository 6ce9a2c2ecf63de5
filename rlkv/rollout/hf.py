"""Rollouts of transformers models: plain or compressed ones, and gated ones for training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.attention import LocalSizes
from rlkv.attention.mixed import fast_decoding
from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.base import (
    Completion,
    FinishReason,
    RolloutEngine,
    Rows,
    Sample,
    SamplingParams,
    end_tokens,
    gate_version,
)
from rlkv.rollout.decoding import Decoding, Row, StopRule


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
        """Sample under these gates from now on, and return their version.

        Raises:
            ValueError: for gates of another shape.
        """
        expected = self.gates().shape
        if alpha_LH.shape != expected:
            raise ValueError(f"the model has gates {list(expected)}, got {list(alpha_LH.shape)}")
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
