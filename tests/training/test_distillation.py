"""Losses against their formulas, and the optimizer step: what moves, what does not, and that
batches do not matter.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import get_peft_model

from rlkv.attention.head_gate import HeadGateConfig, gates_matrix, set_gates
from rlkv.data.recall import MarkedText
from rlkv.training.config import DistillSettings
from rlkv.training.distillation import (
    Distiller,
    check_head,
    count_right,
    kl_of_states,
    lr_factor,
    squared_distance,
)
from rlkv.training.elimination import TraceLoss
from tests.helpers.models import make_tiny_model


def random_samples(number: int, seed: int = 0) -> list[MarkedText]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(number):
        ids = torch.randint(3, 128, (30 + 7 * i,), generator=generator).tolist()
        samples.append(MarkedText(tuple(ids), tuple(range(len(ids) - 6 - i, len(ids)))))
    return samples


def make_distiller(loss: str, family: str = "llama", **options: Any) -> Distiller:
    base = make_tiny_model(family)
    model = get_peft_model(base, HeadGateConfig(sink=2, window=5))
    defaults: dict[str, Any] = {
        "steps": 10,
        "learning_rate": 0.05,
        "l1_weight": 0.05,
        "forward_rows": 4,
    }
    return Distiller(model, DistillSettings(loss=loss, **{**defaults, **options}))


def test_distance_is_the_mean_square() -> None:
    torch.manual_seed(0)
    full, mixed = torch.randn(7, 12, dtype=torch.float64), torch.randn(7, 12, dtype=torch.float64)
    naive = [
        sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / 12
        for x, y in zip(full, mixed, strict=True)
    ]
    assert torch.allclose(squared_distance(mixed, full), torch.stack(naive), rtol=1e-12)
    halves = squared_distance(mixed.bfloat16(), full.bfloat16())
    assert halves.dtype == torch.float32


def naive_kl(mixed: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Of full from mixed logits."""
    p, q = (
        full.exp() / full.exp().sum(-1, keepdim=True),
        mixed.exp() / mixed.exp().sum(-1, keepdim=True),
    )
    return (p * (p / q).log()).sum(-1)


def test_kl_is_that_of_full_from_mixed() -> None:
    torch.manual_seed(0)
    full, mixed = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    head = torch.nn.Identity()
    assert torch.allclose(kl_of_states(head, mixed, full), naive_kl(mixed, full), rtol=1e-10)
    assert kl_of_states(head, full, full).abs().max() < 1e-15
    assert not torch.allclose(
        kl_of_states(head, full, mixed), naive_kl(mixed, full), rtol=1e-2
    )  # it is not symmetric


@pytest.mark.parametrize("bias", [False, True])
def test_kl_in_pieces_has_the_same_value_and_gradient(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20, bias=bias).double().requires_grad_(False)
    full, mixed = (
        torch.randn(10, 8, dtype=torch.float64),
        torch.randn(10, 8, dtype=torch.float64, requires_grad=True),
    )
    whole = naive_kl(head(mixed), head(full))
    weight = torch.rand(10, dtype=torch.float64)
    (expected,) = torch.autograd.grad(whole @ weight, mixed)
    monkeypatch.setattr("rlkv.training.distillation.TOKENS_AT_ONCE", 3)
    pieces = kl_of_states(head, mixed, full)
    (found,) = torch.autograd.grad(pieces @ weight, mixed)
    assert torch.allclose(pieces, whole, rtol=1e-12)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert count_right(head, full, head(full).argmax(-1)) == 10


def test_the_learning_rate_rises_and_falls_by_a_fifth() -> None:
    factors = [lr_factor(step, 2000) for step in range(2000)]
    assert factors[0] == factors[39] == 0.1  # 0.002 of 0.02, as in the paper
    assert factors[199] == pytest.approx(0.5)
    assert set(factors[399:1601]) == {1.0}
    assert factors[1800] == pytest.approx(0.5)
    assert factors[-1] == 0.1
    assert [lr_factor(step, 2) for step in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("loss", ["distance", "kl"])
def test_gates_move_and_nothing_else(loss: str, family: str) -> None:
    distiller = make_distiller(loss, family, learning_rate=0.3, l1_weight=2.0)
    frozen = {
        name: p.clone() for name, p in distiller.model.named_parameters() if not p.requires_grad
    }
    records = [distiller.train_step(random_samples(3, seed)) for seed in range(4)]
    alpha = gates_matrix(distiller.model)
    assert (alpha != 1).any(dim=1).all()
    assert alpha.min() >= 0
    assert alpha.max() <= 1
    assert len(frozen) > 10
    for name, parameter in distiller.model.named_parameters():
        assert not parameter.requires_grad or "rlkv_gate" in name
        assert name not in frozen or torch.equal(parameter, frozen[name])
    assert records[0]["loss/distill"] < 1e-9  # gates of 1 are full attention
    assert records[-1]["loss/distill"] > 0
    assert records[-1]["gates/mean"] == pytest.approx(alpha.mean().item())
    assert distiller.gate_mean.mean().mean() > alpha.mean()


@pytest.mark.parametrize(
    ("loss", "prefill"), [("distance", "local"), ("kl", "local"), ("kl", "full")]
)
def test_rows_of_a_pass_and_padding_do_not_matter(loss: str, prefill: str) -> None:
    torch.manual_seed(1)
    start = torch.rand(3, 4)
    found = []
    for rows in (1, 2, 4):
        distiller = make_distiller(loss, forward_rows=rows, data="traces", prefill=prefill)
        set_gates(distiller.model, start)
        found.append((distiller.train_step(random_samples(4)), gates_matrix(distiller.model)))
    for record, alpha in found[1:]:
        # sums of ~60 tokens in float32, in another order
        assert record["loss/distill"] == pytest.approx(found[0][0]["loss/distill"], rel=1e-4)
        assert record["gates/grad_norm"] == pytest.approx(found[0][0]["gates/grad_norm"], rel=1e-4)
        assert (alpha - found[0][1]).abs().max() < 1e-4


def test_prompts_in_full_are_the_masks_of_the_loss_of_solutions() -> None:
    """Gates of 0 and 1, prompts in full: the mean KL per token is that of the elimination's loss,
    per text.
    """
    samples = random_samples(3)
    for prefill in ("full", "local"):
        distiller = make_distiller("kl", data="traces", prefill=prefill, l1_weight=0.0)
        full_LH = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) > 0.4
        sums = [
            math.expm1(
                TraceLoss(distiller.model, [sample], 1, prompts_in_full=prefill == "full").of(
                    full_LH
                )
            )
            for sample in samples
        ]
        set_gates(distiller.model, full_LH.float())
        record = distiller.train_step(samples)
        answers = sum(len(sample.answers) for sample in samples) - (3 if prefill == "full" else 0)
        assert record["tokens/answers"] == answers
        assert record["loss/distill"] == pytest.approx(sum(sums) / answers, rel=1e-4)
        assert record["gates/grad_norm"] > 0


@pytest.mark.parametrize("loss", ["distance", "kl"])
def test_the_gradient_is_that_of_the_formula(loss: str) -> None:
    """Row by row without padding, with the model's own logits and hidden states."""
    distiller = make_distiller(loss, l1_weight=0.3)
    samples = random_samples(3)
    start = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)) * 0.8 + 0.1
    set_gates(distiller.model, start)
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.tensor([sample.ids])
        mixed = distiller.model(ids, output_hidden_states=True)
        with torch.no_grad(), distiller.model.disable_adapter():
            full = distiller.model(ids, output_hidden_states=True)
        for place in sample.answers:
            p, q = full.logits[0, place - 1].softmax(-1), mixed.logits[0, place - 1].softmax(-1)
            difference = (
                full.hidden_states[-1][0, place - 1] - mixed.hidden_states[-1][0, place - 1]
            )
            total = total + ((p * (p / q).log()).sum() if loss == "kl" else (difference**2).mean())
            tokens += 1
    expected = torch.autograd.grad(
        total / tokens + 0.3 * torch.cat(distiller.gates).mean(), distiller.gates
    )
    found: list[torch.Tensor] = []
    distiller.optimizer.register_step_pre_hook(
        lambda *_: found.extend(
            gate.grad.clone() for gate in distiller.gates if gate.grad is not None
        )
    )
    record = distiller.train_step(samples)
    assert record["loss/distill"] == pytest.approx(total.item() / tokens, rel=1e-4)
    for mine, naive in zip(found, expected, strict=True):
        # float32 through three layers; the KL of close distributions loses digits
        assert torch.allclose(mine, naive, rtol=2e-3, atol=1e-6)


def test_a_resumed_distiller_goes_on_as_if_nothing_happened() -> None:
    def steps(distiller: Distiller, seeds: range) -> None:
        for seed in seeds:
            distiller.train_step(random_samples(2, seed))

    whole = make_distiller("distance")
    steps(whole, range(6))
    first, second = make_distiller("distance"), make_distiller("distance")
    steps(first, range(3))
    second.load(first.state())
    steps(second, range(3, 6))
    assert torch.equal(gates_matrix(second.model), gates_matrix(whole.model))
    assert torch.equal(second.gate_mean.mean(), whole.gate_mean.mean())
    assert second.step == 6


def test_logits_that_are_changed_after_the_head_are_refused() -> None:
    model = make_tiny_model("llama")
    check_head(model, range(3, 20))
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits / 8
        return outputs

    model.forward = scaled  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="--data recall"):
        check_head(model, range(3, 20))


def test_gradients_that_are_not_finite_end_the_run_and_leave_the_gates() -> None:
    distiller = make_distiller("distance")
    before = gates_matrix(distiller.model).clone()
    distiller.base.get_decoder().layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="gradients of step 1 are not finite"):
        distiller.train_step(random_samples(2))
    assert torch.equal(gates_matrix(distiller.model), before)
