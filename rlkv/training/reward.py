"""The reward of a completion: 1 if the verifier accepts its answer, else 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# (completions as text, answers) -> whether each is right
Reward = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]


def verifier_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """The project's verifier on completion texts."""
    from rlkv.verifier.verifier import are_correct

    return are_correct(zip(completions, answers, strict=True))
