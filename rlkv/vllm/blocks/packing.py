"""Which heads share a block table, so that a pool of equal blocks is filled with little waste.

The heads of a *bin* share a block table; a block holds some tokens of all of them. Each table costs time in every step,
so there are few. All blocks have as many bytes as the largest one, so a bin of few heads has more tokens in a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from rlkv.vllm.blocks.dealing import deal_heads
from rlkv.vllm.blocks.demand import BlockDemand, BufferDemand, SinkWindowDemand
from rlkv.vllm.settings import ServingSettings

MOST_BINS = 4
LONGEST = 8  # blocks of the engine's block size that a block of another bin may be as long as
TABLE_COST = 0.02  # share of a request's bytes that one more block table must save


@dataclass(frozen=True)
class Part:
    """Heads of a layer in one bin, by their numbers in the checkpoint; in the bin they begin at ``first``."""

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
        """Blocks that a decoding request of ``tokens`` tokens, ``prompt`` of them in its prompt, holds."""
        return self.demand.full(tokens) if self.full else self.demand.compressible(tokens, prompt)


@dataclass(frozen=True)
class PackingPlan:
    """Bins of heads; ``demand``: for the engine's block size. Amounts are counted in entries, a key and a value.

    They are of a decoding request of ``tokens`` tokens, ``prompt`` of them a prompt, which counts if protected.
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
        return (full + self.num_heads(False) * demand.compressible(tokens, prompt)) * demand.block_size

    def uncompressed(self, tokens: int) -> int:
        """As :meth:`held` for the full cache."""
        return (self.num_heads(True) + self.num_heads(False)) * self.demand.full(tokens) * self.demand.block_size

    def waste(self, tokens: int, prompt: int = 0) -> float:
        """Bytes held over ideal bytes, for requests of ``tokens`` tokens and up to a longest block more."""
        step = self.demand.block_size
        lengths = range(tokens, tokens + LONGEST * step, step)
        return sum(self.held(n, prompt) for n in lengths) / sum(self.ideal(n, prompt) for n in lengths)

    def summary(self, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """One line: what a request of ``tokens`` tokens holds, and how many more tokens fit into the same pool."""
        amounts = self.held(tokens, prompt), self.ideal(tokens, prompt), self.uncompressed(tokens)
        held, ideal, full = (amount * entry_bytes for amount in amounts)
        protected = f", of which {prompt:,} in a protected prompt," if prompt else ""
        tables = ", ".join(f"{len(own.heads)} heads x {own.demand.block_size} tokens" for own in self.bins)
        return (
            f"{self.num_heads(True)} full and {self.num_heads(False)} compressible heads in {len(self.bins)} block "
            f"tables ({tables}); a request of {tokens:,} tokens{protected} holds {held:,} bytes of KV, the full cache "
            f"would hold {full:,} ({held / full:.3f}; without any waste {ideal / full:.3f}): "
            f"{full / held:.2f} times the tokens in the same pool"
        )

    def capacity(self, blocks: int, entry_bytes: int, tokens: int, prompt: int = 0) -> str:
        """One line: how many tokens a pool of ``blocks`` blocks holds, in requests of ``tokens`` tokens."""
        entries = blocks * self.block_entries
        held, full = (entries * tokens // amount for amount in (self.held(tokens, prompt), self.uncompressed(tokens)))
        return (
            f"the pool of {blocks:,} blocks ({entries * entry_bytes / 2**30:,.2f} GiB) holds {held:,} tokens in "
            f"requests of {tokens:,}; the full cache would hold {full:,}"
        )


def plan_heads(
    settings: ServingSettings, block_size: int, group_size: int, longest: int, ranks: int = 1
) -> list[PackingPlan]:
    """The plan of each rank, for resolved settings and a model whose texts have up to ``longest`` tokens."""
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
    return [plan_packing(full_LH, demand, *reference, heads_LN) for heads_LN in deal_heads(full_LH, ranks)]


def plan_packing(
    full_LH: Tensor,
    demand: BlockDemand,
    reference_tokens: int,
    reference_prompt: int = 0,
    heads_LN: Tensor | None = None,
) -> PackingPlan:
    """Deal the heads ``full_LH`` (True: full) into bins; waste is judged for requests of ``reference_tokens``.

    The least bytes, with ``TABLE_COST`` for every block table, of which there are at most ``MOST_BINS``.
    ``heads_LN``: the heads of one rank; None: all.
    """
    mine_LH = torch.ones_like(full_LH)
    if heads_LN is not None:
        mine_LH = torch.zeros_like(full_LH).scatter(1, heads_LN, True)
    full, compressible = ((kind & mine_LH).nonzero().tolist() for kind in (full_LH, ~full_LH))
    plans = [
        PackingPlan((*_bins(full, True, demand, *some), *_bins(compressible, False, demand, *others)), demand)
        for some, others in product(_ways(len(full)), _ways(len(compressible)))
        if some[0] + others[0] <= MOST_BINS and 1 in (some[1], others[1])
    ]
    return min(plans, key=lambda plan: plan.waste(reference_tokens, reference_prompt) + TABLE_COST * len(plan.bins))


def _ways(heads: int) -> list[tuple[int, int]]:
    """Numbers of bins, and lengths of their blocks, that so many heads may have."""
    if heads == 0:
        return [(0, 1)]
    return list(product(range(1, min(heads, MOST_BINS) + 1), range(1, LONGEST + 1)))


def _bins(heads: list[list[int]], full: bool, demand: BlockDemand, number: int, length: int) -> list[Bin]:
    """The heads in the order of layers, so that few layers have heads in two bins."""
    own = replace(demand, block_size=demand.block_size * length)
    size = -(-len(heads) // max(number, 1))
    return [
        Bin(tuple((layer, head) for layer, head in heads[first : first + size]), full, own)
        for first in range(0, len(heads), size or 1)
    ]
