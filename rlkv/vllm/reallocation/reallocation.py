"""Head reallocation inside a vLLM model: other attention layers in the place of the stock ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType

from rlkv.vllm.blocks.block_tables import GapRules
from rlkv.vllm.blocks.demand import BufferDemand, SinkWindowDemand
from rlkv.vllm.blocks.packing import PackingPlan, plan_heads
from rlkv.vllm.limits import check_engine, resolve_settings
from rlkv.vllm.reallocation.bin_attention import BinAttention
from rlkv.vllm.reallocation.evicting import Eviction
from rlkv.vllm.reallocation.split_attention import SplitAttention
from rlkv.vllm.reallocation.weights import HeadOrder
from rlkv.vllm.settings import ServingSettings

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say


def attach_reallocation(model: Any, vllm_config: Any) -> HeadOrder:
    """Exchange the attention layers of a stock model; ValueError for what is not supported or does not fit it."""
    check_engine(vllm_config)
    settings = resolve_settings(vllm_config)
    stock, longest = model.model.layers[0].self_attn.attn, vllm_config.model_config.max_model_len
    group_size, ranks = stock.num_heads // stock.num_kv_heads, get_tensor_model_parallel_world_size()
    check_layers([layer.self_attn.attn for layer in model.model.layers])
    plans = plan_heads(settings, vllm_config.cache_config.block_size, group_size, longest, ranks)
    rank = get_tensor_model_parallel_rank()
    plan = plans[rank]
    kept = _what_is_kept(settings, plan, longest)
    bins = [BinAttention(stock, number, own, kept, vllm_config) for number, own in enumerate(plan.bins)]
    model.rlkv_bins = nn.ModuleList(bins)
    for number, layer in enumerate(model.model.layers):
        stock = layer.self_attn.attn
        del vllm_config.compilation_config.static_forward_context[stock.layer_name]
        parts = [bins[part.bin].add_part(part) for part in plan.of_layer(number)]
        layer.self_attn.attn = SplitAttention(stock, parts, vllm_config)
    entry_bytes = 2 * stock.head_size * stock.kv_cache_torch_dtype.itemsize
    where = f"rank {rank} of {ranks}: " if ranks > 1 else ""
    amounts = entry_bytes, *settings.reference(longest)
    logger.info("rlkv: %s%s", where, plan.summary(*amounts))
    bins[0].on_pool = lambda blocks: logger.info("rlkv: %s%s", where, plan.capacity(blocks, *amounts))
    order = [[head for own in plans for head in own.head_order(number)] for number in range(len(model.model.layers))]
    return HeadOrder(order, group_size, stock.head_size)


def check_layers(layers: Sequence[Any]) -> None:
    """Raise ``ValueError`` for stock attention layers that do more than plain attention, or differ in their heads."""
    first = layers[0]
    for layer in layers:
        found = {
            "a sliding window": layer.sliding_window is not None,
            "keys and values of another layer": layer.kv_sharing_target_layer_name is not None,
            "attention in both directions": layer.attn_type != AttentionType.DECODER,
            "soft-capped logits": bool(getattr(layer.impl, "logits_soft_cap", None)),
            "ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
            "learned sinks": getattr(layer.impl, "sinks", None) is not None,
            "another number or size of heads than the first layer": any(
                getattr(layer, name) != getattr(first, name) for name in ("num_heads", "num_kv_heads", "head_size")
            ),
            "another scale of logits than the first layer": layer.impl.scale != first.impl.scale,
        }
        for feature, applies in found.items():
            if applies:
                raise ValueError(
                    f"rlkv: head reallocation does not work with this model: {layer.layer_name} has {feature}"
                )


def _what_is_kept(settings: ServingSettings, plan: PackingPlan, longest: int) -> Eviction | GapRules | None:
    """The policy of compressible heads and their buffer, or what reads sinks and window; None without such heads."""
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
            f"rlkv: eviction would never drop anything: a head holds up to {demand.capacity:,} entries (budget + "
            f"buffer), and no text is longer than {longest:,} tokens: lower the budget, or raise --max-model-len"
        )
    return Eviction(policy, demand)
