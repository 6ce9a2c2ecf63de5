"""SnapKV at decode: attention received from the last queries (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlkv.eviction.base import EvictionPolicy
from rlkv.eviction.registry import register
from rlkv.eviction.rkv import check_pooling, importance


@register
@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (arXiv 2404.14469, section 4) at decode, as the R-KV paper compares with it: R-KV with lambda 1.

    The score is :func:`rlkv.eviction.rkv.importance`, ``[B, H, N]``.

    Attributes:
        kernel: entries of the max-pooling window, as of R-KV.
        variant: "paper" or "published": the order in which softmax, the maximum over the group and the mean over
            queries are taken.
    """

    kernel: int = 7
    variant: str = "paper"

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self, self.kernel, self.variant, ("paper", "published"))

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return importance(keys, queries, valid, self.observation, self.kernel, self.variant)
