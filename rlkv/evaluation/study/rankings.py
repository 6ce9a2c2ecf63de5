"""What a study compares: rankings of heads, each with one order per seed, and the ground truth (oracle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PretrainedConfig

from rlkv.evaluation.report.plots import FULL_CACHE, ORACLE, RANDOM
from rlkv.gates.allocation import HeadAllocation, compression_order, random_order
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from rlkv.utils.jsonl import read_json

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
        drawn: the orders are random draws, which share the problems of a task; else each one decodes all of them.
    """

    name: str
    shape: tuple[int, int]
    orders: tuple[Order, ...]
    gates: tuple[HeadGates, ...] = ()
    files: tuple[str, ...] = ()
    drawn: bool = False

    def allocations(self, sparsity: float) -> list[HeadAllocation]:
        """For each seed, the allocation in which the first ``sparsity`` of its order is compressible."""
        return [HeadAllocation.from_order(order, *self.shape, sparsity) for order in self.orders]

    def without_top(self, heads: int) -> list[HeadAllocation]:
        """For each seed, the allocation in which only the *last* ``heads`` of its order are compressible.

        Those are the heads that the ranking considers most needed.
        """
        share = heads / (self.shape[0] * self.shape[1])
        return [HeadAllocation.from_order(order[::-1], *self.shape, share) for order in self.orders]


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
        found.append(Ranking(RANDOM, size, draws, drawn=True))
    return found


def elimination_order(truth: dict[str, Any]) -> list[tuple[int, int]]:
    """(layer, head), first the head that can go first."""
    return [(step["layer"], step["head"]) for step in truth["elimination"]]


def read_truth(path: Path, shape: ModelShape) -> dict[str, Any]:
    """A ground-truth file, whole.

    Raises:
        ValueError: if it is not such a file, does not name every head of a model of this shape once, or has no number
            for the accuracy lost by each head.
    """
    try:
        truth: dict[str, Any] = read_json(path)
        order = elimination_order(truth)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is not a ground-truth file with an elimination order ({error})") from None
    size = (shape.num_layers, shape.num_kv_heads)
    if sorted(order) != list(product(*map(range, size))):
        raise ValueError(
            f"--oracle {path} must eliminate each head of a model with {size[0]} layers x {size[1]} KV heads once: "
            "measure it with inference/tiny_ground_truth.py"
        )
    try:
        lost = np.array(truth.get("accuracy_lost_by_single_head"))
    except ValueError:  # lists of different lengths
        lost = np.array(None)
    if lost.shape != size or lost.dtype.kind not in "if" or not np.isfinite(lost).all():
        raise ValueError(
            f"--oracle {path}: accuracy_lost_by_single_head must be {shape.num_layers} lists of {shape.num_kv_heads} "
            "numbers, the accuracy that each head alone costs: measure it with inference/tiny_ground_truth.py"
        )
    return truth


def agreement(gates: HeadGates, truth: dict[str, Any]) -> dict[str, float | None]:
    """Spearman correlations of alpha, and the share of the oracle's full heads at 0.5 that the gates keep full too.

    A correlation is None where all gates are equal.  ``truth``: a ground-truth file.
    """
    order = elimination_order(truth)
    position = torch.zeros_like(gates.alpha)
    for place, head in enumerate(order):
        position[head] = place
    oracle = HeadAllocation.from_order(order, gates.num_layers, gates.num_kv_heads, 0.5)
    return {
        "spearman_single_head": _correlation(gates.alpha, torch.tensor(truth["accuracy_lost_by_single_head"])),
        "spearman_elimination": _correlation(gates.alpha, position),
        "overlap_at_0.5": HeadAllocation.from_gates(gates, 0.5).overlap(oracle),
    }


def _correlation(a: Tensor, b: Tensor) -> float | None:
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return None
    return float(spearmanr(a.flatten(), b.flatten()).statistic)
