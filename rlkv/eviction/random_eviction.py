"""Random eviction: the baseline that every scorer has to beat (arXiv 2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy
from rlkv.eviction.registry import register

# SplitMix64 (Steele, Lea, Flood 2014), in int64, whose products wrap around as those of uint64 do
STEP = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BITS = 24  # of a draw: as many as a float32 holds exactly


@register
@dataclass(frozen=True)
class RandomEviction(EvictionPolicy):
    """Evict at random, each head on its own; the prompt stays (arXiv 2609.03430).

    Scores ``[B, H, N]`` are uniform draws, each a hash of ``seed``, layer, head, the tokens that the row has read, and
    the entry's place among the row's entries: the same in every run, batch and device, and new at every eviction.
    """

    protect_prompt: bool = True
    seed: int = 0

    name: ClassVar[str] = "random"
    uses_queries: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1")

    def scores(
        self, keys: Tensor, queries: Tensor, valid: Tensor, seen: Tensor | None = None, layer: int = 0
    ) -> Tensor:
        """As of the base class, and int64 ``[B]`` tokens ``seen`` (None: as many as entries) and ``layer``."""
        place = valid.long().cumsum(dim=-1)
        seen_B = (place[:, -1] if seen is None else seen.to(keys.device)).long()
        head = torch.arange(keys.shape[1], device=keys.device)
        state = torch.tensor(self.seed, device=keys.device)
        for counter in (torch.tensor(layer), head[None, :, None], seen_B[:, None, None], place[:, None]):
            state = _hash(state + (counter + 1) * STEP)
        return _shift(state, 64 - BITS).float()


def _hash(state: Tensor) -> Tensor:
    """The finaliser of SplitMix64: int64 -> int64, every bit of the result depends on every bit of ``state``."""
    for bits, factor in ROUNDS:
        state = (state ^ _shift(state, bits)) * factor
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """``state >> bits`` as of uint64: fills with zeros, not with copies of the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)
