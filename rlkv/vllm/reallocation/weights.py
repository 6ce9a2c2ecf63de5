"""The tensors of a checkpoint with the heads of each layer in the order in which they are served.

A projection has a piece for each head along its outputs, the last one along its inputs.  Whole pieces move, so
quantised weights need no unpacking, as long as a number or a scale belongs to one head or to all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ATTENTION = re.compile(r"layers\.(\d+)\.(?:self_attn|attention)\.(.+)$")
_PROJECTION = re.compile(r"(qkv|[qkvo])_proj\.(\w+)$")
_NEITHER = re.compile(r"([qk]_norm\.weight|rotary_emb\.inv_freq)$")  # the same for all heads of a layer
_OUTPUTS_FIRST = ("weight", "bias", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point")
_INPUTS_FIRST = ("qweight", "qzeros", "scales")  # AWQ and GPTQ
_OF_ALL_HEADS = ("weight_shape", "weight_global_scale", "input_scale", "input_global_scale", "input_zero_point")
_GROUPS = ("g_idx", "weight_g_idx")  # the group of each input


@dataclass(frozen=True)
class HeadOrder:
    """How the heads of a model were dealt out.

    Attributes:
        heads: the KV heads of each layer, in the order of ranks, and of parts in a rank.
        group_size: query heads for each KV head.
        head_size: of a query head, and of a KV head.
    """

    heads: Sequence[Sequence[int]]
    group_size: int
    head_size: int

    def reordered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, whole: the engine cuts its rank's shard out of them.

        Raises:
            ValueError: for a tensor of an attention layer whose heads are not known, or not whole.
        """
        for name, tensor in weights:
            found = _ATTENTION.search(name)
            if found is None or _NEITHER.match(found[2]):
                yield name, tensor
                continue
            projection = _PROJECTION.match(found[2])
            if projection is None:
                raise ValueError(f"rlkv: {name}: head reallocation does not know which heads this tensor has")
            yield name, self._reorder(tensor, int(found[1]), projection[1], projection[2], name)

    def _reorder(self, tensor: Tensor, layer: int, projection: str, kind: str, name: str) -> Tensor:
        if kind in _OF_ALL_HEADS:
            return tensor
        if kind in _GROUPS:
            if projection == "o" and not bool((tensor[1:] >= tensor[:-1]).all()):
                raise ValueError(f"rlkv: {name}: head reallocation needs weights that were quantised without desc_act")
            return tensor
        if kind not in _OUTPUTS_FIRST + _INPUTS_FIRST:
            raise ValueError(f"rlkv: {name}: head reallocation does not know the order of heads in a {kind}")
        dim = int((projection == "o") == (kind in _OUTPUTS_FIRST))
        if tensor.dim() <= dim or tensor.shape[dim] == 1:  # one number for all heads
            return tensor
        pieces = torch.tensor(self._pieces(layer, projection), device=tensor.device)
        outputs = len(pieces) * self.head_size * (self.group_size if projection in "qo" else 1)
        group, rest = divmod(outputs, tensor.shape[dim])
        # groups have powers of two: with another quotient the last group is cut off, and some reach over heads
        if tensor.shape[dim] % len(pieces) or rest or group & (group - 1):
            raise ValueError(
                f"rlkv: {name}: {tensor.shape[dim]} entries do not divide by {len(pieces)} heads, because groups of "
                "quantised weights reach over several heads: serve weights with smaller groups"
            )
        # some types of numbers can only be moved as bytes
        plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        moved = plain.unflatten(dim, (len(pieces), -1)).index_select(dim, pieces).flatten(dim, dim + 1)
        return moved.view(tensor.dtype)

    def _pieces(self, layer: int, projection: str) -> list[int]:
        """Numbers of pieces in their served order; a group of query heads is a piece of ``q`` and ``o``."""
        heads = list(self.heads[layer])
        if projection != "qkv":
            return heads
        size, number = self.group_size, len(heads)
        queries = [head * size + member for head in heads for member in range(size)]
        return queries + [head + number * first for first in (size, size + 1) for head in heads]
