"""How far a ranking of heads agrees with the measured ground truth of the built-in model."""

from __future__ import annotations

from typing import Any

import torch
from scipy.stats import spearmanr

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float | None:
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return None
    return float(spearmanr(a.flatten(), b.flatten()).statistic)


def agreement(gates: HeadGates, truth: dict[str, Any]) -> dict[str, float | None]:
    """Spearman correlations of alpha, and the share of the oracle's full heads at 0.5 that the gates keep full too.

    A correlation is None where all gates are equal.  ``truth`` is what :func:`rlkv.evaluation.heads.oracle.read_truth`
    gives: the accuracy lost by each head alone, ``[L][H]``, and the elimination, first the head that can go first.
    Heads that an elimination leaves out, since it stops early, are needed most: all share the place after its last.
    """
    order = [(step["layer"], step["head"]) for step in truth["elimination"]]
    position = torch.full_like(gates.alpha, len(order))
    for place, (layer, head) in enumerate(order):
        position[layer, head] = place
    lost = torch.tensor(truth["accuracy_lost_by_single_head"])
    oracle = HeadAllocation.from_order(order, gates.num_layers, gates.num_kv_heads, 0.5)
    return {
        "spearman_single_head": _correlation(gates.alpha, lost),
        "spearman_elimination": _correlation(gates.alpha, position),
        "overlap_at_0.5": HeadAllocation.from_gates(gates, 0.5).overlap(oracle),
    }
