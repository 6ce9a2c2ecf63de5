"""Ground-truth files (program ``inference/tiny_ground_truth.py``): what each head is measured to be needed for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape


def elimination_order(truth: dict[str, Any]) -> list[tuple[int, int]]:
    """(layer, head), first the head that can go first; an elimination that stopped early leaves out the most needed."""
    return [(step["layer"], step["head"]) for step in truth["elimination"]]


def read_truth(path: Path, shape: ModelShape) -> dict[str, Any]:
    """A ground-truth file, whole.

    Raises:
        ValueError: if it is not such a file, names a head twice, or one that a model of this shape does not have, or
            unless it has a number for the accuracy lost by each head.
    """
    try:
        truth: dict[str, Any] = json.loads(path.read_text())
        order = elimination_order(truth)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--oracle {path} is not a ground-truth file with an elimination order ({error})") from None
    if not all(0 <= layer < shape.num_layers and 0 <= head < shape.num_kv_heads for layer, head in order):
        raise ValueError(
            f"--oracle {path} names heads that a model with {shape.num_layers} layers x {shape.num_kv_heads} KV "
            "heads does not have"
        )
    if len(set(order)) < len(order):
        raise ValueError(f"--oracle {path} eliminates a head twice: every head can go once")
    if not _is_table(truth.get("accuracy_lost_by_single_head"), shape.num_layers, shape.num_kv_heads):
        raise ValueError(
            f"--oracle {path}: accuracy_lost_by_single_head must be {shape.num_layers} lists of {shape.num_kv_heads} "
            "numbers, the accuracy that each head alone costs: measure it with inference/tiny_ground_truth.py"
        )
    return truth


def _is_table(value: Any, rows: int, columns: int) -> bool:
    """Whether ``value`` is a list of lists of finite numbers of this size."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    numbers = [number for row in value for number in row]
    return [len(row) for row in value] == [columns] * rows and all(
        type(number) in (int, float) and math.isfinite(number) for number in numbers
    )


def agreement(gates: HeadGates, truth: dict[str, Any]) -> dict[str, float | None]:
    """Spearman correlations of alpha, and the share of the oracle's full heads at 0.5 that the gates keep full too.

    A correlation is None where all gates are equal.  Heads that the elimination of ``truth`` (a ground-truth file)
    leaves out are needed most: all share the place after its last.
    """
    order = elimination_order(truth)
    position = torch.full_like(gates.alpha, len(order))
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
