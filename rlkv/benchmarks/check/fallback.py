"""torch's silent fallback: past its recompile limit it runs FlexAttention without compiling, in T x
T memory.

The limit (by default 8, for FlexAttention ``VARIANTS_COMPILED`` of :mod:`rlkv.attention.branches`)
counts the variants of one function: other shapes, with and without gradients, in inference mode.
Beyond it torch only logs a warning.  On a GPU the backward pass has a thread of its own, which
these settings do not reach: what a checkpoint recomputes there is judged by its memory alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

DENSE_FROM = (
    2048  # tokens from which T x T scores are much larger than all that a fused kernel holds
)


@contextmanager
def fallback_refused() -> Iterator[None]:
    """Inside, each call that would fall back raises (:func:`is_fallback`)."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def is_fallback(error: BaseException) -> bool:
    """Whether ``error`` is that of a call that would have fallen back."""
    return isinstance(error, FailOnRecompileLimitHit)


def why_fallback() -> str:
    """What such an error means."""
    return (
        "torch's limit of compiled variants is reached: FlexAttention would run dense, without "
        "an error"
    )


def compiled_graphs() -> int:
    """Graphs that torch has compiled in this process."""
    return counters["stats"]["unique_graphs"]


def is_dense(peak_bytes: int, rows: int, query_heads: int, length: int) -> bool:
    """Whether attention held ``peak_bytes`` as if it had all scores in memory: a byte or more for
    each.

    Dense attention needs at least 2; a fused kernel about ``12 * size of a head / length`` for
    outputs and gradients.
    """
    return length >= DENSE_FROM and peak_bytes > rows * query_heads * length**2
