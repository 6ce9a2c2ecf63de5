"""How a compressed model fails where the full cache succeeds (RLKV, arXiv 2510.08525, error modes)."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.rollout.base import Completion

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


def error_mode(completion: Completion, correct: bool, rule: RepetitionRule) -> str | None:
    """One of ``MODES``, the first that fits (overlength: cut at the limit), or None for a right answer."""
    return None if correct else wrong_mode(rule(completion.token_ids), completion.finish_reason == "length")


def wrong_mode(repetitive: bool, cut: bool) -> str:
    """The mode of a wrong answer, the first of ``MODES`` that fits."""
    return "repetitive" if repetitive else "overlength" if cut else "incorrect"


def count_modes(
    completions: list[Completion], correct: list[bool], solved_in_full: list[bool], rule: RepetitionRule
) -> dict[str, int]:
    """How often each of ``MODES`` occurs among the problems that the full cache solves."""
    found = [
        error_mode(completion, right, rule)
        for completion, right, solved in zip(completions, correct, solved_in_full, strict=True)
        if solved
    ]
    return {mode: found.count(mode) for mode in MODES}
