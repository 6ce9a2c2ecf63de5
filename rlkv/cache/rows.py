"""What differs from row to row of a batch: left padding, and how many first tokens compressible heads keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PerRow:
    """One number of each row: ``counts`` int64 ``[B]``, and the extremes as plain ints."""

    counts: Tensor
    smallest: int
    largest: int

    @classmethod
    def of(cls, counts: Tensor) -> PerRow:
        smallest, largest = (int(x) for x in torch.aminmax(counts))
        return cls(counts, smallest, largest)

    @cached_property
    def on_host(self) -> Tensor:
        """``counts`` on the CPU: a GPU is waited for once."""
        return self.counts.cpu()

    @property
    def differ(self) -> bool:
        """Whether not all rows have the same number."""
        return self.largest > self.smallest

    def select(self, rows: Tensor) -> PerRow:
        return PerRow.of(self.counts.index_select(0, rows.to(self.counts.device)))

    def to(self, device: torch.device) -> PerRow:
        return PerRow(self.counts.to(device), self.smallest, self.largest)

    def real(self, num_tokens: int) -> Tensor:
        """Of left padding, bool ``[B, num_tokens]``: which columns hold real tokens."""
        return torch.arange(num_tokens, device=self.counts.device) >= self.counts[:, None]

    @property
    def nonzero(self) -> PerRow | None:
        """None if all numbers are 0: of left padding, if no row is padded."""
        return self if self.largest else None


def read_padding(attention_mask: Tensor | None, known: PerRow | None, start: int, length: int) -> PerRow | None:
    """The left padding that a 2D mask ``[B, start + length]`` describes, None if no row is padded.

    ``known`` is that of the cache if start > 0.

    Raises:
        ValueError: if padding lies anywhere but at the start of the rows, or changes between two calls.
    """
    end = start + length
    if attention_mask is None:
        return known if start else None
    if attention_mask.shape[-1] != end:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[-1]} columns but the cache will hold {end} tokens: pass one "
            "column for every token so far, cached and new"
        )
    padding = known if start else PerRow.of(end - attention_mask.sum(-1)).nonzero
    expected = True if padding is None else padding.real(end).to(attention_mask.device)
    if not (attention_mask == expected).all():
        raise ValueError(
            "attention_mask masks tokens that are not padding at the start of a row: this cache takes left padding "
            "only, the same in every call (set tokenizer.padding_side = 'left')"
        )
    return padding
