"""Rollouts through ``model.generate``: padded batches of similar prompt lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import IMPLEMENTATION as COMPRESSED
from rlkv.cache.growing import growing_cache
from rlkv.rollout.base import Completion, RolloutEngine, SamplingParams, end_tokens
from rlkv.rollout.watch import RowHooks, RowWatch


class HFEngine(RolloutEngine):
    """Decodes with a transformers model, as it is patched at the time of the call, in batches of similar length.

    The longest come first (what does not fit into memory fails at once).  Sampling defaults and penalties
    of the model's own generation config are not applied.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16) -> None:
        """``model`` should be in eval mode, on its device; model or tokenizer must name an end token."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.eos_ids = end_tokens(model.generation_config, tokenizer)
        self.pad_id = self.eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def max_positions(self) -> int:
        """The model's ``max_position_embeddings`` (no limit if its config has none)."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def stream(
        self, prompts: list[str], sampling: SamplingParams, hooks: RowHooks | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """Yield ``(index into prompts, completion)``, batch by batch; ValueError as :meth:`check_prompts`.

        ``hooks`` see each completion when its row ends, before its batch does, and may end rows early.
        """
        encoded = self.tokenize(prompts)
        self.check_prompts(encoded, sampling)
        order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield from self._decode({i: encoded[i] for i in rows}, sampling, start, hooks or RowHooks()).items()

    def _decode(
        self, rows: dict[int, list[int]], sampling: SamplingParams, draw: int, hooks: RowHooks
    ) -> dict[int, Completion]:
        """The completions of one batch: ``rows`` are the prompts' tokens by their indices."""
        indices = list(rows)
        width = max(len(ids) for ids in rows.values())
        device = self.model.device
        input_ids_BT = torch.tensor([[self.pad_id] * (width - len(ids)) + ids for ids in rows.values()], device=device)
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows.values()], device=device)
        completions: dict[int, Completion] = {}

        def end(row: int, ids: list[int], was_stopped: bool) -> None:
            done = self._finish(ids)
            completions[indices[row]] = replace(done, finish_reason="repetition") if was_stopped else done
            if hooks.on_end is not None:
                hooks.on_end(indices[row], completions[indices[row]])

        generate: Any = self.model.generate  # PreTrainedModel does not declare it, every causal LM has it
        cuda_devices = [device] if device.type == "cuda" else []
        # fork_rng: the caller's random state is left as it was
        with torch.inference_mode(), torch.random.fork_rng(devices=cuda_devices):
            torch.manual_seed(sampling.seed * 1_000_003 + draw)
            output_BT = generate(
                input_ids=input_ids_BT,
                attention_mask=mask_BT,
                past_key_values=self._new_cache(width + sampling.max_new_tokens),
                generation_config=self._generation_config(sampling),
                stopping_criteria=[RowWatch(width, sampling.max_new_tokens, self.eos_ids, hooks.stop, end)],
            )
        for row, index in enumerate(indices):
            if index not in completions:  # the model's own generation config ended the batch
                end(row, output_BT[row, width:].tolist(), False)
        return {index: completions[index] for index in indices}

    def _new_cache(self, limit: int) -> Cache | None:
        """A cache that is not copied at every token; None where compress(...) or the model brings its own."""
        config = self.model.config
        named = self.model.generation_config.cache_implementation is not None
        return None if named or config._attn_implementation == COMPRESSED else growing_cache(config, limit)

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
            top_k=50 if sampling.greedy else sampling.top_k,  # 50 is what transformers takes for unset
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=self.eos_ids,
            pad_token_id=self.pad_id,
        )

    def _finish(self, ids: list[int]) -> Completion:
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        kept = ids if end is None else ids[: end + 1]
        text = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        return Completion(kept, text, "length" if end is None else "stop")
