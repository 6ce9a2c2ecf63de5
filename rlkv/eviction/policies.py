"""H2O, TOVA, SnapKV, sink and window, random eviction and RPC; R-KV has a file of its own.

Shapes as in :mod:`rlkv.eviction.base`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy, attention_received, check_type, register, sum_rows
from rlkv.eviction.rkv import check_pooling, importance

H2O_VARIANTS = ("paper", "rlkv_tables")
AGGREGATIONS = ("all", "group", "head")  # of RPC

# SplitMix64 (Steele, Lea, Flood 2014), in int64, whose products wrap around as those of uint64 do
STEP = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BITS = 24  # of a draw: as many as a float32 holds exactly


@register
@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """H2O (arXiv 2306.14048, section 4.2): half recent entries, half heavy hitters.

    Score of an entry = the attention that it got from every query since it was written, summed over
    queries and over the query heads of its group: ``[B, H, N]``.  Each softmax runs over the
    entries that were still held (the past cannot be asked again), up to the query's own.
    :meth:`scores` gives the sum over the queries of one call; the cache adds up the calls
    (``accumulates``).  The sums favour old entries; that is part of the method.

    Attributes:
        variant: "paper"; "rlkv_tables" for what the tables of RLKV (arXiv 2510.08525) were measured
            with, where both halves are rounded down: of an odd budget one entry less is kept.  What
            else their evaluator did differently is not reproduced (docs/serve.md).
    """

    buffer: int = 1
    observation: int = 1
    variant: str = "paper"

    name: ClassVar[str] = "h2o"
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.variant in H2O_VARIANTS
        self.require(known, "variant", f"one of {', '.join(H2O_VARIANTS)}")

    def check_entries(self, entries: int) -> None:
        super().check_entries(entries)
        recent = entries // 2
        room = recent if self.variant == "rlkv_tables" else entries - recent
        self.require(room > 0, "variant", "paper where one entry is kept: its halves hold none")
        what = f"at most {room}: half of {entries} entries are the most recent ones"
        self.require(self.sink <= room, "sink", what)

    def entries(self, seen: Tensor, evictions: Tensor) -> Tensor:
        kept = super().entries(seen, evictions)
        return kept // 2 * 2 if self.variant == "rlkv_tables" else kept

    def capacity(self, seen: Tensor, evictions: Tensor) -> Tensor:
        return super().entries(seen, evictions) + self.buffer

    def recent(self, budget: Tensor) -> Tensor:
        return torch.clamp(budget // 2, min=self.observation)

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return sum_rows(attention_received(keys, queries, valid))


@register
@dataclass(frozen=True)
class RandomEviction(EvictionPolicy):
    """Evict at random, each head on its own; the prompt stays (arXiv 2609.03430).

    Scores ``[B, H, N]`` are uniform draws, each a hash of ``seed``, layer, head, the tokens that
    the row has read, and the entry's place among the row's entries: the same in every run, batch
    and device, and new at every eviction.
    """

    protect_prompt: bool = True
    seed: int = 0

    name: ClassVar[str] = "random"
    uses_queries: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.seed >= 0, "seed", "0 or more")

    def scores(
        self,
        keys: Tensor,
        queries: Tensor,
        valid: Tensor,
        seen: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Draw a number for each entry.

        Args:
            seen: int64 ``[B]``, tokens read; None: as many as entries.
            layer: number of the layer.
        """
        place = valid.long().cumsum(dim=-1)
        seen_B = (place[:, -1] if seen is None else seen.to(keys.device)).long()
        head = torch.arange(keys.shape[1], device=keys.device)
        state = torch.tensor(self.seed, device=keys.device)
        counters = (torch.tensor(layer), head[None, :, None], seen_B[:, None, None], place[:, None])
        for counter in counters:
            state = _hash(state + (counter + 1) * STEP)
        return _shift(state, 64 - BITS).float()


def _hash(state: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser: every bit of the result depends on every bit of ``state``."""
    for bits, factor in ROUNDS:
        state = (state ^ _shift(state, bits)) * factor
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """``state >> bits`` as of uint64: fills with zeros, not with copies of the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


@register
@dataclass(frozen=True)
class RPC(EvictionPolicy):
    """RPC (arXiv 2505.13866, algorithm 1): every P generated tokens keep a c-th of them.

    The prompt stays whole.  The last R queries pay attention to the entries before the last R ones
    (softmax per query head, without the prompt); the sum over the R queries, the mean over heads,
    and the mean over a window of ``kernel`` entries (entries beyond the ends count as 0) give the
    scores ``[B, H, N]``.  The released code takes the newest query twice, and not the R-th.

    The schedule (section 3.3): the first eviction is due at P + R tokens, the others every P tokens
    after it.  After n evictions the next one chooses among ``n * int(P/c) + P`` entries and keeps
    ``(n+1) * int(P/c)`` of them, and the last R.  The entries grow with the text.
    ``budget`` or ``ratio`` replace this schedule (with ``buffer``), e.g. to hold as many bytes as
    another policy.

    Attributes:
        P: tokens between two evictions (1024 or 4096 in the paper).
        R: the selector window, most recent entries whose queries judge the others and which are
            always kept.
        c: compression ratio.
        aggregation: over which query heads the mean is taken.  "all": those of the layer under the
            policy, so that they keep the same tokens; "group": those of a KV head; "head": none,
            each query head keeps its own tokens, which takes a copy of keys and values per query
            head (table 4: for comparison only).
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
                f"{self.name}: {' and '.join(changed)} belong to the schedule, which a budget or a "
                "ratio replaces: give one or the other"
            )
        what = "left out without a budget or a ratio: P says when the schedule evicts"
        self.require(not self.scheduled or self.buffer == RPC.buffer, "buffer", what)
        self.require(self.kernel > 0 and self.kernel % 2 == 1, "kernel", "an odd number of entries")
        known = self.aggregation in AGGREGATIONS
        self.require(known, "aggregation", f"one of {', '.join(AGGREGATIONS)}")

    @property
    def per_query_head(self) -> bool:
        return self.aggregation == "head"

    @property
    def scheduled(self) -> bool:
        """Return whether P and c, not a budget, say when to evict and how much to keep."""
        return self.budget is None and self.ratio is None

    @property
    def step(self) -> int:
        """Entries that each eviction keeps more than the one before: int(P / c)."""
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
                f'{self.name}: aggregation="head" lets each query head keep its own tokens, but '
                f"{group_size} of them share keys here: give each its own keys, as the cache does, "
                'or use "group" or "all"'
            )
        pooled_heads = received.flatten(1, 2)[:, None] if self.aggregation == "all" else received
        mean = sum_rows(pooled_heads) / pooled_heads.shape[2]
        pooled = F.avg_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.expand(-1, keys.shape[1], -1)


@register
@dataclass(frozen=True)
class SinkWindow(EvictionPolicy):
    """StreamingLLM (arXiv 2309.17453): keep the first ``sink`` entries and the most recent ones.

    The score is the entry's place in the sequence, float ``[B, H, N]``: the later, the higher.

    Keys keep their positions; StreamingLLM numbers them by their place in the cache, and keeps 4
    sinks.  Eviction comes after attention: a query sees ``budget + 1`` entries, its own
    included, one more than in a compressible head without a policy.

    Attributes:
        window: most recent entries kept (the current token counts); ``budget = sink + window``,
            give one of the two.
    """

    buffer: int = 1
    observation: int = 1
    sink: int = 16
    window: InitVar[int | None] = None

    name: ClassVar[str] = "sink_window"
    uses_queries: ClassVar[bool] = False

    def __post_init__(self, window: int | None) -> None:
        if window is not None:
            check_type(f"{self.name}: window", window, "int")
            check_type(f"{self.name}: sink", self.sink, "int")
            if window < 1:
                raise ValueError(f"{self.name}: window is {window}: it must be 1 or more tokens")
            if self.ratio is not None:
                raise ValueError(
                    f"{self.name}: window and ratio cannot both be given: a window is a fixed "
                    "budget"
                )
            if self.budget not in (None, self.sink + window):
                raise ValueError(
                    f"{self.name}: budget is {self.budget}, but sink {self.sink} + window {window} "
                    f"are {self.sink + window} entries: give either a budget or a window"
                )
            object.__setattr__(self, "budget", self.sink + window)
        super().__post_init__()

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        # float32 is exact up to 2**24 entries
        place = torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device)
        return place.expand(keys.shape[:3])


@register
@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (arXiv 2404.14469, section 4) at decode, as the R-KV paper compares with it.

    That is R-KV with lambda 1.  The score is :func:`rlkv.eviction.rkv.importance`, ``[B, H, N]``.

    Attributes:
        kernel: entries of the max-pooling window, as of R-KV.
        variant: "paper" or "published": the order in which softmax, the maximum over the group and
            the mean over queries are taken.
    """

    kernel: int = 7
    variant: str = "paper"

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pooling(self, self.kernel, self.variant, ("paper", "published"))

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        return importance(keys, queries, valid, self.observation, self.kernel, self.variant)


@register
@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """TOVA (arXiv 2401.06104, section 3.2): drop the entry that the last query attends to least.

    Score = the attention of the last query to each entry, softmax over all entries, mean over all
    query heads of the layer that are under the policy (without gates all of them): ``[B, N]``,
    given to every head, so that they keep the same tokens.  The last token stays; the authors' code
    may drop it.
    """

    buffer: int = 1
    observation: int = 1

    name: ClassVar[str] = "tova"

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        received = attention_received(keys, queries[:, :, -1:], valid)
        mean = sum_rows(received.flatten(1, 2)) / queries.shape[1]
        return mean[:, None].expand(-1, keys.shape[1], -1)
