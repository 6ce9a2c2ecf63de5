"""How a compressed model fails where the full cache succeeds (RLKV, arXiv 2510.08525, error modes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODES = ("repetitive", "overlength", "incorrect")


@dataclass(frozen=True)
class RepetitionRule:
    """A text is repetitive if ``window`` tokens in a row hold fewer than ``distinct`` different ones.

    Checked at every full ``window`` of the output, as in the paper (400 tokens, 40 distinct ones).

    Raises:
        ValueError: unless 1 <= distinct <= window: every text would be repetitive, or none.
    """

    window: int = 400
    distinct: int = 40

    def __post_init__(self) -> None:
        if not 1 <= self.distinct <= self.window:
            raise ValueError(
                f"--repetition {self.window} {self.distinct}: a window of {self.window} tokens never holds "
                f"{self.distinct} distinct ones: give WINDOW DISTINCT, such as 400 40"
            )

    def __call__(self, token_ids: list[int]) -> bool:
        ends = range(self.window, len(token_ids) + 1, self.window)
        return any(len(set(token_ids[end - self.window : end])) < self.distinct for end in ends)


def error_mode(row: dict[str, Any]) -> str | None:
    """The first of ``MODES`` that fits a row of a run (overlength: cut at the limit); None for a right answer."""
    if row["correct"]:
        return None
    return "repetitive" if row["repetitive"] else "overlength" if row["finish_reason"] == "length" else "incorrect"
