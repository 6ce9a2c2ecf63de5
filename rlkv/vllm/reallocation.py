"""Head reallocation in a stock model: bins as attention layers, split attention, order of weights.

The heads of one bin, of all layers, are one attention layer of the engine: one KV tensor, spec and
block table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.utils.torch_utils import _encode_layer_name as encode_layer_name
from vllm.utils.torch_utils import _resolve_layer_name as resolve_layer_name
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MambaSpec

from rlkv.models.layout import Layout
from rlkv.vllm.backends import full_backend, local_backend, pooled_backend
from rlkv.vllm.evicting import Eviction, evicting_backend
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
from rlkv.vllm.settings import ServingSettings, check_engine, resolve_settings
from rlkv.vllm.specs import EvictingSpec, PackedFullSpec, SinkWindowSpec


class BinAttention(Attention):
    """A bin as a layer of the engine, which never runs: its parts do, on slices of the cache.

    Its number of heads is that of the largest part, by which builders of metadata size what kernels
    share.
    """

    parts: tuple[PartAttention, ...] = ()
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
        else:
            backend = evicting_backend() if isinstance(kept, Eviction) else local_backend()
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

    def add_part(self, part: Part, sinks: Tensor | None) -> PartAttention:
        """Return the heads ``part`` of the bin, for the layer that has them.

        sinks: learned ones of the part's query heads; None: the model has none.
        """
        made = PartAttention(self, part, sinks)
        self.parts = (*self.parts, made)
        return made

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
    """The heads of one layer in one bin: what runs."""

    def __init__(self, own: BinAttention, part: Part, sinks: Tensor | None) -> None:
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


class SplitAttention(nn.Module):
    """A layer's attention in parts, with the call of the stock layer.

    The projections' weights were reordered when they were loaded: each part reads and writes a
    slice.
    """

    def __init__(self, stock: Attention, parts: list[PartAttention], vllm_config: Any) -> None:
        super().__init__()
        self.layer_name = stock.layer_name
        self.head_size = stock.head_size
        self.parts = parts
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

_ATTENTION = re.compile(r"layers\.(\d+)\.(?:self_attn|attention)\.(.+)$")
_PROJECTION = re.compile(r"(qkv|[qkvo])_proj\.(\w+)$")
# the same for all heads of a layer
_NEITHER = re.compile(r"([qk]_norm\.weight|rotary_emb\.inv_freq)$")
_OUTPUTS_FIRST = (
    "weight",
    "bias",
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "weight_zero_point",
)
_INPUTS_FIRST = ("qweight", "qzeros", "scales")  # AWQ and GPTQ
_OF_ALL_HEADS = (
    "weight_shape",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
)
_GROUPS = ("g_idx", "weight_g_idx")  # the group of each input


@dataclass(frozen=True)
class HeadOrder:
    """How the heads of a model were dealt out.

    Attributes:
        heads: the KV heads of each layer with gates, in the order of ranks, and of parts in a rank.
        group_size: query heads for each KV head.
        head_size: of a query head, and of a KV head.
        gates_outputs: whether queries are projected together with gates of attention's outputs.
    """

    heads: Mapping[int, list[int]]
    group_size: int
    head_size: int
    gates_outputs: bool = False

    def reordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors, whole: the engine cuts its rank's shard out of them.

        Raises:
            ValueError: for a tensor of an attention layer whose heads are not known, or not whole.
        """
        for name, tensor in weights:
            found = _ATTENTION.search(name)
            own = found is not None and int(found[1]) in self.heads
            if found is None or not own or _NEITHER.match(found[2]):
                yield name, tensor
                continue
            if found[2] == "sinks":  # one for each query head
                yield name, tensor.view(-1, self.group_size)[self.heads[int(found[1])]].flatten()
                continue
            projection = _PROJECTION.match(found[2])
            if projection is None:
                raise ValueError(
                    f"rlkv: {name}: head reallocation does not know which heads this tensor has"
                )
            yield name, self._reorder(tensor, int(found[1]), projection[1], projection[2], name)

    def _reorder(self, tensor: Tensor, layer: int, projection: str, kind: str, name: str) -> Tensor:
        if kind in _OF_ALL_HEADS:
            return tensor
        if kind in _GROUPS:
            if projection == "o" and not bool((tensor[1:] >= tensor[:-1]).all()):
                raise ValueError(
                    f"rlkv: {name}: head reallocation needs weights that were quantised without "
                    "desc_act"
                )
            return tensor
        if kind not in _OUTPUTS_FIRST + _INPUTS_FIRST:
            raise ValueError(
                f"rlkv: {name}: head reallocation does not know the order of heads in a {kind}"
            )
        dim = int((projection == "o") == (kind in _OUTPUTS_FIRST))
        if tensor.dim() <= dim or tensor.shape[dim] == 1:  # one number for all heads
            return tensor
        pieces = torch.tensor(self._pieces(layer, projection), device=tensor.device)
        outputs = len(pieces) * self.head_size * (self.group_size if projection in "qo" else 1)
        if projection == "q" and self.gates_outputs:  # a gate of each output next to its query
            outputs *= 2
        group, rest = divmod(outputs, tensor.shape[dim])
        # groups have powers of two: with another quotient the last group is cut off, and some
        # reach over heads
        if tensor.shape[dim] % len(pieces) or rest or group & (group - 1):
            raise ValueError(
                f"rlkv: {name}: {tensor.shape[dim]} entries do not divide by {len(pieces)} heads, "
                "because groups of quantised weights reach over several heads: serve weights with "
                "smaller groups"
            )
        # some types of numbers can only be moved as bytes
        plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        moved = plain.unflatten(dim, (len(pieces), -1)).index_select(dim, pieces)
        return moved.flatten(dim, dim + 1).view(tensor.dtype)

    def _pieces(self, layer: int, projection: str) -> list[int]:
        """Number the pieces in their served order; ``q`` and ``o`` have groups of query heads."""
        heads = list(self.heads[layer])
        if projection != "qkv":
            return heads
        # query heads, then key heads, then value heads, one piece each
        order: list[int] = []
        for head in heads:
            order += range(head * self.group_size, (head + 1) * self.group_size)
        keys = len(heads) * self.group_size
        order += [keys + head for head in heads]
        order += [keys + len(heads) + head for head in heads]
        return order


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
    gated = Layout.from_config(vllm_config.model_config.hf_config).gated
    layers = []
    for number in gated:
        layer = model.model.layers[number]
        layers.append(layer.self_attn if hasattr(layer, "self_attn") else layer.attn)
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
    model.rlkv_bins = nn.ModuleList(bins)
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
            parts.append(bins[part.bin].add_part(part, own_sinks))
        layer.attn = SplitAttention(stock, parts, vllm_config)
    where = f"rank {rank} of {ranks}: " if ranks > 1 else ""
    amounts = entry_bytes, *settings.reference(longest)
    logger.info("rlkv: %s%s", where, plan.summary(*amounts))
    bins[0].on_pool = lambda blocks: logger.info(
        "rlkv: %s%s", where, plan.capacity(blocks, *amounts)
    )
    order = {}
    for number, layer in enumerate(gated):
        order[layer] = [head for own in plans for head in own.head_order(number)]
    gates_outputs = getattr(layers[0], "attn_output_gate", False)
    return HeadOrder(order, group_size, stock.head_size, gates_outputs)


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


def check_layers(layers: Sequence[Any]) -> None:
    """Raise ``ValueError`` for layers with more than plain attention, or with different heads."""
    first = layers[0]
    for layer in layers:
        found = {
            "a sliding window": layer.sliding_window is not None,
            "keys and values of another layer": layer.kv_sharing_target_layer_name is not None,
            "attention in both directions": layer.attn_type != AttentionType.DECODER,
            "soft-capped logits": bool(getattr(layer.impl, "logits_soft_cap", None)),
            "ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
            "another number or size of heads than the first layer": any(
                getattr(layer, name) != getattr(first, name)
                for name in ("num_heads", "num_kv_heads", "head_size")
            ),
            "another scale of logits than the first layer": layer.impl.scale != first.impl.scale,
        }
        for feature, applies in found.items():
            if applies:
                raise ValueError(
                    f"rlkv: head reallocation does not work with this model: {layer.layer_name} "
                    f"has {feature}"
                )


def _what_is_kept(
    settings: ServingSettings, plan: PackingPlan, longest: int
) -> Eviction | GapRules | None:
    """Return the policy of compressible heads, or their sinks and window; None without them."""
    demand = next((own.demand for own in plan.bins if not own.full), None)
    if demand is None:
        return None
    if isinstance(demand, SinkWindowDemand):
        return GapRules(demand, longest, settings.whole_prompts)
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
