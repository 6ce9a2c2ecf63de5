"""The order of heads in weights and adapters: that of the bins that heads are dealt to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.worker.gpu_worker import Worker

from rlkv.vllm.plugin import wrap_once

_ATTENTION = re.compile(r"layers\.(\d+)\.(?:self_attn|attention|attn)\.(.+)$")
_PROJECTION = re.compile(r"(qkv|[qkvo])_proj\.(\w+)$")
# the same for all heads of a layer
_NEITHER = re.compile(r"([qk]_norm\.weight|rotary_emb\.inv_freq)$")
_FACTORS = ("lora_A", "lora_B")  # of an adapter: from inputs to its rank, from there to outputs
_OUTPUTS_FIRST = (
    *_FACTORS,
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
    """Deal of the heads of a model.

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

    def reorder_adapter(self, adapter: Any) -> None:
        """Reorder the factors of a ``LoRAModel``, whole, whose other sides are free of heads.

        Raises:
            ValueError: for an adapter of another number of heads, or of what has no known heads.
        """
        for name, own in adapter.loras.items():
            factors = [(f"{name}.lora_A", own.lora_a), (f"{name}.lora_B", own.lora_b)]
            (_, own.lora_a), (_, own.lora_b) = self.reordered(factors)

    def _reorder(self, tensor: Tensor, layer: int, projection: str, kind: str, name: str) -> Tensor:
        has_heads = "lora_A" if projection == "o" else "lora_B"
        if kind in _OF_ALL_HEADS or (kind in _FACTORS and kind != has_heads):
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
        if kind in _FACTORS and tensor.shape[dim] != outputs:
            raise ValueError(
                f"rlkv: {name}: the adapter has {tensor.shape[dim]} entries where the model's "
                f"heads have {outputs}: it was trained on another model"
            )
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


def _load_adapter(stock: Any, manager: Any, request: Any) -> Any:
    adapter = stock(manager, request)
    order = getattr(manager._adapter_manager.model, "rlkv", None)
    if order is not None:
        order.reorder_adapter(adapter)
    return adapter


def _reload_weights(stock: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    is_checkpoint = kwargs.get("is_checkpoint_format", args[2] if len(args) > 2 else True)
    if not is_checkpoint and getattr(worker.model_runner.get_model(), "rlkv", None) is not None:
        raise ValueError(
            "rlkv: reload_weights with is_checkpoint_format=False writes weights as they are, not "
            "in the order in which their heads are served: give them in the checkpoint's format"
        )
    stock(worker, *args, **kwargs)


# the engine shows a model no adapter; here its tensors are whole, before ranks cut shards out
wrap_once(WorkerLoRAManager, "_load_adapter", _load_adapter)
wrap_once(Worker, "reload_weights", _reload_weights)
