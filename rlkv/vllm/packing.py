"""Which heads share a block table, so that a pool of equal blocks is filled with little waste.

The heads of a *bin* share a block table; a block holds some tokens of all of them. Each table costs
time in every step, so there are few. All blocks have as many bytes as the largest one, so a bin of
few heads has more tokens in a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy
from rlkv.vllm.settings import ServingSettings, deal_heads

NOWHERE = -1  # the slot of a state that is not kept


@dataclass(frozen=True)
class BlockDemand(ABC):
    """Blocks that one bin takes for a request."""

    block_size: int

    def full(self, tokens: Any) -> Any:
        """Of full heads; ``tokens``: a number or an integer tensor."""
        return -(-tokens // self.block_size)

    @abstractmethod
    def compressible(self, tokens: int, prompt: int = 0) -> int:
        """Of compressible heads, while decoding; ``prompt``: tokens of its prompt, which count if
        they are kept.
        """


@dataclass(frozen=True)
class SinkWindowDemand(BlockDemand):
    """Compressible heads keep sinks and a window; ``protect_prompt``: of the first tokens at least
    the prompt.
    """

    sink: int
    window: int
    protect_prompt: bool = False

    def prefix(self, prompt: int) -> int:
        """First tokens that are kept of a request with so many tokens in its prompt."""
        return max(self.sink, prompt) if self.protect_prompt else self.sink

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        """The blocks of the first tokens, and the window's, which may begin anywhere in a block."""
        kept = self.full(self.prefix(prompt)) + self.full(self.window - 1) + 1
        return min(self.full(tokens), kept)


@dataclass(frozen=True)
class BufferDemand(BlockDemand):
    """Compressible heads are under an eviction policy with a budget.

    ``observation`` queries judge the entries.
    """

    budget: int
    buffer: int
    observation: int
    group_size: int

    @classmethod
    def of(cls, policy: EvictionPolicy, block_size: int, group_size: int) -> BufferDemand:
        assert policy.budget is not None, "checked with the settings"
        return cls(block_size, policy.budget, policy.buffer, policy.observation, group_size)

    @property
    def capacity(self) -> int:
        """C, the most entries that a head holds of a request."""
        return self.budget + self.buffer

    @property
    def entries_per_query(self) -> int:
        """E: an entry has room for a key and a value, so for two query heads of a group."""
        return -(-self.group_size // 2)

    @property
    def query_blocks(self) -> int:
        return self.full(self.observation * self.entries_per_query)

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        return self.query_blocks + self.full(min(tokens, self.capacity))

    def next_eviction(self, position: int) -> int:
        """The first token behind ``position`` before which the head evicts."""
        behind = position - self.capacity
        return self.capacity + (0 if behind < 0 else (behind // self.buffer + 1) * self.buffer)

    def evictions(self, tokens: int) -> int:
        """How often a head has evicted in a text of so many tokens."""
        behind = tokens - 1 - self.capacity
        return 0 if behind < 0 else behind // self.buffer + 1

    def evicts_before(self, position: Any) -> Any:
        """Whether the head evicts before the token at a position, or at each of a tensor.

        -1, of padding: no.
        """
        return (position >= self.capacity) & ((position - self.capacity) % self.buffer == 0)

    def entries(self, positions: Tensor) -> Tensor:
        """The entry that the token at each position is written to, int64 like ``positions``."""
        later = self.budget + (positions - self.capacity).remainder(self.buffer)
        return torch.where(positions < self.capacity, positions, later)

    def observed(self, positions: Tensor) -> Tensor:
        """The place of each position's query among the observed ones.

        ``NOWHERE`` if no eviction will look at it.
        """
        behind = positions - self.capacity
        ahead = torch.where(behind < 0, -behind, self.buffer - behind.remainder(self.buffer))
        # with a short buffer a query is also looked at by later evictions
        return torch.where(
            ahead <= self.observation, positions.remainder(self.observation), NOWHERE
        )

    def observed_before(self, positions: Tensor) -> Tensor:
        """``[R] -> [R, a]``: places of the queries that an eviction before each position looks at,
        oldest first.
        """
        latest = positions[:, None] + torch.arange(self.observation, device=positions.device)
        return latest.remainder(self.observation)


MOST_BINS = 4
LONGEST = 8  # blocks of the engine's block size that a block of another bin may be as long as
TABLE_COST = 0.02  # share of a request's bytes that one more block table must save


@dataclass(frozen=True)
class Part:
    """Heads of a layer in one bin, by their numbers in the checkpoint.

    In the bin they begin at ``first``.
    """

    heads: tuple[int, ...]
    bin: int
    first: int


@dataclass(frozen=True)
class Bin:
    """Heads, as pairs of layer and number, whose blocks hold ``demand.block_size`` tokens."""

    heads: tuple[tuple[int, int], ...]
    full: bool
    demand: BlockDemand

    @cached_property
    def layers(self) -> dict[int, list[int]]:
        """The places in the bin of each layer's heads."""
        found: dict[int, list[int]] = {}
        for place, (layer, _) in enumerate(self.heads):
            found.setdefault(layer, []).append(place)
        return found

    @property
    def largest_part(self) -> int:
        return max(map(len, self.layers.values()))

    @property
    def entries(self) -> int:
        """Keys with their values in one block."""
        return len(self.heads) * self.demand.block_size

    def blocks(self, tokens: int, prompt: int) -> int:
        """Blocks that a decoding request of ``tokens`` tokens, ``prompt`` of them in its prompt,
        holds.
        """
        return self.demand.full(tokens) if self.full else self.demand.compressible(tokens, prompt)


@dataclass(frozen=True)
class PackingPlan:
    """Bins of heads; ``demand``: for the engine's block size.

    Amounts are counted in entries, a key and a value.

    They are of a decoding request of ``tokens`` tokens, ``prompt`` of them a prompt, which counts
    if protected.
    """

    bins: tuple[Bin, ...]
    demand: BlockDemand

    @cached_property
    def block_entries(self) -> int:
        """The size of a block: that of the largest bin's."""
        return max(own.entries for own in self.bins)

    def of_layer(self, layer: int) -> list[Part]:
        """The layer's parts, full ones first: the order of its heads in the served model."""
        return [
            Part(tuple(own.heads[place][1] for place in places), number, places[0])
            for number, own in enumerate(self.bins)
            if (places := own.layers.get(layer))
        ]

    def head_order(self, layer: int) -> list[int]:
        """The layer's KV heads in the order in which the served model has them."""
        return [head for part in self.of_layer(layer) for head in part.heads]

    def num_heads(self, full: bool) -> int:
        return sum(len(own.heads) for own in self.bins if own.full == full)

    def blocks(self, tokens: int, prompt: int = 0) -> int:
        """Blocks that the request holds."""
        return sum(own.blocks(tokens, prompt) for own in self.bins)

    def held(self, tokens: int, prompt: int = 0) -> int:
        """What these blocks hold."""
        return self.blocks(tokens, prompt) * self.block_entries

    def ideal(self, tokens: int, prompt: int = 0) -> int:
        """As :meth:`held` if every head had blocks of its own, of the engine's block size."""
        full, demand = self.num_heads(True) * self.demand.full(tokens), self.demand
        return (
            full + self.num_heads(False) * demand.compressible(tokens, prompt)
        ) * demand.block_size

    def uncompressed(self, tokens: int) -> int:
        """As :meth:`held` for the full cache."""
        return (
            (self.num_heads(True) + self.num_heads(False))
            * self.demand.full(tokens)
            * self.demand.block_size
        )

    def waste(self, tokens: int, prompt: int = 0) -> float:
        """Bytes held over ideal bytes, for requests of ``tokens`` tokens and up to a longest block
        more.
        """
        step = self.demand.block_size
        lengths = range(tokens, tokens + LONGEST * step, step)
        return sum(self.held(n, prompt) for n in lengths) / sum(
            self.ideal(n, prompt) for n in lengths
        )

    def summary(self, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """One line: what a request of ``tokens`` tokens holds, and how many more tokens fit into
        the same pool.
        """
        amounts = self.held(tokens, prompt), self.ideal(tokens, prompt), self.uncompressed(tokens)
        held, ideal, full = (amount * entry_bytes for amount in amounts)
        protected = f", of which {prompt:,} in a protected prompt," if prompt else ""
        tables = ", ".join(
            f"{len(own.heads)} heads x {own.demand.block_size} tokens" for own in self.bins
        )
        return (
            f"{self.num_heads(True)} full and {self.num_heads(False)} compressible heads in "
            f"{len(self.bins)} block "
            f"tables ({tables}); a request of {tokens:,} tokens{protected} holds {held:,} bytes of "
            "KV, the full cache "
            f"would hold {full:,} ({held / full:.3f}; without any waste {ideal / full:.3f}): "
            f"{full / held:.2f} times the tokens in the same pool"
        )

    def capacity(self, blocks: int, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """One line: how many tokens a pool of ``blocks`` blocks holds, in requests of ``tokens``
        tokens.
        """
        entries = blocks * self.block_entries
        held, full = (
            entries * tokens // amount
            for amount in (self.held(tokens, prompt), self.uncompressed(tokens))
        )
        return (
            f"the pool of {blocks:,} blocks ({entries * entry_bytes / 2**30:,.2f} GiB) holds "
            f"{held:,} tokens in "
            f"requests of {tokens:,}; the full cache would hold {full:,}"
        )


def plan_heads(
    settings: ServingSettings, block_size: int, group_size: int, longest: int, ranks: int = 1
) -> list[PackingPlan]:
    """The plan of each rank, for resolved settings and a model whose texts have up to ``longest``
    tokens.
    """
    policy = settings.policy()
    if policy is None:
        assert settings.sink is not None
        assert settings.window is not None
        demand: BlockDemand = SinkWindowDemand(
            block_size, settings.sink, settings.window, bool(settings.protect_prompt)
        )
    else:
        demand = BufferDemand.of(policy, block_size, group_size)
    full_LH, reference = settings.allocation.full, settings.reference(longest)
    # bytes depend on the numbers of heads alone: every rank's bins have the same sizes
    return [
        plan_packing(full_LH, demand, *reference, heads_LN)
        for heads_LN in deal_heads(full_LH, ranks)
    ]


def plan_packing(
    full_LH: Tensor,
    demand: BlockDemand,
    reference_tokens: int,
    reference_prompt: int = 0,
    heads_LN: Tensor | None = None,
) -> PackingPlan:
    """Deal the heads ``full_LH`` (True: full) into bins.

    Waste is judged for requests of ``reference_tokens``.

    The least bytes, with ``TABLE_COST`` for every block table, of which there are at most
    ``MOST_BINS``. ``heads_LN``: the heads of one rank; None: all.
    """
    mine_LH = torch.ones_like(full_LH)
    if heads_LN is not None:
        mine_LH = torch.zeros_like(full_LH).scatter(1, heads_LN, True)
    full, compressible = ((kind & mine_LH).nonzero().tolist() for kind in (full_LH, ~full_LH))
    plans = [
        PackingPlan(
            (*_bins(full, True, demand, *some), *_bins(compressible, False, demand, *others)),
            demand,
        )
        for some, others in product(_ways(len(full)), _ways(len(compressible)))
        if some[0] + others[0] <= MOST_BINS and 1 in (some[1], others[1])
    ]
    return min(
        plans,
        key=lambda plan: (
            plan.waste(reference_tokens, reference_prompt) + TABLE_COST * len(plan.bins)
        ),
    )


def _ways(heads: int) -> list[tuple[int, int]]:
    """Numbers of bins, and lengths of their blocks, that so many heads may have."""
    if heads == 0:
        return [(0, 1)]
    return list(product(range(1, min(heads, MOST_BINS) + 1), range(1, LONGEST + 1)))


def _bins(
    heads: list[list[int]], full: bool, demand: BlockDemand, number: int, length: int
) -> list[Bin]:
    """The heads in the order of layers, so that few layers have heads in two bins."""
    own = replace(demand, block_size=demand.block_size * length)
    size = -(-len(heads) // max(number, 1))
    return [
        Bin(tuple((layer, head) for layer, head in heads[first : first + size]), full, own)
        for first in range(0, len(heads), size or 1)
    ]
