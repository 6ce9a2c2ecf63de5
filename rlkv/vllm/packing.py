"""Bins of heads that share a block table: a pool of equal blocks is filled with little waste.

The heads of a *bin* share a block table; a block holds some tokens of all of them. Each table costs
time in every step, so there are few. All blocks have as many bytes as the largest one, so a bin of
few heads has more tokens in a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

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
        """Return the blocks of full heads; ``tokens``: a number or an integer tensor."""
        return -(-tokens // self.block_size)

    @abstractmethod
    def compressible(self, tokens: int, prompt: int = 0) -> int:
        """Return the blocks of compressible heads while decoding.

        prompt: tokens of the request's prompt, which count if they are kept.
        """


@dataclass(frozen=True)
class SinkWindowDemand(BlockDemand):
    """Blocks of sinks and a window; ``protect_prompt``: of the first tokens at least the prompt.

    ``keep_prompt_window``: also the window before the last place of the prompt at which a later
    request with the same prompt can go on.
    """

    sink: int
    window: int
    protect_prompt: bool = False
    keep_prompt_window: bool = False

    @classmethod
    def of(cls, settings: ServingSettings, block_size: int) -> SinkWindowDemand:
        """Return that of resolved settings without a policy."""
        assert settings.sink is not None
        assert settings.window is not None
        return cls(
            block_size,
            settings.sink,
            settings.window,
            bool(settings.protect_prompt),
            bool(settings.keep_prompt_window),
        )

    def prefix(self, prompt: int) -> int:
        """Return the first tokens that are kept of a request with a prompt of so many tokens."""
        return max(self.sink, prompt) if self.protect_prompt else self.sink

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        first = self.full(self.prefix(prompt))
        # the window may begin anywhere in a block
        kept = first + self.full(self.window - 1) + 1
        if self.keep_prompt_window:
            last = (prompt - 1) // self.block_size  # the last token is read again
            kept += max(0, min(last - first, self.full(self.window - 1)))
        return min(self.full(tokens), kept)


@dataclass(frozen=True)
class BufferDemand(BlockDemand):
    """Blocks of entries under an eviction policy, which ``observation`` queries judge."""

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
        """The most entries that a head holds of a request, C."""
        return self.budget + self.buffer

    @property
    def entries_per_query(self) -> int:
        """The entries of a query, E: each has room for two query heads of a group."""
        return -(-self.group_size // 2)

    @property
    def query_blocks(self) -> int:
        return self.full(self.observation * self.entries_per_query)

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        return self.query_blocks + self.full(min(tokens, self.capacity))

    def next_eviction(self, position: int) -> int:
        """Return the first token behind ``position`` before which the head evicts."""
        return self.capacity + self.evictions(position + 1) * self.buffer

    def evictions(self, tokens: int) -> int:
        """Count the evictions of a head in a text of so many tokens."""
        behind = tokens - 1 - self.capacity
        return 0 if behind < 0 else behind // self.buffer + 1

    def evicts_before(self, position: Any) -> Any:
        """Return whether the head evicts before the token at a position, or at each of a tensor.

        Never at -1, of padding.
        """
        return (position >= self.capacity) & ((position - self.capacity) % self.buffer == 0)

    def entries(self, positions: Tensor) -> Tensor:
        """Return the entry that the token at each position is written to, int64."""
        later = self.budget + (positions - self.capacity).remainder(self.buffer)
        return torch.where(positions < self.capacity, positions, later)

    def observed(self, positions: Tensor) -> Tensor:
        """Return the place of each position's query; ``NOWHERE`` if no eviction will look at it."""
        behind = positions - self.capacity
        ahead = torch.where(behind < 0, -behind, self.buffer - behind.remainder(self.buffer))
        # with a short buffer a query is also looked at by later evictions
        place = positions.remainder(self.observation)
        return torch.where(ahead <= self.observation, place, NOWHERE)

    def observed_before(self, positions: Tensor) -> Tensor:
        """Return the places of the queries that an eviction before each position looks at.

        The oldest comes first: ``[R] -> [R, a]``.
        """
        latest = positions[:, None] + torch.arange(self.observation, device=positions.device)
        return latest.remainder(self.observation)


MOST_BINS = 4
LONGEST = 8  # blocks of the engine's block size that a block of another bin may be as long as
TABLE_COST = 0.02  # share of a request's bytes that one more block table must save


@dataclass(frozen=True)
class Part:
    """Heads of a layer in one bin, where they begin at ``first``, by numbers in the checkpoint."""

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
        """Return the blocks of a decoding request, ``prompt`` of whose tokens are its prompt."""
        return self.demand.full(tokens) if self.full else self.demand.compressible(tokens, prompt)


class OtherLayer(NamedTuple):
    """A layer without gates.

    Attributes:
        page: bytes of one of its blocks.
        block_size: tokens of a block with a sliding window.
        window: tokens that it keeps; 0: a linear layer, with one block for a request.
    """

    page: int
    block_size: int = 0
    window: int = 0

    def held(self, tokens: int) -> int:
        """Return the bytes of the blocks of a decoding request of so many tokens."""
        if not self.window:
            return self.page
        # the window may begin anywhere in a block
        most = -(-(self.window - 1) // self.block_size) + 1
        return min(-(-tokens // self.block_size), most) * self.page


@dataclass(frozen=True)
class PackingPlan:
    """Bins of heads; ``demand``: for the engine's block size.

    ``least`` entries are the size of the largest block of the layers that have no gates: all
    blocks of a pool are equal.
    Amounts are counted in entries, a key and a value, of a decoding request of ``tokens`` tokens,
    ``prompt`` of which are its prompt and count if it is protected.
    """

    bins: tuple[Bin, ...]
    demand: BlockDemand
    least: int = 0

    @cached_property
    def block_entries(self) -> int:
        """The size of a block: that of the largest one."""
        return max(self.least, *(own.entries for own in self.bins))

    def of_layer(self, layer: int) -> list[Part]:
        """Return the layer's parts, full ones first: the order of its heads when served."""
        parts = []
        for number, own in enumerate(self.bins):
            places = own.layers.get(layer)
            if places:
                heads = tuple(own.heads[place][1] for place in places)
                parts.append(Part(heads, number, places[0]))
        return parts

    def head_order(self, layer: int) -> list[int]:
        """Return the layer's KV heads in the order in which the served model has them."""
        return [head for part in self.of_layer(layer) for head in part.heads]

    def num_heads(self, full: bool) -> int:
        return sum(len(own.heads) for own in self.bins if own.full == full)

    def blocks(self, tokens: int, prompt: int = 0) -> int:
        """Return the blocks that the request holds."""
        return sum(own.blocks(tokens, prompt) for own in self.bins)

    def held(self, tokens: int, prompt: int = 0) -> int:
        """Return the entries that these blocks have room for."""
        return self.blocks(tokens, prompt) * self.block_entries

    def ideal(self, tokens: int, prompt: int = 0) -> int:
        """Return :meth:`held` if every head had blocks of its own, of the engine's block size."""
        full = self.num_heads(True) * self.demand.full(tokens)
        compressible = self.num_heads(False) * self.demand.compressible(tokens, prompt)
        return (full + compressible) * self.demand.block_size

    def uncompressed(self, tokens: int) -> int:
        """Return :meth:`held` of the full cache."""
        heads = sum(len(own.heads) for own in self.bins)
        return heads * self.demand.full(tokens) * self.demand.block_size

    def waste(self, tokens: int, prompt: int = 0) -> float:
        """Return bytes held over ideal bytes, for ``tokens`` and up to a longest block more."""
        step = self.demand.block_size
        lengths = range(tokens, tokens + LONGEST * step, step)
        held = sum(self.held(length, prompt) for length in lengths)
        return held / sum(self.ideal(length, prompt) for length in lengths)

    def summary(self, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """Say in a line what a request holds, and how many more tokens fit into the same pool."""
        held = self.held(tokens, prompt) * entry_bytes
        ideal = self.ideal(tokens, prompt) * entry_bytes
        full = self.uncompressed(tokens) * entry_bytes
        where = " in its layers with full attention" if self.least else ""
        kept = f", of which {prompt:,} in its prompt," if prompt else ""
        tables = ", ".join(
            f"{len(own.heads)} heads x {own.demand.block_size} tokens" for own in self.bins
        )
        return (
            f"{self.num_heads(True)} full and {self.num_heads(False)} compressible heads in "
            f"{len(self.bins)} block "
            f"tables ({tables}); a request of {tokens:,} tokens{kept} holds {held:,} bytes of "
            f"KV{where}, the full cache would hold {full:,} ({held / full:.3f}; without any waste "
            f"{ideal / full:.3f}): {full / held:.2f} times the tokens in the same pool"
        )

    def capacity(self, blocks: int, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """Say in a line how many tokens a pool holds, in requests of ``tokens`` tokens."""
        entries = blocks * self.block_entries
        size = f"the pool of {blocks:,} blocks ({entries * entry_bytes / 2**30:,.2f} GiB)"
        if self.least:
            return f"{size} also holds the layers without gates, as the stock engine does"
        held = entries * tokens // self.held(tokens, prompt)
        full = entries * tokens // self.uncompressed(tokens)
        return (
            f"{size} holds {held:,} tokens in requests of {tokens:,}; the full cache would hold "
            f"{full:,}"
        )


def plan_heads(
    settings: ServingSettings,
    block_size: int,
    group_size: int,
    longest: int,
    ranks: int = 1,
    least: int = 0,
) -> list[PackingPlan]:
    """Plan the heads of each rank, for resolved settings; layers without gates do not count.

    Args:
        longest: tokens of the longest text.
        least: as of :class:`PackingPlan`.
    """
    policy = settings.policy()
    if policy is None:
        demand: BlockDemand = SinkWindowDemand.of(settings, block_size)
    else:
        demand = BufferDemand.of(policy, block_size, group_size)
    full_LH = settings.full_LH
    reference = settings.reference(longest)
    # bytes depend only on the numbers of heads: every rank's bins have the same sizes
    dealt = deal_heads(full_LH, ranks)
    return [plan_packing(full_LH, demand, *reference, heads_LN, least) for heads_LN in dealt]


def plan_packing(
    full_LH: Tensor,
    demand: BlockDemand,
    reference_tokens: int,
    reference_prompt: int = 0,
    heads_LN: Tensor | None = None,
    least: int = 0,
) -> PackingPlan:
    """Put the heads into bins: the least bytes, with ``TABLE_COST`` for every block table.

    Args:
        full_LH: True for full heads.
        reference_tokens, reference_prompt: the request for which waste is judged.
        heads_LN: the heads of one rank; None: all.
        least: as of :class:`PackingPlan`.
    """
    mine_LH = torch.ones_like(full_LH)
    if heads_LN is not None:
        mine_LH = torch.zeros_like(full_LH).scatter(1, heads_LN, True)
    full = (full_LH & mine_LH).nonzero().tolist()
    compressible = (~full_LH & mine_LH).nonzero().tolist()
    best = None
    lowest = float("inf")
    for some, others in product(_ways(len(full)), _ways(len(compressible))):
        # one kind has blocks of the engine's size
        if some[0] + others[0] > MOST_BINS or 1 not in (some[1], others[1]):
            continue
        bins = *_bins(full, True, demand, *some), *_bins(compressible, False, demand, *others)
        plan = PackingPlan(bins, demand, least)
        cost = plan.waste(reference_tokens, reference_prompt) + TABLE_COST * len(bins)
        if cost < lowest:
            best = plan
            lowest = cost
    assert best is not None, "a bin for each kind is always possible"
    return best


def _ways(heads: int) -> list[tuple[int, int]]:
    """Numbers of bins, and lengths of their blocks, that so many heads may have."""
    if heads == 0:
        return [(0, 1)]
    return list(product(range(1, min(heads, MOST_BINS) + 1), range(1, LONGEST + 1)))


def _bins(
    heads: list[list[int]], full: bool, demand: BlockDemand, number: int, length: int
) -> list[Bin]:
    """Cut the heads in the order of layers, so that few layers have heads in two bins."""
    own = replace(demand, block_size=demand.block_size * length)
    size = -(-len(heads) // max(number, 1))
    bins = []
    for first in range(0, len(heads), size or 1):
        members = tuple((layer, head) for layer, head in heads[first : first + size])
        bins.append(Bin(members, full, own))
    return bins
