"""Head reallocation inside a vLLM model: other attention layers, and weights in their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm.blocks.block_tables import Compactor
from rlkv.vllm.blocks.buffers import BufferUse
from rlkv.vllm.blocks.full_prefill import FullPrefill
from rlkv.vllm.blocks.packing import BlockUse, PackingPlan, plan_packing
from rlkv.vllm.blocks.report import block_bytes, memory_summary
from rlkv.vllm.reallocation.evicting import Eviction
from rlkv.vllm.reallocation.limits import check_engine
from rlkv.vllm.reallocation.split_attention import SplitAttention
from rlkv.vllm.settings import KEY, ServingSettings, parse_settings, read_request

logger = init_logger(f"vllm.{__name__}")  # the engine shows what its own loggers say
_PROJECTION = re.compile(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)$")


@dataclass(frozen=True)
class Reallocation:
    """What was done to a model."""

    allocation: HeadAllocation
    plan: PackingPlan
    head_size: int
    group_size: int

    def reordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors with the heads of each layer in the order of its parts.

        Rows of the query, key and value projections and of their biases; columns of the output projection.

        Raises:
            ValueError: for tensors of these projections whose layout is not known.
        """
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
    """Exchange the attention layers of a stock model.

    Raises:
        ValueError: for what is not supported (:mod:`rlkv.vllm.reallocation.limits`), and as :func:`resolve_request`.
    """
    check_engine(vllm_config)
    allocation, sink, window, settings = resolve_request(vllm_config)
    block_size, policy = vllm_config.cache_config.block_size, settings.policy()
    tokens = min(settings.reference_tokens, vllm_config.model_config.max_model_len)
    kept: Eviction | dict[int, Compactor]
    if policy is None:
        use = BlockUse(block_size, sink, window)
        plan = plan_packing(allocation.full, use, tokens)
        full_prefill = FullPrefill() if settings.prefill == "full" else None
        kept = {number: Compactor(use, full_prefill) for number in plan.bins}
    else:
        stock = model.model.layers[0].self_attn.attn
        kept = Eviction(policy, BufferUse.of(policy, block_size, stock.num_heads // stock.num_kv_heads))
        if kept.use.capacity >= vllm_config.model_config.max_model_len:
            raise ValueError(
                f"rlkv: eviction would never drop anything: a head holds up to {kept.use.capacity:,} entries (budget "
                f"+ buffer), and no text is longer than {vllm_config.model_config.max_model_len:,} tokens: lower the "
                "budget, or raise --max-model-len"
            )
        plan = plan_packing(allocation.full, kept.use, tokens)
    known = vllm_config.compilation_config.static_forward_context
    for number, layer in enumerate(model.model.layers):
        stock = layer.self_attn.attn
        del known[stock.layer_name]
        layer.self_attn.attn = SplitAttention(stock, plan.of_layer(number), kept, vllm_config)
    per_block = block_bytes(plan, stock.head_size, stock.kv_cache_torch_dtype.itemsize)
    for layer in model.model.layers:
        for part in layer.self_attn.attn.parts:
            part.block_bytes = per_block
    logger.info("rlkv: %s", memory_summary(plan, per_block // plan.heads_per_block, tokens))
    return Reallocation(allocation, plan, stock.head_size, stock.num_heads // stock.num_kv_heads)


def resolve_request(vllm_config: Any) -> tuple[HeadAllocation, int, int, ServingSettings]:
    """Allocation, sink and window that were asked for.

    Both are noted in ``additional_config``: the engine's compilation cache then knows models with other allocations
    apart, also where the request came from the environment or the gates file changed.

    Raises:
        ValueError: for settings that are wrong and gates that do not fit the model.
    """
    request = read_request(vllm_config.additional_config)
    assert request is not None, "asked for only where there is a request"
    settings = parse_settings({key: value for key, value in request.items() if key != "digest"})
    gates = HeadGates.load(settings.gates)
    gates.check_model(vllm_config.model_config.hf_config)
    sink = gates.deploy_sink if settings.sink is None else settings.sink
    window = gates.deploy_window if settings.window is None else settings.window
    allocation = HeadAllocation.from_gates(gates, settings.sparsity, settings.scope)
    noted = f"{allocation.full.tolist()} {sink} {window} {settings.policy()} {settings.prefill}"
    if isinstance(vllm_config.additional_config, dict):
        digest = sha256(noted.encode()).hexdigest()[:16]
        vllm_config.additional_config[KEY] = {**settings.to_dict(), "digest": digest}
    return allocation, sink, window, settings
