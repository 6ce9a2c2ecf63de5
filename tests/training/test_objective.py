"""The objective against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlkv.training.objective import (
    adaptive_weight,
    advantages,
    constant_weight,
    group_means,
    importance_ratio,
    mask_above,
    penalty,
    policy_loss,
    token_advantages,
    truncate,
)


def test_the_weight_is_zero_up_to_tau_and_exponential_above() -> None:
    means = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    found = adaptive_weight(means, beta=1e-3, tau=0.5)
    # below and at tau: 0; above: 1e-3 * (e^0.75 - 1), 1e-3 * (e - 1)
    assert found.tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 1.1170000166e-3, 1.7182818285e-3], rel=1e-5
    )


def test_the_constant_weight_is_that_of_a_solved_group() -> None:
    means = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    found = constant_weight(means, beta=1e-3)
    assert found.tolist() == pytest.approx([1.7182818285e-3] * 5, rel=1e-6)
    assert found[-1] == pytest.approx(
        adaptive_weight(means, beta=1e-3, tau=0.5)[-1].item(), rel=1e-6
    )


def test_the_penalty_averages_groups_of_different_means() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    means = group_means(rewards, 4)
    assert means.tolist() == [1.0] * 4 + [0.5] * 4 + [0.75] * 4
    weights = adaptive_weight(means, beta=0.02, tau=0.5)
    expected = 0.02 * (math.e - 1 + 0 + math.exp(0.75) - 1) / 3  # = 0.0189018
    assert weights.mean().item() == pytest.approx(expected, rel=1e-6)
    alphas = torch.tensor([1.0, 0.5, 0.0, 0.3], requires_grad=True)
    value = penalty(weights, alphas)
    assert value.item() == pytest.approx(expected * 0.45, rel=1e-6)
    value.backward()
    assert alphas.grad.tolist() == pytest.approx([expected / 4] * 4, rel=1e-6)


def test_group_advantages() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    found = advantages(rewards, 4)
    std = 0.5  # of (1, 0, 0, 0) with N - 1
    assert found.tolist() == pytest.approx(
        [0.75 / (std + 1e-4), *[-0.25 / (std + 1e-4)] * 3, 0, 0, 0, 0], rel=1e-6
    )


def test_token_advantages_count_every_token() -> None:
    found = token_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 3, 4]))
    mean, std = 5 / 8, math.sqrt((5 * 0.375**2 + 3 * 0.625**2) / 7)  # of 1, 0 0 0, 1 1 1 1
    assert found.tolist() == pytest.approx(
        [(r - mean) / (std + 1e-6) for r in (1.0, 0.0, 1.0)], rel=1e-6
    )
    assert found.dtype == torch.float32


def test_policy_loss_without_clipping_is_the_mean_advantage() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.25, 0.1], [0.5, 0.5, 0.5]])).requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    loss, clipped = policy_loss(
        logprobs, logprobs.detach(), torch.tensor([2.0, -1.0]), mask, 0.2, 4, mask.sum(1)
    )
    assert loss.item() == pytest.approx(-(2.0 - 1.0) / 4)
    assert clipped.item() == 0
    loss.backward()
    expected = [[-2 / 2 / 4, -2 / 2 / 4, 0.0], [1 / 3 / 4] * 3]
    assert logprobs.grad.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [(1.5, 1.0, 1.2, 1), (1.5, -1.0, -1.5, 0), (0.5, 1.0, 0.5, 0), (0.5, -1.0, -0.8, 1)],
)
def test_policy_loss_clips_on_the_pessimistic_side(
    ratio: float, advantage: float, expected: float, clipped: int
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, found = policy_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.tensor([advantage]),
        torch.ones(1, 1),
        0.2,
        1,
        torch.ones(1),
    )
    assert loss.item() == pytest.approx(-expected)
    assert found.item() == clipped
    loss.backward()
    assert (logprobs.grad.item() == 0) == bool(clipped)


def test_the_importance_weight_is_one_where_the_engines_agree() -> None:
    logprobs = torch.randn(3, 5, requires_grad=True)
    weight = importance_ratio(logprobs, logprobs.detach().clone())
    assert torch.equal(weight, torch.ones(3, 5))
    assert not weight.requires_grad
    arguments = (
        logprobs,
        logprobs.detach(),
        torch.tensor([1.0, -2.0, 0.5]),
        torch.ones(3, 5),
        0.2,
        3,
        torch.full((3,), 5),
    )
    assert policy_loss(*arguments, weight_NT=weight)[0] == policy_loss(*arguments)[0]


def test_importance_weights_above_the_cap_are_truncated_or_masked() -> None:
    trainer, rollout = (
        torch.log(torch.tensor([0.5, 0.2, 0.9])),
        torch.log(torch.tensor([0.25, 0.4, 0.1])),
    )
    ratio = importance_ratio(trainer, rollout)
    assert ratio.tolist() == pytest.approx([2.0, 0.5, 9.0])
    assert truncate(ratio, cap=3.0).tolist() == pytest.approx([2.0, 0.5, 3.0])
    assert mask_above(ratio, cap=3.0).tolist() == pytest.approx([2.0, 0.5, 0.0])
    assert mask_above(torch.tensor([5.0]), cap=5.0).item() == 5.0


def test_weighted_tokens_give_the_trained_distribution_its_expectation() -> None:
    """Sampled from q, weighted by p / q: the gradient is the one that samples from p would give on
    average.
    """
    logits_p = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    q, gain = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([1.0, -2.0, 0.7])
    logprobs = logits_p.log_softmax(-1)
    weight = importance_ratio(logprobs, q.log())
    losses = [
        policy_loss(
            logprobs[None, token : token + 1],
            logprobs[None, token : token + 1].detach(),
            gain[token : token + 1],
            torch.ones(1, 1),
            0.2,
            1,
            torch.ones(1),
            weight[None, token : token + 1],
        )[0]
        for token in range(3)
    ]
    found = torch.autograd.grad(
        sum(share * loss for share, loss in zip(q, losses, strict=True)), logits_p
    )[0]
    expected = torch.autograd.grad(-(logits_p.softmax(-1) * gain).sum(), logits_p)[0]
    assert (found - expected).abs().max() < 1e-6


def test_rewards_that_do_not_form_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 4"):
        group_means(torch.ones(6), 4)
