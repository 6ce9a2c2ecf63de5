"""RPC, reasoning path compression: what the last queries of the whole layer attend to (arXiv 2505.13866)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from rlkv.eviction.attention import attention_received, sum_rows
from rlkv.eviction.base import EvictionPolicy, check_type
from rlkv.eviction.registry import register

AGGREGATIONS = ("all", "group", "head")


@register
@dataclass(frozen=True)
class RPC(EvictionPolicy):
    """RPC (arXiv 2505.13866, algorithm 1): every P generated tokens keep a c-th of them; the prompt stays whole.

    The last R queries pay attention to the entries before the last R ones (softmax per query head, without
    the prompt); the sum over the R queries, the mean over heads, and the mean over a window of ``kernel`` entries
    (entries beyond the ends count as 0) give the scores ``[B, H, N]``.

    The schedule (section 3.3): the first eviction is due at P + R tokens, the others every P tokens after it.  After n
    evictions the next one chooses among ``n * int(P/c) + P`` entries and keeps ``(n+1) * int(P/c)`` of them, and the
    last R.  The entries grow with the text.
    ``budget`` or ``ratio`` replace this schedule (with ``buffer``), e.g. to hold as many bytes as another policy.

    Attributes:
        P: tokens between two evictions (1024 or 4096 in the paper).
        R: the selector window, most recent entries whose queries judge the others and which are always kept.
        c: compression ratio.
        aggregation: over which query heads the mean is taken.  "all": those of the layer, so that all heads keep the
            same tokens; "group": those of a KV head; "head": none, each query head keeps its own tokens, which takes
            a copy of keys and values per query head (table 4: for comparison only).
        kernel: entries of the pooling window.
        observation: equals R; not an option.
    """

    observation: int = field(init=False)
    protect_prompt: bool = True
    P: int = 1024
    R: int = 32
    c: float = 4
    aggregation: str = "all"
    kernel: int = 7

    name: ClassVar[str] = "rpc"

    def __post_init__(self) -> None:
        check_type(f"{self.name}: R", self.R, "int")
        self.require(self.R >= 1, "R", "1 or more tokens")
        object.__setattr__(self, "observation", self.R)
        super().__post_init__()
        changed = [name for name in ("P", "c") if getattr(self, name) != getattr(RPC, name)]
        if not self.scheduled and changed:
            raise ValueError(
                f"{self.name}: {' and '.join(changed)} belong to the schedule, which a budget or a ratio replaces: "
                "give one or the other"
            )
        own = self.buffer == RPC.buffer or not self.scheduled
        self.require(own, "buffer", "left out without a budget or a ratio: P says when the schedule evicts")
        self.require(self.kernel > 0 and self.kernel % 2 == 1, "kernel", "an odd number of entries")
        self.require(self.aggregation in AGGREGATIONS, "aggregation", f"one of {', '.join(AGGREGATIONS)}")

    @property
    def per_query_head(self) -> bool:
        return self.aggregation == "head"

    @property
    def scheduled(self) -> bool:
        """Whether P and c, not a budget, say when to evict and how much to keep."""
        return self.budget is None and self.ratio is None

    @property
    def step(self) -> int:
        """How many more entries each eviction of the schedule keeps than the one before: int(P / c)."""
        return int(self.P / self.c)

    def _check_budget(self) -> None:
        if not self.scheduled:
            return super()._check_budget()
        self.require(self.c > 1, "c", "more than 1")
        self.require(self.P >= 1, "P", "1 or more tokens")
        self.check_entries(self.step + self.R)

    def entries(self, seen: Tensor, evictions: Tensor) -> Tensor:
        if not self.scheduled:
            return super().entries(seen, evictions)
        return (evictions + 1) * self.step + self.R

    def capacity(self, seen: Tensor, evictions: Tensor) -> Tensor:
        if not self.scheduled:
            return super().capacity(seen, evictions)
        return evictions * self.step + self.P + self.R

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        received = attention_received(keys, queries[:, :, -self.R :], valid, hidden=self.R)
        group_size = received.shape[2]
        if self.aggregation == "head" and group_size > 1:
            raise ValueError(
                f'{self.name}: aggregation="head" lets each query head keep its own tokens, but {group_size} of them '
                'share keys here: give each its own keys, as the cache does, or use "group" or "all"'
            )
        pooled_heads = received.flatten(1, 2)[:, None] if self.aggregation == "all" else received
        mean = sum_rows(pooled_heads) / pooled_heads.shape[2]
        return F.avg_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2).expand(-1, keys.shape[1], -1)
