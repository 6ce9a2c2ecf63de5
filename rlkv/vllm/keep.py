"""Modes keep and lossless: all heads hold everything in the engine's own blocks.

In mode keep compressible heads read less; in mode lossless they do while a draft is made, and the
stock kernel verifies it (:mod:`rlkv.vllm.drafts`).  Both save reads and no memory, and change
neither blocks nor weights.  A block of H heads is H pages
side by side: R sequences of H heads are R * H sequences of one head, each with its own length and
table, for the stock kernel.

Shapes: T tokens of a step, R requests, P pieces of equal blocks, H KV heads of a layer, G query
heads for each, D head size, N tokens of a block, C columns of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm import _custom_ops as ops
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from rlkv.attention.softmax import Softmax
from rlkv.vllm.aligned import cut_aligned
from rlkv.vllm.backends import BackendParts
from rlkv.vllm.check import ReachabilityCheck, Row, SeenTokens, rows_of_tables, start_check
from rlkv.vllm.configuration import FP8_DTYPES, check_engine
from rlkv.vllm.drafts import draft_with_heads
from rlkv.vllm.packing import SinkWindowDemand
from rlkv.vllm.paged import GapRules
from rlkv.vllm.reallocation import check_layers, gated_layers
from rlkv.vllm.settings import ServingSettings, resolve_settings

BLOCKS = "the engine's blocks"

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say


class HeadRows(NamedTuple):
    """Heads as sequences: their tables of pages, lengths, starts and the kernel's schedule."""

    table: Tensor
    lengths: Tensor
    starts: Tensor
    schedule: Tensor


@dataclass
class KeepStep(CPUAttentionMetadata):
    """The stock metadata, those over cut tables, and rows by a layer's pattern of heads.

    ``decoding``: whether every request has one query; ``columns``: of the longest table.
    """

    cut: Any = None
    builder: Any = None
    decoding: bool = False
    columns: int = 0
    rows: dict[tuple[bool, ...], HeadRows] = field(default_factory=dict)


class KeepCPUBuilder(CPUAttentionMetadataBuilder):
    """Metadata for layers that share blocks, whichever of their heads are compressible."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = self.vllm_config.compilation_config.static_forward_context
        impl = context[self.layer_names[0]].impl
        settings: ServingSettings = impl.settings
        assert settings.sink is not None
        assert settings.window is not None
        demand = SinkWindowDemand(
            self.block_size, settings.sink, settings.window, bool(settings.protect_prompt)
        )
        longest = self.vllm_config.model_config.max_model_len
        self.rules = GapRules(demand, longest, settings.whole_prompts, aligned=True)
        self.group_size = impl.num_queries_per_kv
        self.only_drafts = settings.drafts

    @cached_property
    def patterns(self) -> list[tuple[bool, ...]]:
        """Of layers with heads of both kinds, made late: a drafter names its layers one by one."""
        context = self.vllm_config.compilation_config.static_forward_context
        patterns = {context[name].impl.compressible for name in self.layer_names}
        return [own for own in patterns if any(own) and not all(own)]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if self.only_drafts:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._build(common_prefix_len, common_attn_metadata, fast_build)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> KeepStep:
        return self._build(0, common_attn_metadata, True)

    def _build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool
    ) -> KeepStep:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        cut = cut_aligned(common_attn_metadata, self.rules, self.vllm_config)
        step = KeepStep(**vars(stock))
        step.cut = super().build(0, cut, fast_build)
        step.builder = self
        step.decoding = step.max_query_len == 1
        # the engine's tables are as wide as its longest text
        needed = -(-step.max_seq_len // self.block_size)
        step.columns = max(needed, step.cut.block_table.shape[1])
        return step

    def rows(self, step: KeepStep, compressible: tuple[bool, ...]) -> HeadRows:
        """Return the rows of a layer with these heads, made once in a step.

        In a step of decoding the heads of a request are neighbours, as its queries are; else the
        requests of a head.
        """
        if step.decoding and not step.rows:
            self._decode(step)
        if compressible not in step.rows:
            step.rows[compressible] = self._scheduled(*self._sequences(step, compressible))
        return step.rows[compressible]

    def _decode(self, step: KeepStep) -> None:
        """Make the rows of all layers in a step of decoding, together: it is a short one."""
        chosen_LH = torch.tensor(self.patterns)
        heads = chosen_LH.shape[1]
        full, cut = self._pages(step, heads)
        chosen = chosen_LH[:, None, :, None]
        page_LRHC = torch.where(chosen, cut[:, None], full[:, None])
        page_LRHC += torch.arange(heads, dtype=torch.int32)[:, None]
        lengths_LRH = torch.where(
            chosen[..., 0], step.cut.seq_lens[:, None], step.seq_lens[:, None]
        )
        starts = torch.arange(lengths_LRH[0].numel() + 1, dtype=torch.int32)
        pages = page_LRHC.flatten(1, 2)
        lengths = lengths_LRH.flatten(1)
        for number, pattern in enumerate(self.patterns):
            step.rows[pattern] = self._scheduled(pages[number], lengths[number], starts)

    def _pages(self, step: KeepStep, heads: int) -> tuple[Tensor, Tensor]:
        """Return the pages of the first head, of whole tables and of cut ones, equally wide."""
        full = step.block_table[:, : step.columns] * heads
        missing = full.shape[1] - step.cut.block_table.shape[1]
        return full, pad(step.cut.block_table * heads, (0, missing))

    def _sequences(
        self, step: KeepStep, compressible: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return pages, lengths and starts of all heads' sequences, head by head."""
        full, cut = self._pages(step, len(compressible))
        kinds = [(full, step), (cut, step.cut)]
        tables = []
        lengths = []
        counts = []
        for head, is_compressible in enumerate(compressible):
            pages, of_kind = kinds[is_compressible]
            tables.append(pages + head)
            lengths.append(of_kind.seq_lens)
            counts.append(of_kind.query_start_loc.diff())
        starts = pad(torch.cat(counts).cumsum(0), (1, 0)).int()
        return torch.cat(tables), torch.cat(lengths), starts

    def _scheduled(self, table: Tensor, lengths: Tensor, starts: Tensor) -> HeadRows:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.group_size,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return HeadRows(table, lengths, starts, schedule)


class KeepCPUImpl(CPUAttentionBackendImpl):
    """A layer whose compressible heads read the blocks of sinks and window.

    Attributes:
        compressible: of each KV head of this rank.
        settings: resolved ones.
    """

    compressible: tuple[bool, ...]
    settings: ServingSettings
    check: ReachabilityCheck | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        step = attn_metadata
        # in mode lossless the steps that verify have the stock metadata
        if isinstance(step, KeepStep) and any(self.compressible):
            if not all(self.compressible):
                self._attend_by_head(layer, query, kv_cache, step, output)
                step = None
            else:
                step = step.cut
        if step is not None:
            super().forward(layer, query, key, value, kv_cache, step, output, *args, **kwargs)
        # what a draft reads does not change the text
        drafts = self.settings.drafts and isinstance(attn_metadata, KeepStep)
        if self.check is not None and attn_metadata is not None and not drafts:
            self._check(layer, (query, key, value), kv_cache, attn_metadata, output)
        return output

    def _attend_by_head(
        self, layer: Any, query: Tensor, kv_cache: Tensor, step: KeepStep, output: Tensor
    ) -> None:
        tokens = step.num_actual_tokens
        blocks, heads, size, _ = kv_cache.shape
        pages = kv_cache.view(blocks * heads, 1, 2 * size, -1)
        keys, values = pages.chunk(2, 2)
        rows = step.builder.rows(step, self.compressible)
        own = query[:tokens].view(tokens, heads, -1, self.head_size)
        if not step.decoding:
            own = own.transpose(0, 1)
        own = own.contiguous()
        out = torch.empty_like(own)
        ops.cpu_attention_with_kv_cache(
            query=own.view(-1, *own.shape[2:]),
            key_cache=keys,
            value_cache=values,
            output=out.view(-1, *out.shape[2:]),
            query_start_loc=rows.starts,
            seq_lens=rows.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=rows.table,
            softcap=0,
            scheduler_metadata=rows.schedule,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if not step.decoding:
            out = out.transpose(0, 1)
        output[:tokens] = out.reshape(tokens, *output.shape[1:])

    def _check(
        self,
        layer: Any,
        states: tuple[Tensor, Tensor, Tensor],
        kv_cache: Tensor,
        step: KeepStep,
        output: Tensor,
    ) -> None:
        assert self.check is not None
        blocks, heads, size, _ = kv_cache.shape
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
                self.check.compare(BLOCKS, layer.layer_name, iter(rows), heads, seen)
            else:
                rows = [*_rows_of_head(step, self.compressible, head, size)]
                self.check.compare(BLOCKS, (self.compressible, head), iter(rows), 1, seen)
            if self.kv_cache_dtype in FP8_DTYPES:  # what is noted would not be rounded
                continue
            own = []
            for tensor in (*states, output):
                by_head = tensor[: len(slots)].view(len(slots), heads, -1, self.head_size)
                own.append(by_head[:, head])
            name = f"{layer.layer_name}, head {head}"
            self.check.recompute(
                name, blocks * size, slots, (own[0], own[1], own[2]), iter(rows), softmax, own[3]
            )


def _rows_of_head(
    step: KeepStep, compressible: tuple[bool, ...], head: int, size: int
) -> Iterator[Row]:
    """Yield what a head's sequences read: pages of this head alone."""
    heads = len(compressible)
    own = step.rows[compressible]
    first = head * step.num_actual_tokens
    for number, (start, end) in enumerate(pairwise(own.starts.tolist())):
        if step.decoding:
            if number % heads != head:
                continue
            tokens = range(number // heads, number // heads + 1)
        elif first <= start < first + step.num_actual_tokens:
            tokens = range(start - first, end - first)
        else:
            continue
        length = int(own.lengths[number])
        place = torch.arange(length)
        page = own.table[number][place // size].long()
        assert bool((page % heads == head).all()), "a page of another head"
        slots = page // heads * size + place % size
        for token in tokens:
            yield Row(token, slots[: length - (tokens[-1] - token)])


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
    if not current_platform.is_cpu():
        raise ValueError(
            f"rlkv: {settings.feature} is served by vLLM for CPUs alone: leave mode out on a GPU"
        )
    check = start_check(settings)
    context = vllm_config.compilation_config.static_forward_context
    layers = gated_layers(model, vllm_config)
    check_layers([layer.attn for layer in layers])
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
        if getattr(stock.impl, "sinks", None) is not None:
            raise ValueError(
                f"rlkv: {settings.feature} is not served with learned sinks, which differ by "
                "head: leave mode out"
            )
        del context[stock.layer_name]
        kept = Attention(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=stock.layer_name,
            attn_backend=KeepCPUBackend,
        )
        first = get_tensor_model_parallel_rank() * stock.num_kv_heads
        full_H = settings.full_LH[place, first : first + stock.num_kv_heads]
        kept.impl.compressible = tuple((~full_H).tolist())
        kept.impl.settings = settings
        kept.impl.check = check
        layer.attn = kept
    if settings.drafts:
        model.rlkv_drafts = [layer.attn.layer_name for layer in layers]
        draft_with_heads()
