"""Head reallocation inside a vLLM model: other attention layers, and weights in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from rlkv.vllm.blocks.block_tables import GapRemover
from rlkv.vllm.blocks.demand import BufferDemand, SinkWindowDemand
from rlkv.vllm.blocks.packing import PackingPlan, plan_heads
from rlkv.vllm.limits import check_engine, resolve_settings
from rlkv.vllm.reallocation.bin_attention import BinAttention
from rlkv.vllm.reallocation.evicting import Eviction
from rlkv.vllm.reallocation.split_attention import SplitAttention
from rlkv.vllm.settings import ServingSettings

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say
_PROJECTION = re.compile(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)$")


@dataclass(frozen=True)
class Reallocation:
    """How the heads of a model were dealt out."""

    plan: PackingPlan
    head_size: int
    group_size: int

    def reordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors with the heads of each layer in the order of its parts."""
        for name, tensor in weights:
            found = _PROJECTION.search(name)
            yield name, self._reorder(tensor, int(found[1]), found[2], found[3], name) if found else tensor

    def _reorder(self, tensor: Tensor, layer: int, projection: str, kind: str, name: str) -> Tensor:
        if kind not in ("weight", "bias"):
            raise ValueError(f"rlkv: {name}: head reallocation needs plain weights, not {kind}")
        if projection == "o" and kind == "bias":
            return tensor
        order = torch.tensor(self.plan.head_order(layer), device=tensor.device)
        rows = self.head_size * (self.group_size if projection in "qo" else 1)
        index = (order[:, None] * rows + torch.arange(rows, device=tensor.device)).flatten()
        return tensor.index_select(1 if projection == "o" else 0, index)


def attach_reallocation(model: Any, vllm_config: Any) -> Reallocation:
    """Exchange the attention layers of a stock model; ValueError for what is not supported or does not fit it."""
    check_engine(vllm_config)
    settings = resolve_settings(vllm_config)
    stock, longest = model.model.layers[0].self_attn.attn, vllm_config.model_config.max_model_len
    group_size = stock.num_heads // stock.num_kv_heads
    if settings.allocation.full.shape != (len(model.model.layers), stock.num_kv_heads):
        raise ValueError(
            f"rlkv: the allocation is for {list(settings.allocation.full.shape)} layers and KV heads, but the model "
            f"has {[len(model.model.layers), stock.num_kv_heads]}"
        )
    plan = plan_heads(settings, vllm_config.cache_config.block_size, group_size, longest)
    kept = _what_is_kept(settings, plan, longest)
    bins = [BinAttention(stock, number, own, kept, vllm_config) for number, own in enumerate(plan.bins)]
    model.rlkv_bins = nn.ModuleList(bins)
    for number, layer in enumerate(model.model.layers):
        stock = layer.self_attn.attn
        del vllm_config.compilation_config.static_forward_context[stock.layer_name]
        parts = [bins[part.bin].add_part(part) for part in plan.of_layer(number)]
        layer.self_attn.attn = SplitAttention(stock, parts, vllm_config)
    entry_bytes = 2 * stock.head_size * stock.kv_cache_torch_dtype.itemsize
    logger.info("rlkv: %s", plan.summary(entry_bytes, *settings.reference(longest)))
    return Reallocation(plan, stock.head_size, group_size)


def _what_is_kept(settings: ServingSettings, plan: PackingPlan, longest: int) -> Eviction | GapRemover | None:
    """The policy of compressible heads and their buffer, or what reads sinks and window; None without such heads."""
    demand = next((own.demand for own in plan.bins if not own.full), None)
    if demand is None:
        return None
    if isinstance(demand, SinkWindowDemand):
        return GapRemover(demand, longest, settings.whole_prompts)
    policy = settings.policy()
    assert policy is not None
    assert isinstance(demand, BufferDemand)
    if demand.capacity >= longest:
        raise ValueError(
            f"rlkv: eviction would never drop anything: a head holds up to {demand.capacity:,} entries (budget + "
            f"buffer), and no text is longer than {longest:,} tokens: lower the budget, or raise --max-model-len"
        )
    return Eviction(policy, demand)
