"""Which of the orders is kept: the mean's places, and that solutions outside the measured ones
decide.
"""

from __future__ import annotations

import pytest
import torch

from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.training import elimination as elimination_choice
from rlkv.training.elimination import (
    TraceLoss,
    best,
    between,
    choose_order,
    hard_masks,
    losses,
    mean_order,
    orders,
)
from tests.helpers.models import make_tiny_model

SPAN = (0.25, 0.75)


def random_gates(seed: int) -> HeadGates:
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    return HeadGates(alpha, alpha, deploy_sink=2, deploy_window=5)


def random_traces() -> list[MarkedText]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 128, (40 - 5 * i,), generator=generator).tolist() for i in range(3)]
    return [MarkedText(tuple(ids), tuple(range(8, len(ids)))) for ids in texts]


def test_the_mean_of_two_orders() -> None:
    first, second = [(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 1), (0, 1), (1, 0)]
    assert mean_order(first, second) == [(0, 0), (0, 1), (1, 1), (1, 0)]  # sums 0, 3, 4, 5
    assert mean_order(first, first[::-1]) == first[::-1]  # all sums are equal
    assert between(0.4, 0.7) == (pytest.approx(0.5), pytest.approx(0.6))


def test_what_both_orders_compress_the_mean_does() -> None:
    distilled, measured = random_gates(0), random_gates(1)
    named = orders(distilled, measured)
    assert compression_order(named["distilled"]) == compression_order(distilled)
    assert compression_order(named["measured"]) == compression_order(measured)
    assert named["mean"].alpha.flatten().sort().values.equal(measured.alpha.flatten().sort().values)
    first = compression_order(distilled)[:3]
    same_start = [*first, *(head for head in compression_order(measured) if head not in first)]
    mean = mean_order(compression_order(distilled), same_start)
    assert set(mean[:3]) == set(first)


def test_the_loss_on_other_solutions_decides() -> None:
    model, traces, named = (
        make_tiny_model("llama"),
        random_traces(),
        orders(random_gates(0), random_gates(1)),
    )
    with hard_masks(model, named["measured"], traces[0].ids) as gated:
        loss, at = TraceLoss(gated, traces, 1), between(*SPAN)
        expected = {
            name: sum(loss.of(HeadAllocation.from_gates(gates, sparsity).full) for sparsity in at)
            / 2
            for name, gates in named.items()
        }
        before = loss.passes
        found = losses(named, loss, at)
        assert loss.passes == pytest.approx(2 * before)
        assert {name: loss_N.mean().item() for name, loss_N in found.items()} == pytest.approx(
            expected, rel=1e-6
        )
        before = loss.passes
        losses({"a": named["mean"], "b": named["mean"]}, loss, at)
        assert loss.passes == pytest.approx(before + 2)  # the same heads once
    chosen = choose_order(model, traces, random_gates(0), random_gates(1), SPAN, "full")
    assert chosen.training["order"] == best(found)
    assert chosen.training["order_losses"] == pytest.approx(expected, rel=1e-6)
    assert compression_order(chosen) == compression_order(named[chosen.training["order"]])
    assert not any("rlkv_gate" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("less", "expected"),
    [
        ([0.1, 0.1, 0.1], "measured"),  # than the mean order's, on each solution
        ([0.3, -0.1, -0.1], "mean"),  # lower in the mean, by less than its standard error
        ([0.0, 0.0, 0.0], "mean"),
        ([-0.1, -0.1, -0.1], "mean"),
        ([0.1], "mean"),  # one solution says nothing of the error
    ],
)
def test_the_mean_is_kept_unless_another_is_clearly_better(
    less: list[float], expected: str
) -> None:
    mean = torch.linspace(0.5, 1.5, len(less), dtype=torch.float64)
    found = {
        "measured": mean - torch.tensor(less, dtype=torch.float64),
        "mean": mean,
        "distilled": mean + 0.5,
    }
    assert best(found) == expected
    found["distilled"] = mean - 0.2
    assert best(found) == ("mean" if len(less) == 1 else "distilled")


@pytest.mark.parametrize("name", ["measured", "mean", "distilled"])
def test_each_of_them_can_be_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination_choice, "best", lambda found: name)
    model, distilled, measured = make_tiny_model("llama"), random_gates(0), random_gates(1)
    chosen = choose_order(model, random_traces(), distilled, measured, SPAN, "full")
    assert chosen.training["order"] == name
    assert compression_order(chosen) == compression_order(orders(distilled, measured)[name])
