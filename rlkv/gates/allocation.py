"""HeadAllocation: which KV heads keep the whole past, by exact count from gates and a sparsity.

A quantile would miss the sparsity where gates tie: published ones have 79 to 197 distinct values
for 112 to 288 heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch import Tensor

from rlkv.models.layout import gated_places

if TYPE_CHECKING:
    from rlkv.gates.head_gates import HeadGates

SPARSITIES = (0.2, 0.4, 0.5, 0.6, 0.8)  # that commands and model cards show


def num_full_heads(sparsity: float, total: int) -> int:
    """Return ``round((1 - sparsity) * total)`` in decimal arithmetic; on a tie a head stays full.

    Raises:
        ValueError: if ``sparsity`` is not a number or outside [0, 1].
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, SupportsFloat):
        raise ValueError(f"sparsity is {sparsity!r}: it must be a number from 0 to 1")
    if not 0 <= sparsity <= 1:
        raise ValueError(
            f"sparsity {sparsity} is not in [0, 1]: it is the share of KV heads that are "
            "compressible"
        )
    return math.floor((1 - Fraction(str(float(sparsity)))) * total + Fraction(1, 2))


def compression_order(gates: HeadGates) -> list[tuple[int, int]]:
    """List all heads with a gate as (layer, head), least needed first.

    Sorted by gate; equal gates by their mean over training; among heads equal in both, the later
    one goes first.
    """
    alpha = gates.alpha.flatten().tolist()
    mean = gates.mean_alpha.flatten().tolist()
    places = gates.gated.flatten().nonzero().flatten().tolist()
    order = sorted(places, key=lambda i: (alpha[i], mean[i], -i))
    return [divmod(i, gates.num_kv_heads) for i in order]


def random_order(
    num_layers: int, num_kv_heads: int, seed: int, heads: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Shuffle all heads (layer, head): :meth:`HeadAllocation.random` compresses them in turn.

    heads: how many of each layer can be compressed; None: all.
    """
    places = gated_places(heads, num_layers, num_kv_heads).flatten().nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    order = places[torch.randperm(len(places), generator=generator)].tolist()
    return [divmod(i, num_kv_heads) for i in order]


@dataclass(frozen=True, eq=False)
class HeadAllocation:
    """A choice of the heads that are full.

    Attributes:
        full: bool ``[num_layers, num_kv_heads]`` on the CPU; True keeps everything, False is
            compressible.
        heads: how many heads of each layer can be compressed, as ``HeadGates.heads``; None: all.
            The other places of ``full`` are True.

    Raises:
        ValueError: if ``full`` is not a non-empty bool matrix, or ``heads`` does not belong to it.
    """

    full: Tensor
    heads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        full = self.full
        is_bool = isinstance(full, Tensor) and full.dtype == torch.bool
        if not is_bool or full.dim() != 2 or full.numel() == 0:
            is_tensor = isinstance(full, Tensor)
            found = f"{full.dtype} {list(full.shape)}" if is_tensor else type(full).__name__
            raise ValueError(
                f"an allocation needs a bool tensor [num_layers, num_kv_heads], got {found}"
            )
        # the caller's tensor may change later
        full = full.detach().cpu().clone()
        object.__setattr__(self, "full", full)
        if self.heads is None:
            return
        fits = len(self.heads) == len(full) and min(self.heads) >= 0
        if not fits or max(self.heads) > full.shape[1]:
            raise ValueError(
                f"heads has {len(self.heads)} numbers up to {max(self.heads, default=0)}, but the "
                f"allocation is for {_by(full)} (layers x KV heads)"
            )
        heads = tuple(self.heads) if min(self.heads) < full.shape[1] else None
        object.__setattr__(self, "heads", heads)
        if not bool(full[~self.gated].all()):
            raise ValueError("heads of layers without full attention cannot be compressible")

    @property
    def gated(self) -> Tensor:
        """Mask of the heads that can be compressed: bool ``[num_layers, num_kv_heads]``."""
        return gated_places(self.heads, *self.full.shape)

    @classmethod
    def from_gates(cls, gates: HeadGates, sparsity: float, scope: str = "global") -> HeadAllocation:
        """Make the heads with the largest gates full; ties as in :func:`compression_order`.

        Args:
            sparsity: share of heads that are compressible, in [0, 1].
            scope: ``global`` ranks all N heads with a gate and keeps ``num_full_heads(sparsity,
                N)`` of them full. ``layer`` keeps ``num_full_heads(sparsity, H)`` full in every
                layer, so the actual sparsity may be off by half a head *per layer* (0.1 with 4
                heads a layer gives 0): read ``.sparsity``.
        """
        num_layers, num_heads = gates.alpha.shape
        order = compression_order(gates)
        if scope == "global":
            return cls.from_order(order, num_layers, num_heads, sparsity, gates.heads)
        if scope != "layer":
            raise ValueError(f"unknown scope {scope!r}: choose global or layer")
        rows = []
        for layer in range(num_layers):
            own = [(0, head) for at, head in order if at == layer]
            rows.append(cls.from_order(own, 1, num_heads, sparsity, (len(own),)).full)
        return cls(torch.cat(rows), gates.heads)

    @classmethod
    def from_order(
        cls,
        order: Sequence[tuple[int, int]],
        num_layers: int,
        num_kv_heads: int,
        sparsity: float,
        heads: Sequence[int] | None = None,
    ) -> HeadAllocation:
        """Make the first heads of ``order`` compressible, as many as the sparsity asks for.

        Args:
            order: (layer, head) pairs, least needed first; at least as many as the sparsity takes.
            heads: how many heads of each layer can be compressed; None: all.

        Raises:
            ValueError: for a head outside the model or named twice, and if ``order`` is too short.
        """
        if min(num_layers, num_kv_heads) < 1:
            raise ValueError(
                f"an allocation needs at least one head, got {num_layers} layers x {num_kv_heads} "
                "KV heads"
            )
        gated = gated_places(heads, num_layers, num_kv_heads)
        total = int(gated.sum())
        compressible = total - num_full_heads(sparsity, total)
        full = torch.ones(num_layers, num_kv_heads, dtype=torch.bool)
        seen: set[tuple[int, int]] = set()
        for layer, head in order:
            if not (0 <= layer < num_layers and 0 <= head < num_kv_heads):
                raise ValueError(
                    f"the order names layer {layer}, head {head}: the model has {num_layers} "
                    f"layers x {num_kv_heads} KV heads, counted from 0"
                )
            if not gated[layer, head]:
                raise ValueError(
                    f"the order names layer {layer}, head {head}, which has no gate: its layer "
                    "has no full attention"
                )
            if (layer, head) in seen:
                raise ValueError(f"the order names layer {layer}, head {head} twice")
            if len(seen) < compressible:
                full[layer, head] = False
            seen.add((layer, head))
        if len(seen) < compressible:
            raise ValueError(
                f"sparsity {sparsity} makes {compressible} of {total} heads compressible, but the "
                f"order names only {len(seen)}"
            )
        return cls(full, heads)

    @classmethod
    def random(
        cls,
        num_layers: int,
        num_kv_heads: int,
        sparsity: float,
        seed: int,
        heads: Sequence[int] | None = None,
    ) -> HeadAllocation:
        """Draw ``num_full_heads(sparsity, N)`` full heads, nested over sparsities of a seed.

        heads: how many of each layer can be compressed, N in all; None: all L * H.
        """
        order = random_order(num_layers, num_kv_heads, seed, heads)
        return cls.from_order(order, num_layers, num_kv_heads, sparsity, heads)

    def rounded_up(self, gates: HeadGates, multiple: int) -> HeadAllocation:
        """Add the fewest full heads, of the largest gates, that make their number a multiple."""
        full = self.full.clone()
        others = [head for head in reversed(compression_order(gates)) if not full[head]]
        for head in others[: -self.num_full % multiple]:
            full[head] = True
        return HeadAllocation(full, self.heads)

    @property
    def num_full(self) -> int:
        """The full heads among those that could be compressed."""
        return int((self.full & self.gated).sum())

    @property
    def num_compressible(self) -> int:
        return int((~self.full).sum())

    @property
    def sparsity(self) -> float:
        """The share of compressible heads among those that can be; rounding may have moved it."""
        return self.num_compressible / max(1, int(self.gated.sum()))

    def overlap(self, other: HeadAllocation) -> float:
        """Return how many full heads are common, over the larger number of full heads.

        1 if none is full.

        Raises:
            ValueError: if ``other`` has another shape.
        """
        if self.full.shape != other.full.shape:
            raise ValueError(
                f"allocations of different models: {_by(self.full)} and {_by(other.full)} "
                "(layers x KV heads)"
            )
        larger = max(self.num_full, other.num_full)
        common = int((self.full & other.full & self.gated).sum())
        return common / larger if larger else 1.0

    def __repr__(self) -> str:
        return (
            f"<HeadAllocation {_by(self.full)}: {self.num_full} full, "
            f"{self.num_compressible} compressible, sparsity {self.sparsity:.4g}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadAllocation):
            return False
        return self.heads == other.heads and torch.equal(self.full, other.full)

    def __hash__(self) -> int:
        return hash((tuple(self.full.shape), tuple(self.full.flatten().tolist())))


def _by(full: Tensor) -> str:
    return f"{full.shape[0]} x {full.shape[1]}"


def is_decided(gates: HeadGates, full_LH: Tensor) -> bool:
    """Return whether every full head has a larger gate than every compressible one.

    Of equal gates, the means over training decide.
    """
    own_full = full_LH & gates.gated
    if bool(full_LH.all()) or not bool(own_full.any()):
        return True
    full, others = (
        zip(gates.alpha[own].tolist(), gates.mean_alpha[own].tolist(), strict=True)
        for own in (own_full, ~full_LH)
    )
    return min(full) > max(others)
