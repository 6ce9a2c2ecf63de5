"""What a study compares: rankings of heads, each with one order per seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PretrainedConfig

from rlkv.evaluation.heads.oracle import elimination_order
from rlkv.evaluation.report.plots import FULL_CACHE, ORACLE, RANDOM
from rlkv.gates.allocation import HeadAllocation, compression_order, random_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape

Order = tuple[tuple[int, int], ...]
RESERVED = (ORACLE, RANDOM, FULL_CACHE)


@dataclass(frozen=True)
class Ranking:
    """A method that orders the heads of a model.

    Attributes:
        name: what tables call it.
        shape: (layers, KV heads).
        orders: for each seed or draw (layer, head) from the first to compress to the last.
        gates, files: for each seed, where the order is that of a gates file; else empty.
        run: what one order is called, ``seed`` or ``draw``.
    """

    name: str
    shape: tuple[int, int]
    orders: tuple[Order, ...]
    gates: tuple[HeadGates, ...] = ()
    files: tuple[str, ...] = ()
    run: str = "seed"

    def allocations(self, sparsity: float) -> list[HeadAllocation]:
        """For each seed, the allocation in which the first ``sparsity`` of its order is compressible."""
        return [HeadAllocation.from_order(order, *self.shape, sparsity) for order in self.orders]

    def without_top(self, heads: int) -> list[HeadAllocation]:
        """For each seed, the allocation in which only the *last* ``heads`` of its order are compressible.

        Those are the heads that the ranking considers most needed.  Heads that an order leaves out, since it stops
        early, are needed more than the others: they count as last, in the model's order.
        """
        layers, heads_per_layer = self.shape
        every = list(product(range(layers), range(heads_per_layer)))
        orders = [(*order, *(head for head in every if head not in order)) for order in self.orders]
        return [HeadAllocation.from_order(order[::-1], *self.shape, heads / len(every)) for order in orders]


def group_by_name(items: Sequence[str], option: str, taken: Sequence[str] = ()) -> dict[str, list[str]]:
    """Files of ``NAME=FILE`` texts by name, which must not be ``taken``; several files are seeds of one method."""
    files: dict[str, list[str]] = {}
    for item in items:
        name, separator, file = item.partition("=")
        if not separator or not name.strip() or not file:
            raise ValueError(f"{option} {item!r} must be NAME=FILE, such as RLKV=results/demo/gates.pt")
        if name in taken:
            raise ValueError(f"{option}: the name {name!r} is taken: give these gates another one")
        files.setdefault(name, []).append(file)
    return files


def gates_rankings(files: dict[str, list[str]], config: PretrainedConfig) -> list[Ranking]:
    """A ranking per name, an order per gates file, which must be for this model."""
    found = []
    for name, paths in files.items():
        gates = tuple(HeadGates.load(path) for path in paths)
        for each in gates:
            each.check_model(config)
        orders = tuple(tuple(compression_order(each)) for each in gates)
        found.append(Ranking(name, (gates[0].num_layers, gates[0].num_kv_heads), orders, gates, tuple(paths)))
    return found


def reference_rankings(shape: ModelShape, truth: dict[str, Any] | None, random_draws: int) -> list[Ranking]:
    """The elimination order of a ground truth, where there is one, and random draws."""
    size = (shape.num_layers, shape.num_kv_heads)
    found = []
    if truth is not None:
        found.append(Ranking(ORACLE, size, (tuple(elimination_order(truth)),)))
    if random_draws:
        draws = tuple(tuple(random_order(*size, seed)) for seed in range(random_draws))
        found.append(Ranking(RANDOM, size, draws, run="draw"))
    return found
