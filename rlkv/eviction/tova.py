"""TOVA, token omission via attention: what the last query attends to (arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlkv.eviction.attention import attention_received, sum_rows
from rlkv.eviction.base import EvictionPolicy
from rlkv.eviction.registry import register


@register
@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """TOVA (arXiv 2401.06104, section 3.2): drop the entry that the last query attends to least.

    Score = the attention of the last query to each entry, softmax over all entries, mean over all query heads of the
    layer: ``[B, N]``, given to every head, so that all heads of a layer keep the same tokens.
    """

    buffer: int = 1
    observation: int = 1

    name: ClassVar[str] = "tova"

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        received = attention_received(keys, queries[:, :, -1:], valid)
        return (sum_rows(received.flatten(1, 2)) / queries.shape[1])[:, None].expand(-1, keys.shape[1], -1)
