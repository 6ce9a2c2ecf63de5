"""Modes keep and lossless: all heads hold everything in the engine's own blocks.

In mode keep compressible heads read less; in mode lossless they do while a draft is made, and the
stock kernel verifies it (:mod:`rlkv.vllm.drafts`).  Both save reads and no memory, and change
neither blocks nor weights.  A block of H heads is H pages (:mod:`rlkv.vllm.head_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from rlkv.attention.softmax import Softmax
from rlkv.vllm.aligned import cut_aligned
from rlkv.vllm.backends import AttendingImpl, BackendParts, States, exchanged
from rlkv.vllm.check import ReachabilityCheck, SeenTokens, rows_of_tables, start_check
from rlkv.vllm.configuration import FP8_DTYPES, check_engine
from rlkv.vllm.drafts import draft_with_heads
from rlkv.vllm.head_rows import HeadLayers, HeadPlace, Kernel, StepRows, split_pages
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import GapRules
from rlkv.vllm.reallocation import check_layers, gated_layers
from rlkv.vllm.settings import ServingSettings, resolve_settings

BLOCKS = "the engine's blocks"

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say


@dataclass
class KeepStep(CPUAttentionMetadata):
    """The stock metadata, those over cut tables, and ``StepRows`` of layers with both."""

    cut: Any = None
    rows: Any = None


class KeepCPUBuilder(CPUAttentionMetadataBuilder):
    """Metadata for layers that share blocks, whichever of their heads are compressible."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = self.vllm_config.compilation_config.static_forward_context
        impl = context[self.layer_names[0]].impl
        settings: ServingSettings = impl.settings
        demand = SinkWindowDemand.of(settings, self.block_size)
        longest = self.vllm_config.model_config.max_model_len
        self.rules = GapRules(demand, longest, settings.whole_prompts, aligned=True)
        self.only_drafts = settings.drafts

    @cached_property
    def layers(self) -> HeadLayers:
        """Those with heads of both kinds, made late: a drafter names its layers one by one."""
        context = self.vllm_config.compilation_config.static_forward_context
        impls = [context[name].impl for name in self.layer_names]
        places = {impl.places for impl in impls if len(set(impl.compressible)) == 2}
        pages = len(impls[0].compressible)
        cached = impls[0].kv_cache_dtype  # not all layers need have the engine's
        kernel = Kernel(self.head_dim, self.dtype, self.isa, cached, self.block_size)
        return HeadLayers([*places], pages, kernel, impls[0].num_queries_per_kv)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return stock if self.only_drafts else self._with_cuts(stock, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> KeepStep:
        stock = super().build(0, common_attn_metadata, fast_build=True)
        return self._with_cuts(stock, common_attn_metadata)

    def _with_cuts(self, stock: CPUAttentionMetadata, common: Any) -> KeepStep:
        cut = cut_aligned(common, self.rules, self.vllm_config)
        step = KeepStep(**vars(stock))
        step.cut = super().build(0, cut)
        step.rows = StepRows(self.layers, (stock, step.cut))
        return step


class KeepCPUImpl(AttendingImpl, CPUAttentionBackendImpl):
    """A layer whose compressible heads read the blocks of sinks and window.

    Attributes:
        compressible: of each KV head of this rank.
        settings: resolved ones.
    """

    compressible: tuple[bool, ...]
    settings: ServingSettings
    check: ReachabilityCheck | None = None

    @cached_property
    def places(self) -> tuple[HeadPlace, ...]:
        """Full heads read the step's own tables, compressible ones the cut ones."""
        return tuple(HeadPlace(int(cut), head) for head, cut in enumerate(self.compressible))

    def attend(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        # in mode lossless the steps that verify have the stock metadata
        reads_less = isinstance(step, KeepStep) and any(self.compressible)
        if reads_less and not all(self.compressible):
            blocks, heads, size, _ = kv.shape
            cache = split_pages(kv.view(blocks * heads, 1, 2 * size, -1))
            step.rows.attend(layer, self.places, states.query, cache, self.scale, out)
        else:
            own = step.cut if reads_less else step
            CPUAttentionBackendImpl.forward(self, layer, *states, kv, own, out)
        if self.check is None:
            return
        if self.settings.drafts and isinstance(step, KeepStep):
            # what a draft reads does not change the text, what it writes must not be read
            self.check.forget(BLOCKS, step.slot_mapping)
        else:
            self._check(layer, states, kv, step, out)

    def _check(self, layer: Any, states: States, kv: Tensor, step: Any, out: Tensor) -> None:
        """Check a ``KeepStep``, or in mode lossless the stock metadata of a verification."""
        assert self.check is not None
        blocks, heads, size, _ = kv.shape
        slots = step.slot_mapping
        self.check.write(BLOCKS, blocks * size, slots)
        softmax = Softmax(self.scale)
        is_uniform = self.settings.drafts or len(set(self.compressible)) == 1
        for head, is_compressible in enumerate(self.compressible):
            reads_less = is_compressible and not self.settings.drafts
            seen = SeenTokens(self.settings, size if reads_less else None)
            if is_uniform:
                rows = [*rows_of_tables(step.cut if reads_less else step, size)]
                # once for all heads of the layer
                self.check.compare(BLOCKS, layer.layer_name, rows, heads, seen)
            else:
                rows = [*step.rows.handed(self.places, head)]
                self.check.compare(BLOCKS, (self.compressible, head), rows, 1, seen)
            if self.kv_cache_dtype in FP8_DTYPES:  # what is noted would not be rounded
                continue
            own = []
            for tensor in (*states, out):
                by_head = tensor[: len(slots)].view(len(slots), heads, -1, self.head_size)
                own.append(by_head[:, head])
            name = f"{layer.layer_name}, head {head}"
            self.check.recompute(
                name, blocks * size, slots, (own[0], own[1], own[2]), rows, softmax, own[3]
            )


class KeepCPUBackend(BackendParts, CPUAttentionBackend):
    impl = KeepCPUImpl
    builder = KeepCPUBuilder
    name = CPUAttentionBackend.get_name()


def attach_keep(model: Any, vllm_config: Any) -> None:
    """Exchange the attention layers with gates under their own names, for mode keep or lossless.

    Raises:
        ValueError: for what is not supported or does not fit the model.
    """
    settings = resolve_settings(vllm_config)
    check_engine(vllm_config, settings.feature)
    check = start_check(settings, vllm_config)
    layers = gated_layers(model, vllm_config)
    check_layers([layer.attn for layer in layers], settings.feature)
    full = int(settings.full_LH.sum())
    logger.info(
        "rlkv: %s: %d full and %d compressible heads hold everything; the latter read the blocks "
        "of %d + %d tokens%s",
        settings.feature,
        full,
        settings.full_LH.numel() - full,
        settings.sink,
        settings.window,
        " while they draft" if settings.drafts else "",
    )
    for place, layer in enumerate(layers):
        stock = layer.attn
        kept = exchanged(stock, KeepCPUBackend, vllm_config)
        first = get_tensor_model_parallel_rank() * stock.num_kv_heads
        full_H = settings.full_LH[place, first : first + stock.num_kv_heads]
        kept.impl.compressible = tuple((~full_H).tolist())
        kept.impl.settings = settings
        kept.impl.check = check
        layer.attn = kept
    if settings.drafts:
        model.rlkv_drafts = [layer.attn.layer_name for layer in layers]
        draft_with_heads()
