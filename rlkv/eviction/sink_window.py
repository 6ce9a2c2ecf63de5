"""Sink and window: the first and the last tokens, as in StreamingLLM (arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkv.eviction.base import EvictionPolicy, check_type
from rlkv.eviction.registry import register


@register
@dataclass(frozen=True)
class SinkWindow(EvictionPolicy):
    """StreamingLLM (arXiv 2309.17453): keep the first ``sink`` entries and the most recent ones.

    The score is the entry's place in the sequence, float ``[B, H, N]``: the later, the higher.

    Attributes:
        window: most recent entries kept (the current token counts); ``budget = sink + window``, give one of the two.
    """

    buffer: int = 1
    observation: int = 1
    sink: int = 16
    window: InitVar[int | None] = None

    name: ClassVar[str] = "sink_window"
    uses_queries: ClassVar[bool] = False

    def __post_init__(self, window: int | None) -> None:
        if window is not None:
            check_type(f"{self.name}: window", window, "int")
            if window < 1:
                raise ValueError(f"{self.name}: window is {window}: it must be 1 or more tokens")
            if self.ratio is not None:
                raise ValueError(f"{self.name}: window and ratio cannot both be given: a window is a fixed budget")
            if self.budget not in (None, self.sink + window):
                raise ValueError(
                    f"{self.name}: budget is {self.budget}, but sink {self.sink} + window {window} are "
                    f"{self.sink + window} entries: give either a budget or a window"
                )
            object.__setattr__(self, "budget", self.sink + window)
        super().__post_init__()

    def scores(self, keys: Tensor, queries: Tensor, valid: Tensor) -> Tensor:
        place = torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device)  # exact up to 2**24 entries
        return place.expand(keys.shape[:3])
