"""Queries of a step in pieces, each of which is read like a request of its own.

A piece sees its sinks and its windows, so a prompt of T tokens takes T * (S + W + 128) reads, not T * T.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

QUERIES_AT_ONCE = 128


class Piece(NamedTuple):
    """Queries of the request ``row`` up to the place ``end`` of the step, from where the piece before ends.

    ``prompt``: so many first tokens see everything before them; 0 unless the piece is of such a prompt.
    """

    row: int
    end: int
    prompt: int


def cut_step(starts: list[int], prompts: list[int] | None = None) -> list[Piece]:
    """Pieces of at most ``QUERIES_AT_ONCE`` queries of the requests ``starts[r] <= t < starts[r + 1]``, in their order.

    ``prompts``: how many first tokens of each are a prompt that this step reads in full.
    """
    pieces = []
    for row, (first, end) in enumerate(pairwise(starts)):
        prompt = prompts[row] if prompts else 0
        for begin, stop, own in ((first, first + prompt, prompt), (first + prompt, end, 0)):
            pieces += [Piece(row, min(at + QUERIES_AT_ONCE, stop), own) for at in range(begin, stop, QUERIES_AT_ONCE)]
    return pieces
