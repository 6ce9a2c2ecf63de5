"""Head reallocation in a stock model: bins as attention layers, split attention.

The heads of one bin, of all layers, are one attention layer of the engine: one KV tensor, spec and
block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.utils.torch_utils import _encode_layer_name as encode_layer_name
from vllm.utils.torch_utils import _resolve_layer_name as resolve_layer_name
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MambaSpec

from rlkv.attention.softmax import Softmax
from rlkv.models.layout import Layout
from rlkv.vllm.backends import CPU_KERNELS, full_backend, local_backend, pooled_backend
from rlkv.vllm.check import (
    ReachabilityCheck,
    Row,
    SeenTokens,
    rows_of_reads,
    rows_of_tables,
    start_check,
)
from rlkv.vllm.configuration import check_engine
from rlkv.vllm.evicting import Eviction, evicting_backend
from rlkv.vllm.head_order import HeadOrder
from rlkv.vllm.joined import JoinedBins
from rlkv.vllm.packing import (
    Bin,
    BufferDemand,
    OtherLayer,
    PackingPlan,
    Part,
    SinkWindowDemand,
    plan_heads,
)
from rlkv.vllm.paged import GapRules
from rlkv.vllm.settings import REALLOCATION, ServingSettings, resolve_settings
from rlkv.vllm.specs import EvictingSpec, PackedFullSpec, SinkWindowSpec


class BinAttention(Attention):
    """A bin as a layer of the engine, which never runs: its parts do, on slices of the cache.

    Its number of heads is that of the largest part, by which builders of metadata size what kernels
    share.
    """

    parts: tuple[PartAttention, ...] = ()
    settings: ServingSettings
    check: ReachabilityCheck | None = None
    # called with the number of blocks when the engine has its pool
    on_pool: Callable[[int], None] | None = None
    _kv_cache: Tensor

    def __init__(
        self,
        stock: Attention,
        number: int,
        own: Bin,
        kept: Eviction | GapRules | None,
        vllm_config: Any,
        page: int | None = None,
    ) -> None:
        """Make the layer of bin ``number``.

        Args:
            stock: any of the attention layers that are replaced.
            kept: what compressible heads keep.
            page: bytes of a block, where linear layers ask for equal ones; None: what it needs.
        """
        if own.full:
            backend = full_backend(stock)
        elif isinstance(kept, Eviction):
            backend = evicting_backend()
        else:
            assert kept is not None, "what compressible heads keep"
            backend = local_backend(stock, kept)
        super().__init__(
            own.largest_part * stock.num_heads // stock.num_kv_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=own.largest_part,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=f"rlkv_bins.{number}",
            attn_backend=backend,
        )
        self.number = number
        self.bin = own
        self.planned = vllm_config.cache_config.block_size
        self.kept = None if own.full else kept
        self.page = page

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        """Give each part its slice of a cache ``[blocks, heads of the bin, tokens, 2 * size]``.

        The engine binds an empty tensor to free it.
        """
        self._kv_cache = cache
        is_bound = cache.dim() == 4
        if is_bound and self.on_pool is not None:
            self.on_pool(len(cache))
        for part in self.parts:
            end = part.first + part.num_kv_heads
            part.kv_cache = cache[:, part.first : end] if is_bound else cache

    def get_kv_cache_spec(self, vllm_config: Any) -> PackedFullSpec | EvictingSpec | SinkWindowSpec:
        chosen = vllm_config.cache_config.block_size
        # a few backends ask for another size after loading; with linear layers the engine sizes a
        # layer's block by their states, which bins need not
        if chosen != self.planned and not vllm_config.model_config.is_hybrid:
            raise ValueError(
                f"rlkv: the engine chose blocks of {chosen} tokens too late: pass --block-size "
                f"{chosen}"
            )
        common: dict[str, Any] = {
            "block_size": self.bin.demand.block_size,
            "num_kv_heads": len(self.bin.heads),
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": self.kv_cache_torch_dtype,
            "page_size_padded": self.page,
            "bin": self.number,
        }
        if self.bin.full:
            protects = getattr(self.bin.demand, "protect_prompt", False)
            return PackedFullSpec(**common, protect_prompt=protects)
        kept = asdict(self.bin.demand) | common
        if isinstance(self.kept, Eviction):
            return EvictingSpec(**kept)
        return SinkWindowSpec(
            **kept,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )


class PartAttention:
    """The heads of one layer in one bin: what runs.

    sinks: learned ones of the part's query heads; None: the model has none.
    """

    def __init__(self, own: BinAttention, part: Part, sinks: Tensor | None) -> None:
        own.parts = (*own.parts, self)
        self.bin_name = own.layer_name
        self.first = part.first
        self.num_kv_heads = len(part.heads)
        self.num_heads = self.num_kv_heads * own.impl.num_heads // own.impl.num_kv_heads
        self.kv_cache = torch.tensor([])
        self.writes_first = not own.attn_backend.forward_includes_kv_cache_update
        scale = own.impl.scale
        dtype = own.kv_cache_dtype
        kind: Any = own.attn_backend.get_impl_cls()
        learned = {} if sinks is None else {"sinks": sinks}  # few kinds know the argument
        self.impl = kind(
            self.num_heads, own.head_size, scale, self.num_kv_heads, None, None, dtype, **learned
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Do what the engine's attention operators do, with states ``[tokens, heads, size]``."""
        metadata, own, _, slots = get_attention_context(self.bin_name)
        if self.writes_first and slots is not None:
            self.impl.do_kv_cache_update(own, key, value, self.kv_cache, slots)
        self.impl.forward(own, query, key, value, self.kv_cache, metadata, output)
        if own.check is not None and metadata is not None:
            if isinstance(metadata, tuple):
                _, reads, prompts = metadata
                rows = [*rows_of_reads(reads, prompts, slots)]
            else:
                rows = [*rows_of_tables(metadata, self.kv_cache.shape[2])]
            self.check(own, rows, slots, (query, key, value), output)

    def check(
        self,
        own: BinAttention,
        rows: list[Row],
        slots: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        head: Any = None,
    ) -> None:
        """Compare what the kernel was handed for all heads of the bin, or for a ``head`` alone."""
        check = own.check
        assert check is not None
        blocks, _, size, _ = self.kv_cache.shape
        entries = blocks * size
        block = None
        if isinstance(own.kept, GapRules):
            block = size if own.kept.aligned else 1
        seen = SeenTokens(own.settings, block)
        check.write(self.bin_name, entries, slots)
        heads = len(own.bin.heads) if head is None else 1
        check.compare(self.bin_name, head, rows, heads, seen)
        softmax = Softmax(self.impl.scale, sinks_N=getattr(self.impl, "sinks", None))
        name = f"{self.bin_name}, heads from {self.first} on"
        check.recompute(name, entries, slots, states, rows, softmax, output)


class SplitAttention(nn.Module):
    """A layer's attention in parts, with the call of the stock layer.

    The projections' weights were reordered when they were loaded: each part reads and writes a
    slice.
    """

    def __init__(
        self,
        stock: Attention,
        parts: list[PartAttention],
        vllm_config: Any,
        joined: JoinedBins | None = None,
    ) -> None:
        super().__init__()
        self.layer_name = stock.layer_name
        self.head_size = stock.head_size
        self.parts = parts
        self.joined = joined
        self.number = None if joined is None else joined.add_layer(parts)
        self.heads = [part.num_heads for part in parts]
        self.kv_heads = [part.num_kv_heads for part in parts]
        compilation = vllm_config.compilation_config
        # where the operator below finds it
        compilation.static_forward_context[self.layer_name] = self
        if compilation.splitting_ops and OPERATOR not in compilation.splitting_ops:
            compilation.splitting_ops.append(OPERATOR)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: ``[T, H * G * D]``, ``[T, H * D]`` twice, to ``[T, H * G * D]``."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        torch.ops.vllm.rlkv_split_attention(
            query, key, value, output, encode_layer_name(self.layer_name)
        )
        return output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        if self.joined is not None and self.number is not None:
            states = []
            for tensor in (query, key, value, output):
                states.append(tensor.view(tensor.shape[0], -1, self.head_size))
            self.joined.attend(self.number, *states)
            return
        slices = []
        for tensor, heads in (
            (query, self.heads),
            (key, self.kv_heads),
            (value, self.kv_heads),
            (output, self.heads),
        ):
            slices.append(tensor.view(len(tensor), -1, self.head_size).split_with_sizes(heads, 1))
        for part, *own in zip(self.parts, *slices, strict=True):
            part.attend(*own)


def _split_attention(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: LayerNameType
) -> None:
    layers = get_forward_context().no_compile_layers
    layers[resolve_layer_name(layer_name)].attend(query, key, value, output)


def _split_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: LayerNameType
) -> None: ...


# one operator for all parts of a layer: compiled graphs must not see slices that are written to
OPERATOR = "vllm::rlkv_split_attention"
# the engine reads types off the function, and here they are only names
_split_attention.__annotations__ = {
    **dict.fromkeys(("query", "key", "value", "output"), Tensor),
    "layer_name": LayerNameType,
    "return": None,
}
direct_register_custom_op(
    op_name="rlkv_split_attention",
    op_func=_split_attention,
    mutates_args=["output"],
    fake_impl=_split_attention_fake,
)

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say


def attach_reallocation(model: Any, vllm_config: Any) -> HeadOrder:
    """Exchange the attention layers of a stock model.

    Returns:
        The order of its heads, for its weights.

    Raises:
        ValueError: for what is not supported or does not fit the model.
    """
    check_engine(vllm_config)
    settings = resolve_settings(vllm_config)
    check = start_check(settings, vllm_config)
    gated = Layout.from_config(vllm_config.model_config.hf_config).gated
    layers = gated_layers(model, vllm_config)
    check_layers([layer.attn for layer in layers])
    stock = layers[0].attn
    others = keep_others([layer.attn for layer in layers], vllm_config)
    entry_bytes = 2 * stock.head_size * stock.kv_cache_torch_dtype.itemsize
    pages = [layer.get_kv_cache_spec(vllm_config).page_size_bytes for layer in others]
    least = -(-max(pages, default=0) // entry_bytes)
    longest = vllm_config.model_config.max_model_len
    group_size = stock.num_heads // stock.num_kv_heads
    ranks = get_tensor_model_parallel_world_size()
    rank = get_tensor_model_parallel_rank()
    block_size = vllm_config.cache_config.block_size
    plans = plan_heads(settings, block_size, group_size, longest, ranks, least)
    plan = plans[rank]
    kept = _what_is_kept(settings, plan, longest)
    states = [layer for layer in others if isinstance(layer, MambaBase)]
    page = plan.block_entries * entry_bytes
    for layer in states:
        pad_states(layer, page)
    bins = []
    for number, own in enumerate(plan.bins):
        bins.append(BinAttention(stock, number, own, kept, vllm_config, page if states else None))
        bins[-1].settings = settings
        bins[-1].check = check
    model.rlkv_bins = nn.ModuleList(bins)
    has_sinks = getattr(stock.impl, "sinks", None) is not None
    # the states of ``others`` may make blocks that are not a multiple of a bin's pages
    joined = None if has_sinks or others else _joined(bins, vllm_config.model_config.dtype)
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in others]
    model.rlkv_pool = block_size, least, [describe_other(spec) for spec in specs]
    for number, layer in enumerate(layers):
        stock = layer.attn
        del vllm_config.compilation_config.static_forward_context[stock.layer_name]
        own_parts = plan.of_layer(number)
        sizes = [len(part.heads) * group_size for part in own_parts]
        learned = getattr(stock.impl, "sinks", None)  # reordered when they are loaded
        sinks = [None] * len(sizes) if learned is None else learned.detach().split(sizes)
        parts = []
        for part, own_sinks in zip(own_parts, sinks, strict=True):
            parts.append(PartAttention(bins[part.bin], part, own_sinks))
        layer.attn = SplitAttention(stock, parts, vllm_config, joined)
    where = f"rank {rank} of {ranks}: " if ranks > 1 else ""
    amounts = entry_bytes, *settings.reference(longest)
    logger.info("rlkv: %s%s", where, plan.summary(*amounts))
    rows = vllm_config.scheduler_config.max_num_seqs
    # other layers are in the same pool
    can_keep = settings.eviction is None and not has_sinks and not others
    can_keep = can_keep and current_platform.is_cpu()

    def say_pool(blocks: int) -> None:
        logger.info("rlkv: %s%s", where, plan.capacity(blocks, *amounts))
        is_ample = rows * plan.uncompressed(longest) <= blocks * plan.block_entries
        if is_ample and can_keep:
            logger.info(
                "rlkv: the full cache of %d requests of %d tokens would fit too: where memory is "
                "not the limit, mode 'keep' reads as little from the engine's own blocks",
                rows,
                longest,
            )

    bins[0].on_pool = say_pool
    order = {}
    for number, layer in enumerate(gated):
        order[layer] = [head for own in plans for head in own.head_order(number)]
    gates_outputs = getattr(layers[0], "attn_output_gate", False)
    return HeadOrder(order, group_size, stock.head_size, gates_outputs)


def _joined(bins: list[BinAttention], dtype: torch.dtype) -> JoinedBins | None:
    """Return what reads several bins in one launch of a stock CPU kernel; None: nothing does."""
    if any(own.attn_backend.get_name() != CPU_KERNELS for own in bins):
        return None
    least = min(own.bin.demand.block_size for own in bins)
    return JoinedBins([own for own in bins if own.bin.demand.block_size == least], dtype)


def gated_layers(model: Any, vllm_config: Any) -> list[Any]:
    """Return the modules whose ``attn`` is the attention of a layer with gates."""
    layers = []
    for number in Layout.from_config(vllm_config.model_config.hf_config).gated:
        layer = model.model.layers[number]
        layers.append(layer.self_attn if hasattr(layer, "self_attn") else layer.attn)
    return layers


def keep_others(replaced: Sequence[Attention], vllm_config: Any) -> list[AttentionLayerBase]:
    """Let the layers without gates, which are returned, share the pool of the bins.

    Raises:
        ValueError: for a layer with full attention that has no gates.
    """
    others = []
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if layer in replaced or not isinstance(layer, AttentionLayerBase):
            continue
        if isinstance(layer, Attention):
            if layer.sliding_window is None:
                raise ValueError(
                    f"rlkv: head reallocation does not work with this model: {name} has full "
                    "attention in the engine, but no gates by the model's config"
                )
            layer.attn_backend = pooled_backend(layer)
        others.append(layer)
    return others


def describe_other(spec: Any) -> OtherLayer:
    """Read what a layer without gates holds off its kind of blocks."""
    if isinstance(spec, MambaSpec):
        return OtherLayer(spec.page_size_bytes)
    return OtherLayer(spec.page_size_bytes, spec.block_size, spec.sliding_window)


def pad_states(layer: Any, page: int) -> None:
    """Give a linear layer blocks of ``page`` bytes.

    The engine groups linear layers as such only where the blocks of all layers are equal.
    """
    stock = layer.get_kv_cache_spec

    def padded(vllm_config: Any) -> MambaSpec:
        return replace(stock(vllm_config), page_size_padded=page)

    layer.get_kv_cache_spec = padded


def check_layers(layers: Sequence[Any], feature: str = REALLOCATION) -> None:
    """Raise ``ValueError`` for layers with more than plain attention, or with different heads."""
    first = layers[0]
    for layer in layers:
        found = {
            "a sliding window": layer.sliding_window is not None,
            "keys and values of another layer": layer.kv_sharing_target_layer_name is not None,
            "attention in both directions": layer.attn_type != AttentionType.DECODER,
            # the layers that take their place have none
            "learned sinks": feature != REALLOCATION
            and getattr(layer.impl, "sinks", None) is not None,
            "soft-capped logits": bool(getattr(layer.impl, "logits_soft_cap", None)),
            "ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
            "another number or size of heads than the first layer": any(
                getattr(layer, name) != getattr(first, name)
                for name in ("num_heads", "num_kv_heads", "head_size")
            ),
            "another scale of logits than the first layer": layer.impl.scale != first.impl.scale,
        }
        for what, applies in found.items():
            if applies:
                raise ValueError(
                    f"rlkv: {feature} does not work with this model: {layer.layer_name} has {what}"
                )


def _what_is_kept(
    settings: ServingSettings, plan: PackingPlan, longest: int
) -> Eviction | GapRules | None:
    """Return the policy of compressible heads, or their sinks and window; None without them."""
    demand = next((own.demand for own in plan.bins if not own.full), None)
    if demand is None:
        return None
    if isinstance(demand, SinkWindowDemand):
        aligned = bool(settings.aligned_windows)
        return GapRules(demand, longest, settings.whole_prompts, aligned)
    policy = settings.policy()
    assert policy is not None
    assert isinstance(demand, BufferDemand)
    if demand.capacity >= longest:
        raise ValueError(
            f"rlkv: eviction would never drop anything: a head holds up to {demand.capacity:,} "
            f"entries (budget + buffer), and no text is longer than {longest:,} tokens: lower the "
            "budget, or raise --max-model-len"
        )
    return Eviction(policy, demand)
