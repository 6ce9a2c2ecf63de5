"""vLLM with head reallocation in the caller's process: the engine of ``rlkv-infer --backend vllm``."""

from __future__ import annotations

import time
from typing import Any

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import model_source
from rlkv.models.shape import ModelShape
from rlkv.rollout.base import Completion, SamplingParams, Usage
from rlkv.vllm.blocks.buffers import BufferUse, Use
from rlkv.vllm.blocks.packing import BlockUse, plan_packing
from rlkv.vllm.blocks.report import block_bytes
from rlkv.vllm.engine import VLLMEngine
from rlkv.vllm.plugin import check_installed
from rlkv.vllm.settings import KEY, parse_settings
from rlkv.vllm.versions import check_version, installed_version

CPU_BLOCK_SIZE = 32  # the smallest that the CPU kernels take; what the engine would choose, 128, keeps more than S + W


def _longest_text(model: str) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_source(model)).get_text_config().max_position_embeddings


class ServingEngine(VLLMEngine):
    """A model under an allocation, served by vLLM.

    ``request`` is what ``additional_config["rlkv"]`` holds (:class:`rlkv.vllm.settings.ServingSettings`).

    Raises:
        ValueError: without vLLM, with another version or installation, for wrong settings and gates of another model.
    """

    def __init__(self, model: str, request: dict[str, Any], batch_size: int = 8, **options: Any) -> None:
        check_version(installed_version())
        check_installed()
        settings = parse_settings(request)
        gates = HeadGates.load(settings.gates)
        self.allocation = HeadAllocation.from_gates(gates, settings.sparsity, settings.scope)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            options.setdefault("block_size", CPU_BLOCK_SIZE)
        if settings.prefill == "full":  # a step has to have room for the longest prompt
            options.setdefault("max_num_batched_tokens", options.get("max_positions") or _longest_text(model))
        super().__init__(model, max_rows=batch_size, additional_config={KEY: dict(request)}, **options)
        self.batch_size = batch_size
        config = self.llm.llm_engine.vllm_config
        self.settings = settings
        self.eviction = settings.policy()
        self.sizes: dict[str, Any] = {
            "sink": gates.deploy_sink if settings.sink is None else settings.sink,
            "window": gates.deploy_window if settings.window is None else settings.window,
            "prefill": settings.prefill,
        }
        shape, block_size = ModelShape.from_config(config.model_config.hf_config), config.cache_config.block_size
        use: Use = BlockUse(block_size, self.sizes["sink"], self.sizes["window"])
        if self.eviction is not None:
            use = BufferUse.of(self.eviction, block_size, shape.num_query_heads // shape.num_kv_heads)
        self.plan = plan_packing(self.allocation.full, use, min(settings.reference_tokens, self.max_positions))
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        per_block = block_bytes(self.plan, shape.head_dim, config.model_config.dtype.itemsize)
        self.head_bytes = per_block // self.plan.heads_per_block

    def cache_settings(self) -> dict[str, Any]:
        """What the compressible heads keep, for settings and reports."""
        eviction = None if self.eviction is None else self.eviction.describe()
        return {**self.sizes, "eviction": eviction, "backend": "vllm"}

    def batch(self, prompts: list[str], sampling: SamplingParams, full: bool = False) -> tuple[list[Completion], Usage]:
        """The completions of rendered ``prompts`` in their order.

        The bytes are those of the blocks that all texts hold at their ends, by the plan that the engine was checked
        against when it started.

        Raises:
            ValueError: if ``full`` is asked for: an engine has one allocation for all its life.
        """
        if full:
            raise ValueError("the vLLM backend has no second, uncompressed cache: compare with the hf backend")
        start = time.perf_counter()
        completions = self.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        made = [len(completion.token_ids) for completion in completions]
        # the last token of a text is never fed back
        lengths = [n + own - 1 for n, own in zip(self.prompt_lengths(prompts), made, strict=True)]
        held = sum(self.plan.held(length) for length in lengths) * self.head_bytes
        full_bytes = sum(self.plan.uncompressed(length) for length in lengths) * self.head_bytes
        return completions, Usage(sum(made), seconds, held, full_bytes)
