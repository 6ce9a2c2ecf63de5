"""How many blocks a request takes, and where the entries of a head that evicts tokens lie in them.

Under an eviction policy a bin holds first the observed queries of a request, then its entries. All follows from a
token's position: the first ``budget + buffer`` lie in a row; before the next token, and every ``buffer``-th after it,
an eviction keeps ``budget``. So the scheduler knows what is held, and other chunks of a text evict at the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy

NOWHERE = -1  # the slot of a state that is not kept


@dataclass(frozen=True)
class BlockDemand(ABC):
    """Blocks that one bin takes for a request."""

    block_size: int

    def full(self, tokens: Any) -> Any:
        """Of full heads; ``tokens``: a number or an integer tensor."""
        return -(-tokens // self.block_size)

    @abstractmethod
    def compressible(self, tokens: int, prompt: int = 0) -> int:
        """Of compressible heads, while decoding; ``prompt``: tokens of its prompt, which count if they are kept."""


@dataclass(frozen=True)
class SinkWindowDemand(BlockDemand):
    """Compressible heads keep sinks and a window; ``protect_prompt``: of the first tokens at least the prompt."""

    sink: int
    window: int
    protect_prompt: bool = False

    def prefix(self, prompt: int) -> int:
        """First tokens that are kept of a request with so many tokens in its prompt."""
        return max(self.sink, prompt) if self.protect_prompt else self.sink

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        """The blocks of the first tokens, and the window's, which may begin anywhere in a block."""
        kept = self.full(self.prefix(prompt)) + self.full(self.window - 1) + 1
        return min(self.full(tokens), kept)


@dataclass(frozen=True)
class BufferDemand(BlockDemand):
    """Compressible heads are under an eviction policy with a budget; ``observation`` queries judge the entries."""

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
        """C, the most entries that a head holds of a request."""
        return self.budget + self.buffer

    @property
    def entries_per_query(self) -> int:
        """E: an entry has room for a key and a value, so for two query heads of a group."""
        return -(-self.group_size // 2)

    @property
    def query_blocks(self) -> int:
        return self.full(self.observation * self.entries_per_query)

    def compressible(self, tokens: int, prompt: int = 0) -> int:
        return self.query_blocks + self.full(min(tokens, self.capacity))

    def next_eviction(self, position: int) -> int:
        """The first token behind ``position`` before which the head evicts."""
        behind = position - self.capacity
        return self.capacity + (0 if behind < 0 else (behind // self.buffer + 1) * self.buffer)

    def evictions(self, tokens: int) -> int:
        """How often a head has evicted in a text of so many tokens."""
        behind = tokens - 1 - self.capacity
        return 0 if behind < 0 else behind // self.buffer + 1

    def evicts_before(self, position: Any) -> Any:
        """Whether the head evicts before the token at a position, or at each of a tensor; -1, of padding: no."""
        return (position >= self.capacity) & ((position - self.capacity) % self.buffer == 0)

    def entries(self, positions: Tensor) -> Tensor:
        """The entry that the token at each position is written to, int64 like ``positions``."""
        later = self.budget + (positions - self.capacity).remainder(self.buffer)
        return torch.where(positions < self.capacity, positions, later)

    def observed(self, positions: Tensor) -> Tensor:
        """The place of each position's query among the observed ones; ``NOWHERE`` if no eviction will look at it."""
        behind = positions - self.capacity
        ahead = torch.where(behind < 0, -behind, self.buffer - behind.remainder(self.buffer))
        # with a short buffer a query is also looked at by later evictions
        return torch.where(ahead <= self.observation, positions.remainder(self.observation), NOWHERE)

    def observed_before(self, positions: Tensor) -> Tensor:
        """``[R] -> [R, a]``: places of the queries that an eviction before each position looks at, oldest first."""
        latest = positions[:, None] + torch.arange(self.observation, device=positions.device)
        return latest.remainder(self.observation)
