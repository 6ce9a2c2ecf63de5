"""Which heads share a block, so that a pool of equal blocks is filled without waste.

A block holds ``block_size`` tokens of all heads of a *bin*, which has its own block table. All blocks are as large as
the largest bin, so heads are dealt into bins of (nearly) equal size; few of them, as each costs a block table and
metadata in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from rlkv.vllm.blocks.demand import BlockDemand, BufferDemand, SinkWindowDemand
from rlkv.vllm.settings import ServingSettings

MAX_BINS = 24
GOOD_ENOUGH = 1.03  # bytes over the ideal ones up to which fewer bins are better than less waste


@dataclass(frozen=True)
class Part:
    """Heads of a layer, by their numbers in the checkpoint; bins are counted over full and compressible ones."""

    layer: int
    heads: tuple[int, ...]
    full: bool
    bin: int

    @property
    def size(self) -> int:
        return len(self.heads)


@dataclass(frozen=True)
class PackingPlan:
    """Bins of heads; ``parts``: by layer, full ones first, the order of a layer's heads in the served model."""

    parts: tuple[Part, ...]
    demand: BlockDemand

    @cached_property
    def bins(self) -> dict[int, list[Part]]:
        """Parts of each bin by its number."""
        found: dict[int, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.bin, []).append(part)
        return found

    @cached_property
    def groups(self) -> list[list[Part]]:
        return engine_groups(list(self.bins.values()))

    @property
    def heads_per_block(self) -> int:
        """The size of a block, counted in heads: that of the largest bin."""
        return max(sum(part.size for part in group) for group in self.groups)

    def of_layer(self, layer: int) -> list[Part]:
        return [part for part in self.parts if part.layer == layer]

    def head_order(self, layer: int) -> list[int]:
        """The layer's KV heads in the order in which the served model has them."""
        return [head for part in self.of_layer(layer) for head in part.heads]

    def num_heads(self, full: bool) -> int:
        return sum(part.size for part in self.parts if part.full == full)

    def blocks(self, tokens: int) -> int:
        """Blocks that a decoding request of ``tokens`` tokens holds."""
        demand = self.demand
        return sum(demand.full(tokens) if group[0].full else demand.compressible(tokens) for group in self.groups)

    def held(self, tokens: int) -> int:
        """What these blocks hold, in heads times blocks."""
        return self.blocks(tokens) * self.heads_per_block

    def ideal(self, tokens: int) -> int:
        """As :meth:`held` for blocks that are filled without waste."""
        demand = self.demand
        return self.num_heads(True) * demand.full(tokens) + self.num_heads(False) * demand.compressible(tokens)

    def uncompressed(self, tokens: int) -> int:
        """As :meth:`held` for the full cache."""
        return (self.num_heads(True) + self.num_heads(False)) * self.demand.full(tokens)

    def waste(self, tokens: int) -> float:
        """Bytes held over ideal bytes, 1 at best."""
        return self.held(tokens) / self.ideal(tokens)

    def head_bytes(self, head_size: int, element_size: int) -> int:
        """Bytes of keys and values of one head in one block."""
        return self.demand.block_size * 2 * head_size * element_size

    def summary(self, head_bytes: int, tokens: int) -> str:
        """One line: what a request of ``tokens`` tokens holds, and how many more tokens fit into the same pool."""
        held, ideal, full = (
            amount * head_bytes for amount in (self.held(tokens), self.ideal(tokens), self.uncompressed(tokens))
        )
        return (
            f"{self.num_heads(True)} full and {self.num_heads(False)} compressible heads in {len(self.groups)} block "
            f"tables; a request of {tokens:,} tokens holds {held:,} bytes of KV, the full cache would hold {full:,} "
            f"({held / full:.3f}; without any waste {ideal / full:.3f}): "
            f"{full / held:.2f} times the tokens in the same pool"
        )


def plan_heads(settings: ServingSettings, block_size: int, group_size: int, longest: int) -> PackingPlan:
    """The plan for resolved settings and a model whose texts have up to ``longest`` tokens."""
    policy = settings.policy()
    if policy is None:
        assert settings.sink is not None
        assert settings.window is not None
        demand: BlockDemand = SinkWindowDemand(block_size, settings.sink, settings.window)
    else:
        demand = BufferDemand.of(policy, block_size, group_size)
    return plan_packing(settings.allocation.full, demand, min(settings.reference_tokens, longest))


def plan_packing(full_LH: Tensor, demand: BlockDemand, reference_tokens: int) -> PackingPlan:
    """Deal the heads ``full_LH`` (True: full) into bins; waste is judged for a request of ``reference_tokens``."""
    plans = [_plan(full_LH, demand, size) for size in _sizes(full_LH)]
    wasted = {id(plan): plan.waste(reference_tokens) for plan in plans}
    good = [plan for plan in plans if wasted[id(plan)] <= GOOD_ENOUGH]
    if good:
        return min(good, key=lambda plan: (len(plan.groups), len(plan.parts), wasted[id(plan)]))
    return min(plans, key=lambda plan: (wasted[id(plan)], len(plan.groups), len(plan.parts)))


def _sizes(full_LH: Tensor) -> list[int]:
    """Sizes of a bin that are worth trying: the smallest ones for each pair of numbers of bins."""
    counts = [int(full_LH.sum()), int((~full_LH).sum())]
    sizes = {-(-count // bins) for count in counts for bins in range(1, MAX_BINS + 1) if count}
    fitting = [size for size in sizes if sum(-(-count // size) for count in counts) <= MAX_BINS]
    return sorted(fitting or [max(counts)])


def _plan(full_LH: Tensor, demand: BlockDemand, size: int) -> PackingPlan:
    parts: list[Part] = []
    for full in (True, False):
        layers = [(layer, (row == full).nonzero()[:, 0].tolist()) for layer, row in enumerate(full_LH)]
        first = 1 + max((part.bin for part in parts), default=-1)
        parts += _deal([(layer, heads) for layer, heads in layers if heads], size, full, first)
    parts.sort(key=lambda part: (part.layer, not part.full, part.bin, part.heads))
    return PackingPlan(tuple(parts), demand)


def _deal(layers: list[tuple[int, list[int]]], size: int, full: bool, first: int) -> list[Part]:
    """Fill bins of ``size`` heads, the largest layers first; a layer is split only if it fits nowhere whole."""
    total = sum(len(heads) for _, heads in layers)
    room = [size] * -(-total // size) if total else []
    parts: list[Part] = []
    for layer, heads in sorted(layers, key=lambda item: -len(item[1])):
        rest = list(heads)
        while rest:
            fitting = [number for number, free in enumerate(room) if free >= len(rest)]
            number = min(fitting, key=lambda at: room[at]) if fitting else max(range(len(room)), key=room.__getitem__)
            taken = min(len(rest), room[number])
            parts.append(Part(layer, tuple(rest[:taken]), full, first + number))
            room[number] -= taken
            rest = rest[taken:]
    used = sorted({part.bin for part in parts})
    parts = [replace(part, bin=first + used.index(part.bin)) for part in parts]
    return [piece for number in range(len(used)) for piece in _unbalanced(parts, first + number)]


def _unbalanced(parts: list[Part], number: int) -> list[Part]:
    """The parts of one bin, split until the engine leaves them together (see :func:`engine_groups`)."""
    own = [part for part in parts if part.bin == number]
    while _is_balanced_mix(own):
        ways = list(_splits(own))
        own = next((way for way in ways if not _is_balanced_mix(way)), ways[0])
    return own


def _splits(parts: list[Part]) -> Iterator[list[Part]]:
    """All ways to cut one part in two, the largest part first."""
    for part in sorted(parts, key=lambda part: -part.size):
        rest = [other for other in parts if other is not part]
        for cut in range(1, part.size // 2 + 1):
            yield [*rest, replace(part, heads=part.heads[:-cut]), replace(part, heads=part.heads[-cut:])]


def _is_balanced_mix(parts: list[Part]) -> bool:
    counts = Counter(part.size for part in parts)
    return len(counts) > 1 and len(set(counts.values())) == 1


def engine_groups(bins: list[list[Part]]) -> list[list[Part]]:
    """The block tables that vLLM 0.31 makes of bins whose specs refuse to be merged with one another's.

    Parts of different sizes: one group per bin (``_get_packed_kv_cache_groups``), unless a bin holds as many parts of
    each of several sizes, which cuts the others into pieces: the plan has none.  Parts of one size: groups of equally
    many parts, the last one perhaps with fewer (``_get_kv_cache_groups_uniform_page_size``).
    """
    sizes = {part.size for parts in bins for part in parts}
    if len(bins) == 1 or len(sizes) > 1:
        return bins
    fewest, most = min(map(len, bins)), max(map(len, bins))
    at_once = most if most < fewest * 1.5 else fewest
    cut: list[list[Part]] = []
    for parts in bins:
        pieces = -(-len(parts) // at_once)
        cut += [parts[first::pieces] for first in range(pieces)]
    return cut
