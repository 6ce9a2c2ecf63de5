"""vLLM with head reallocation in the caller's process: the engine of ``rlkv-infer --backend vllm``."""

from __future__ import annotations

import time
from typing import Any

from rlkv.models.shape import ModelShape
from rlkv.rollout.base import Completion, SamplingParams, Usage
from rlkv.vllm.blocks.packing import plan_heads
from rlkv.vllm.engine import VLLMEngine, load_config
from rlkv.vllm.plugin import check_installed
from rlkv.vllm.settings import KEY, ServingSettings

CPU_BLOCK_SIZE = 32  # the smallest that the CPU kernels take; what the engine would choose, 128, keeps more than S + W


class ServingEngine(VLLMEngine):
    """A model under an allocation, served by vLLM.

    Example::

        settings = ServingSettings.of(allocation, CacheSettings(sink=16, window=64))
        engine = ServingEngine("tiny", settings, dtype="float32")
        completions, usage = engine.batch(prompts, SamplingParams(max_new_tokens=200))
        engine.close()
    """

    def __init__(self, model: str, settings: ServingSettings, batch_size: int = 8, **options: Any) -> None:
        """``settings`` name the allocation (:meth:`ServingSettings.of`); ``options`` as of :class:`VLLMEngine`.

        Raises:
            ValueError: as :class:`VLLMEngine`, and if vLLM would not load the plugin or the allocation is of another
                model.
        """
        check_installed()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            options.setdefault("block_size", CPU_BLOCK_SIZE)
        if settings.whole_prompts:  # a step must have room for the longest prompt
            longest = options.get("max_positions") or load_config(model).get_text_config().max_position_embeddings
            options.setdefault("max_num_batched_tokens", longest)
        super().__init__(model, max_rows=batch_size, additional_config={KEY: settings.to_request()}, **options)
        self.batch_size, self.settings = batch_size, settings
        self.allocation, self.eviction = settings.allocation, settings.policy()
        config = self.llm.llm_engine.vllm_config
        shape, dtype = ModelShape.from_config(config.model_config.hf_config), config.model_config.dtype
        group_size = shape.num_query_heads // shape.num_kv_heads
        ranks = config.parallel_config.tensor_parallel_size
        self.plans = plan_heads(settings, config.cache_config.block_size, group_size, self.max_positions, ranks)
        self.dtype = str(dtype).removeprefix("torch.")
        self.entry_bytes = 2 * shape.head_dim * dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """What completions depend on: numbers, and what the compressible heads keep."""
        own = {name: getattr(self.settings, name) for name in ("sink", "window", "prefill", "eviction")}
        if self.settings.protect_prompt:  # left out otherwise, as by the transformers backend
            own["protect_prompt"] = True
        return {"dtype": self.dtype, "device": "vllm", **own}

    def batch(self, prompts: list[str], sampling: SamplingParams, full: bool = False) -> tuple[list[Completion], Usage]:
        """The completions of rendered ``prompts`` in their order; bytes are those of all blocks at the texts' ends."""
        if full:
            raise ValueError("the vLLM backend has no second, uncompressed cache: compare with the hf backend")
        start = time.perf_counter()
        completions = self.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        made = [len(completion.token_ids) for completion in completions]
        given = self.prompt_lengths(prompts)
        lengths = [n + own - 1 for n, own in zip(given, made, strict=True)]  # the last token is never fed back
        held = sum(sum(map(plan.held, lengths, given)) for plan in self.plans) * self.entry_bytes
        full_bytes = sum(plan.uncompressed(length) for plan in self.plans for length in lengths) * self.entry_bytes
        return completions, Usage(sum(made), seconds, held, full_bytes)
