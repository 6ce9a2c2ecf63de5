"""Which order an elimination after a distillation keeps, by solutions that no head was measured on.

On few solutions elimination lets heads go that only other solutions need; a distillation has seen more of them, but
tells less of each head.  The mean of both orders is kept, unless one of them is clearly better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.training.distillation import check_head
from rlkv.training.elimination import with_order
from rlkv.training.head_gate import HeadGateConfig
from rlkv.training.trace_loss import Head, TraceLoss

MEAN = "mean"
HELD_BACK = 2  # solutions that orders are compared on, for each that heads are measured on


@contextmanager
def hard_masks(model: PreTrainedModel, gates: HeadGates, ids: Sequence[int]) -> Iterator[Any]:
    """The model with the gates' sizes for serving, inside; ``ids``: of any text."""
    check_head(model, ids[:32])
    gated: Any = get_peft_model(model, HeadGateConfig(sink=gates.deploy_sink, window=gates.deploy_window)).eval()
    try:
        yield gated
    finally:
        gated.unload()


def mean_order(first: Sequence[Head], second: Sequence[Head]) -> list[Head]:
    """By the sum of the places in two orders of the same heads; of equal ones the first in ``second`` goes first."""
    place = {head: number for number, head in enumerate(first)}
    return [head for _, head in sorted(enumerate(second), key=lambda found: found[0] + place[found[1]])]


def orders(distilled: HeadGates, measured: HeadGates) -> dict[str, HeadGates]:
    """The gates to choose from, by name; the mean compresses first what both do."""
    first, second = compression_order(distilled), compression_order(measured)
    found = {MEAN: mean_order(first, second), "distilled": first}
    return {"measured": measured, **{name: with_order(measured, order) for name, order in found.items()}}


def between(low: float, high: float) -> tuple[float, float]:
    """The sparsities at which orders are compared: a third and two thirds of the way."""
    return low + (high - low) / 3, high - (high - low) / 3


def losses(found: dict[str, HeadGates], loss: TraceLoss, sparsities: Sequence[float]) -> dict[str, Tensor]:
    """For each of the gates the mean loss of each batch, float64; the same heads are measured once."""
    known: dict[tuple[bool, ...], Tensor] = {}

    def at(full_LH: Tensor) -> Tensor:
        key = tuple(full_LH.flatten().tolist())
        if key not in known:
            known[key] = torch.tensor(loss.of_batches(full_LH), dtype=torch.float64)
        return known[key]

    return {
        name: torch.stack([at(HeadAllocation.from_gates(gates, sparsity).full) for sparsity in sparsities]).mean(dim=0)
        for name, gates in found.items()
    }


def best(found: dict[str, Tensor]) -> str:
    """The mean, unless another order is better by more than the standard error of the difference over the solutions."""
    shown = {MEAN: -1.0}
    for name, loss_N in found.items():
        less_N = found[MEAN] - loss_N
        if len(less_N) > 1 and less_N.mean() > less_N.std() / len(less_N) ** 0.5:
            shown[name] = less_N.mean().item()
    return max(shown, key=shown.__getitem__)


def choose_order(
    model: PreTrainedModel,
    traces: Sequence[MarkedText],
    distilled: HeadGates,
    measured: HeadGates,
    span: tuple[float, float],
    prefill: str,
) -> HeadGates:
    """The gates in the order that :func:`best` finds on other solutions, one at a time.

    Noted in ``training["order"]``, its time in ``training["choice_cpu_seconds"]``.
    """
    started, found = time.process_time(), orders(distilled, measured)
    with hard_masks(model, measured, traces[0].ids) as gated:
        loss = TraceLoss(gated, traces, 1, prompts_in_full=prefill == "full")
        measured_N = losses(found, loss, between(*span))
    name, by_name = best(measured_N), {of: loss_N.mean().item() for of, loss_N in measured_N.items()}
    seconds = round(time.process_time() - started, 3)
    told = ", ".join(f"{of} {value:.3g}" for of, value in by_name.items())
    print(f"loss of orders on {len(traces)} other solutions: {told}; kept: {name}", flush=True)
    chosen = found[name]
    chosen.training |= {"order": name, "order_losses": by_name, "choice_cpu_seconds": seconds}
    return chosen
