"""Sizes of local attention: which tokens a compressible head sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SinkWindow:
    """S, the first tokens that the local branch sees, and W, the last ones, the query's own included."""

    sink: int
    window: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.window < 1:
            raise ValueError(f"sink must be 0 or more and window 1 or more, got sink={self.sink}, window={self.window}")
