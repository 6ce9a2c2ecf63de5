"""Engines of an evaluation: transformers with one model for all methods, or vLLM in this process.

vLLM loads an engine per method, because weights and blocks are laid out for an allocation, and one
at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import KVSizes
from rlkv.evaluation.runner import Decoder, RunSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.inference.engine import InferenceEngine
from rlkv.models.loading import (
    dtype_name,
    load_model,
    model_facts,
    resolve_device,
    return_freed_memory,
)
from rlkv.models.shape import max_positions
from rlkv.rollout.base import Completion, end_tokens
from rlkv.rollout.decoding import StopRule
from rlkv.rollout.footprint import fitting_kv_gib
from rlkv.vllm.plugin import check_installed, check_version, installed_version
from rlkv.vllm.settings import SERVED, ServingSettings

if TYPE_CHECKING:
    from rlkv.vllm.engine import VLLMEngine

LEAST_STEP = 1024  # tokens of a step on a CPU


class TransformersDecoder:
    """A transformers model under an allocation; a :class:`~rlkv.evaluation.runner.Decoder`.

    Raises:
        ValueError: if the model cannot be compressed, or not with this cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allocation: HeadAllocation,
        cache: CacheSettings,
        batch_size: int,
    ) -> None:
        self.engine = InferenceEngine(model, tokenizer, allocation, cache, batch_size)
        if not cache.evicts_nothing(allocation.full):
            self.engine.check()
        self.allocation = allocation
        self.size = KVSizes.of(model)
        self.facts = facts_of(model, tokenizer)

    def stream(
        self,
        prompts: list[str],
        numbers: list[int],
        settings: RunSettings,
        planned: list[int] | None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield completions, as :class:`~rlkv.evaluation.runner.Decoder` says."""
        yield from self.engine.stream(
            prompts,
            settings.sampling,
            numbers,
            stop_rule(settings),
            full=self.engine.settings.evicts_nothing(self.allocation.full),
            planned=planned,
        )


def facts_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what texts of a model depend on in any engine."""
    return {
        "end_tokens": end_tokens(model.generation_config, tokenizer),
        "model_state": model_facts(model),
    }


def stop_rule(settings: RunSettings) -> StopRule | None:
    """Return the rule that ends texts, if they are to be ended."""
    return settings.rule if settings.stop_repetitive else None


def check_served(
    config: PretrainedConfig, methods: Mapping[str, tuple[HeadAllocation, CacheSettings]]
) -> None:
    """Raise ``ValueError`` if the installed vLLM does not serve one of the methods.

    Args:
        config: the model's; nothing else is loaded.
        methods: by name, which heads are full, and what the others keep.
    """
    architecture = (config.architectures or ["none"])[0]
    check_engine = check_version
    for name, (allocation, cache) in methods.items():
        if cache.evicts_nothing(allocation.full):
            continue
        check_engine = check_installed
        if architecture not in SERVED:
            raise ValueError(
                f"--engine vllm, method {name!r}: the vLLM plugin serves {', '.join(SERVED)}, not "
                f"{architecture}: take --engine hf"
            )
        cache.check_positions(max_positions(config))
        try:
            ServingSettings.of(allocation, cache)
        except ValueError as error:
            said = str(error).removeprefix("rlkv: ")
            raise ValueError(f"--engine vllm, method {name!r}: {said}") from None
    check_engine()


class TransformersModel:
    """A loaded transformers model, which decodes every method."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.config = model.config
        self.dtype = str(model.dtype).removeprefix("torch.")

    def decoder(
        self, allocation: HeadAllocation, cache: CacheSettings, positions: int
    ) -> AbstractContextManager[Decoder]:
        """Return a decoder as :class:`VLLMModel` does; it needs no ``positions``."""
        return nullcontext(
            TransformersDecoder(self.model, self.tokenizer, allocation, cache, self.batch_size)
        )


class VLLMModel:
    """A model that vLLM is to load, and what only its transformers twin tells.

    That is loaded once, on the CPU, and dropped: its weights are compared when a run resumes.
    """

    def __init__(self, model: str, dtype: str, batch_size: int, kv_gib: float | None) -> None:
        self.name = model
        self.dtype = dtype_name(dtype, resolve_device())
        self.batch_size = batch_size
        self.kv_gib = kv_gib
        loaded, self.tokenizer = load_model(model, self.dtype, "cpu")
        self.config = loaded.config
        self.size = KVSizes.of(loaded)
        self.facts = facts_of(loaded, self.tokenizer)
        self.facts["model_state"]["device"] = resolve_device().type
        self.facts["engine"] = f"vllm {installed_version()}"
        del loaded
        return_freed_memory()

    def decoder(
        self, allocation: HeadAllocation, cache: CacheSettings, positions: int
    ) -> AbstractContextManager[Decoder]:
        """Return a decoder for texts of up to ``positions`` tokens with their prompts."""
        return closing(VLLMDecoder(self, allocation, cache, positions))


class VLLMDecoder:
    """vLLM under an allocation; a :class:`~rlkv.evaluation.runner.Decoder`.

    The engine is loaded when the first text is asked for: a method that is complete needs none.
    """

    def __init__(
        self, model: VLLMModel, allocation: HeadAllocation, cache: CacheSettings, positions: int
    ) -> None:
        self.model = model
        self.allocation = allocation
        self.cache = cache
        self.positions = positions
        self.size = model.size
        self.facts = model.facts
        self._engine: VLLMEngine | None = None

    def stream(
        self,
        prompts: list[str],
        numbers: list[int],
        settings: RunSettings,
        planned: list[int] | None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield completions, as :class:`~rlkv.evaluation.runner.Decoder` says."""
        assert planned is None, "of studies, which decode with transformers"
        if not prompts:
            return
        if self._engine is None:
            self._engine = self._open()
        yield from self._engine.stream(prompts, settings.sampling, numbers, stop_rule(settings))

    def close(self) -> None:
        """Give the engine's memory back, if it was loaded."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()
            torch.cuda.empty_cache()  # else the next engine does not see it as free

    def _open(self) -> VLLMEngine:
        """Load the stock engine if all heads are full, else one with the plugin."""
        from rlkv.vllm.engine import ServingEngine, VLLMEngine

        model = self.model
        options: dict[str, Any] = {
            "dtype": model.dtype,
            "max_positions": self.positions,
            "kv_gib": model.kv_gib or fitting_kv_gib(model.name, model.dtype, self.positions),
        }
        if resolve_device().type == "cpu":
            # at its start the engine reads as many tokens as a step may have: 25 s for the 4,096
            # that it would take with a model of 1.5B on one core
            options["max_num_batched_tokens"] = max(self.positions, model.batch_size, LEAST_STEP)
        if self.cache.evicts_nothing(self.allocation.full):
            return VLLMEngine(model.name, max_rows=model.batch_size, **options)
        serving = ServingSettings.of(self.allocation, self.cache)
        return ServingEngine(model.name, serving, model.batch_size, **options)
