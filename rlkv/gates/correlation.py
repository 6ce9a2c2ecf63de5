"""Rank correlation, to compare gates with each other and with measured importance."""

from __future__ import annotations

from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """Rank of every element (float64, from 0), equal values sharing the mean of their ranks."""
    _, group, counts = values.flatten().unique(return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    return (first + (counts - 1) / 2.0).double()[group]


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation in [-1, 1] of two tensors of one shape; NaN if either is constant.

    Raises:
        ValueError: if the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"rank correlation needs two tensors of one shape, got {list(a.shape)} and {list(b.shape)}")
    x, y = (ranks - ranks.mean() for ranks in (average_ranks(a), average_ranks(b)))
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return ((x * y).sum() / scale).item() if scale > 0 else float("nan")
