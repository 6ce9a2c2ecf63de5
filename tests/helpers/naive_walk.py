"""Which tokens each method holds of a whole text, from its rules: one layer, one row, one token
after the other.

Written apart from rlkv.eviction and rlkv.cache, of which nothing is imported; scores are those of
naive_selection.
Shapes: keys ``[H, T, D]``, queries ``[Q, T, D]`` of all T tokens.  A prompt of ``prompt`` tokens is
read in one go, the others one by one.  Every function gives the positions that each head holds
after the prompt and after every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.helpers import naive_selection as naive

Held = list[list[int]]  # of each head, ascending


def walk(
    heads: int, prompt: int, tokens: int, due: Callable[..., bool], choose: Callable[..., Held]
) -> Iterator[Held]:
    """``due(entries, tokens read, evictions)`` says when ``choose(held, tokens read, evictions)``
    evicts.
    """
    held: Held = [[] for _ in range(heads)]
    evictions, begin = 0, 0
    for read in range(prompt, tokens + 1):
        for entries in held:
            entries += range(begin, read)
        if due(len(held[0]), read, evictions):
            held = [list(entries) for entries in choose(held, read, evictions)]
            evictions += 1
        begin = read
        yield [list(entries) for entries in held]


def states(keys: np.ndarray, held: Held) -> np.ndarray:
    """Keys of what is held, ``[H, N, D]``."""
    return np.stack([keys[head, entries] for head, entries in enumerate(held)])


def pick(held: Held, index: np.ndarray) -> Held:
    return [[entries[i] for i in own] for entries, own in zip(held, index.tolist(), strict=True)]


def every_buffer(select: Callable, keys, queries, prompt, budget, buffer, a) -> Iterator[Held]:
    """R-KV and SnapKV at decode: with ``buffer`` entries above the budget, keep the budget, judged
    by a queries.
    """

    def choose(held: Held, read: int, evictions: int) -> Held:
        return pick(held, select(states(keys, held), queries[:, read - a : read], budget)[0])

    return walk(
        len(keys), prompt, keys.shape[1], lambda entries, *_: entries >= budget + buffer, choose
    )


def rkv_of_tables(keys, queries, prompt, ratio, extra, buffer, a, last, kernel) -> Iterator[Held]:
    """RLKV's evaluator: above ratio * tokens + extra, and above ``last``, the worst ``buffer`` of
    the last ones go.
    """

    def due(entries: int, read: int, evictions: int) -> bool:
        return entries > int(read * ratio) + extra and entries > last

    def choose(held: Held, read: int, evictions: int) -> Held:
        older, newer = [h[:-last] for h in held], [h[-last:] for h in held]
        observed = queries[:, read - a : read]
        index, _ = naive.rkv(
            states(keys, newer), observed, last - buffer, "rlkv_tables", kernel=kernel
        )
        return [old + new for old, new in zip(older, pick(newer, index), strict=True)]

    return walk(len(keys), prompt, keys.shape[1], due, choose)


def rpc(keys, queries, prompt, p, r, c, aggregation) -> Iterator[Held]:
    """The first time p + r tokens after the prompt, then every p: n * p / c tokens after it and the
    last r stay.
    """

    def due(entries: int, read: int, evictions: int) -> bool:
        generated = read - prompt
        return generated > r and (generated - r) % p == 0

    def choose(held: Held, read: int, evictions: int) -> Held:
        after = [entries[prompt:] for entries in held]
        kept = (evictions + 1) * int(p / c) + r
        index, _ = naive.rpc(states(keys, after), queries[:, read - r : read], kept, aggregation)
        return [list(range(prompt)) + own for own in pick(after, index)]

    return walk(len(keys), prompt, keys.shape[1], due, choose)


def tova(keys, queries, prompt, budget) -> Iterator[Held]:
    """At every token above the budget: the last query decides."""

    def choose(held: Held, read: int, evictions: int) -> Held:
        return pick(held, naive.tova(states(keys, held), queries[:, read - 1 : read], budget)[0])

    return walk(len(keys), prompt, keys.shape[1], lambda entries, *_: entries > budget, choose)


def h2o(keys, queries, prompt, budget_at: Callable[[int], int], even: bool) -> Iterator[Held]:
    """At every token above the budget: half of it to the last tokens, half to the largest sums of
    attention so far.

    ``budget_at(tokens read)``; with ``even`` both halves are rounded down, else the sums get the
    odd one.
    """
    heads, group = len(keys), len(queries) // len(keys)
    sums = np.zeros(keys.shape[:2])  # by position
    held: Held = [[] for _ in range(heads)]
    begin = 0
    for read in range(prompt, keys.shape[1] + 1):
        for head in range(heads):
            before = held[head]
            for t in range(begin, read):
                seen = [*before, *range(begin, t + 1)]
                for query in queries[head * group : (head + 1) * group, t]:
                    sums[head, seen] += naive.softmax(
                        keys[head, seen] @ query / np.sqrt(keys.shape[2])
                    )
            held[head] = [*before, *range(begin, read)]
            budget = budget_at(read)
            if len(held[head]) > budget:
                recent = budget // 2
                older, newer = held[head][:-recent], held[head][-recent:]
                hitters = sorted(older, key=lambda position: -sums[head, position])
                held[head] = sorted(hitters[: recent if even else budget - recent]) + newer
        begin = read
        yield [list(entries) for entries in held]
