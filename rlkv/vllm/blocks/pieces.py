"""Queries of a step in pieces, each of which is read like a request of its own.

A piece sees its sinks and its windows, so a prompt of T tokens takes T * (S + W + 128) reads, not T * T. A longer
prompt that is read in full is one piece, which needs no cache: all that it sees are the step's own keys and values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

QUERIES_AT_ONCE = 128


class Piece(NamedTuple):
    """Queries of the request ``row`` up to the place ``end`` of the step, from where the piece before ends.

    ``prompt``: the piece is a whole prompt of so many tokens, each of which sees everything before it; else 0.
    """

    row: int
    end: int
    prompt: int

    @property
    def reads_cache(self) -> bool:
        return self.prompt <= QUERIES_AT_ONCE


def cut_step(starts: list[int], prompts: list[int] | None = None) -> list[Piece]:
    """Pieces of the requests ``starts[r] <= t < starts[r + 1]``, in their order, of at most ``QUERIES_AT_ONCE`` queries
    where they read the cache.

    ``prompts``: how many first tokens of each are a prompt that this step reads in full.
    """
    pieces = []
    for row, (first, end) in enumerate(pairwise(starts)):
        prompt = prompts[row] if prompts else 0
        if prompt:
            pieces.append(Piece(row, first + prompt, prompt))
        pieces += [Piece(row, min(at + QUERIES_AT_ONCE, end), 0) for at in range(first + prompt, end, QUERIES_AT_ONCE)]
    return pieces


def whole_prompts(starts: list[int], prompts: list[int] | None) -> list[slice]:
    """Queries of the step's prompts that need no cache; arguments as of :func:`cut_step`."""
    return [
        slice(first, first + prompt)
        for first, prompt in zip(starts, prompts or (), strict=False)
        if prompt > QUERIES_AT_ONCE
    ]
