"""A text to learn from, and the places in it that count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MarkedText:
    """Token ids of a text, and the positions (each above 0) of the tokens whose prediction counts."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.answers
        assert 0 < min(self.answers) <= max(self.answers) < len(self.ids)
