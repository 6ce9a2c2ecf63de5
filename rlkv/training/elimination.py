"""The order in which heads can go, measured: backward elimination that measures few heads twice.

A gate says how much of a head is needed while the others are open too, not what is lost when the head goes.  So heads
are made compressible one by one, each time the one whose loss costs least.  What a head costs grows as others go, so
that its last measured cost is a lower bound: only the lowest is measured again, until a fresh one is lowest (lazy
evaluation: Minoux 1978, "Accelerated greedy algorithms for maximizing submodular set functions").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkv.gates.allocation import HeadAllocation, compression_order, num_full_heads
from rlkv.gates.head_gates import HeadGates
from rlkv.training.trace_loss import Head, TraceLoss


@dataclass(frozen=True)
class Removal:
    """One step: this head was made compressible; the loss is then ``loss``, after so much work in all."""

    layer: int
    head: int
    loss: float
    passes: float
    cpu_seconds: float


def eliminate(
    loss: TraceLoss,
    full_LH: Tensor,
    order: Sequence[Head],
    steps: int,
    budget: float,
    on_step: Callable[[Removal], None],
) -> list[Head]:
    """The heads of ``order``, least needed first: the first ``steps`` by elimination, the others by their last cost.

    Args:
        full_LH: bool ``[L, H]``; heads that are not full are compressible from the start.
        order: the heads that may go; of equal ones the first goes.
        budget: passes over the traces that this may take.  A measurement takes about half a pass, as layers below the
            head do not compute.  What is left after each head was measured once is shared out among the steps, and
            where less than a whole pass is left the lowest old cost decides.
    """
    full_LH, before = full_LH.clone(), loss.of(full_LH)
    after = loss.without_each(full_LH, order)
    cost = {head: value - before for head, value in zip(order, after, strict=True)}
    gone: list[Head] = []
    for step in range(steps):
        allowed = (budget - loss.passes) / (steps - step)
        fresh: set[Head] = set()
        while (lowest := min(cost, key=cost.__getitem__)) not in fresh and len(fresh) + 1 <= allowed:
            cost[lowest] = loss.without_each(full_LH, [lowest])[0] - before
            fresh.add(lowest)
        head = min((other for other in cost if other in fresh or not fresh), key=cost.__getitem__)
        before += cost.pop(head)
        full_LH[head] = False
        gone.append(head)
        on_step(Removal(*head, before, loss.passes, loss.cpu_seconds))
    return [*gone, *sorted(cost, key=cost.__getitem__)]


def with_order(gates: HeadGates, order: Sequence[Head]) -> HeadGates:
    """``gates`` with the same numbers handed out so that ``compression_order`` is ``order`` (all heads, each once).

    ``mean_alpha`` becomes the place in the order, 0 to 1, so that equal gates keep it too.
    """
    alpha, rank = torch.empty_like(gates.alpha), torch.empty_like(gates.mean_alpha)
    last = max(1, len(order) - 1)
    for place, (head, value) in enumerate(zip(order, gates.alpha.flatten().sort().values, strict=True)):
        alpha[head], rank[head] = value, place / last
    return replace(gates, alpha=alpha, mean_alpha=rank)


def num_removals(total: int, low: float, high: float) -> int:
    """Heads that become compressible between two sparsities; ``ValueError`` if there are none."""
    found = num_full_heads(low, total) - num_full_heads(high, total)
    if found < 1:
        raise ValueError(
            f"between the sparsities {low:g} and {high:g}, where elimination begins and ends, no head of {total} "
            "becomes compressible: take them further apart"
        )
    return found


def rerank(
    gates: HeadGates,
    loss: TraceLoss,
    low: float,
    high: float,
    budget: float,
    on_step: Callable[[Removal], None] = lambda step: None,
) -> HeadGates:
    """``gates`` with the same numbers in another order: measured above the sparsity ``low``, theirs below it.

    Args:
        high: sparsity up to which heads go; those that are left are ordered by what they last cost.
        budget: as of :func:`eliminate`.

    Raises:
        ValueError: if no head becomes compressible between ``low`` and ``high``.
    """
    steps = num_removals(gates.alpha.numel(), low, high)
    start, order = HeadAllocation.from_gates(gates, low), compression_order(gates)
    before = order[: start.num_compressible]
    measured = eliminate(loss, start.full, order[len(before) :], steps, budget, on_step)
    return with_order(gates, [*before, *measured])
