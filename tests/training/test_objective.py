"""The objective against values by hand, and the recipes token by token in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlkv.training.objective import (
    RECIPES,
    group_means,
    importance_ratio,
    mask_above,
    penalty,
    penalty_weight,
    policy_loss,
    truncate,
)


def test_the_penalty_averages_groups_of_different_means() -> None:
    rewards = torch.tensor([1.0] * 6 + [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    means = group_means(rewards, 4)
    assert means.tolist() == [1.0] * 4 + [0.5] * 4 + [0.75] * 4 + [0.25] * 4
    weights = penalty_weight(means, beta=0.02, tau=0.5)  # zero up to tau, exponential above
    assert weights[:4].equal(penalty_weight(means, beta=0.02, tau=None)[-4:])
    expected = 0.02 * (math.e - 1 + 0 + math.exp(0.75) - 1 + 0) / 4  # = 0.0141764
    alphas = torch.tensor([1.0, 0.5, 0.0, 0.3], requires_grad=True)
    value = penalty(weights, alphas)
    assert value.item() == pytest.approx(expected * 0.45, rel=1e-6)
    value.backward()
    assert alphas.grad.tolist() == pytest.approx([expected / 4] * 4, rel=1e-6)


def test_policy_loss_without_clipping_is_the_mean_advantage() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.25, 0.1], [0.5, 0.5, 0.5]])).requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    given = (logprobs, logprobs.detach(), torch.tensor([2.0, -1.0]), mask, 0.2, 4, mask.sum(1))
    loss, clipped = policy_loss(*given)
    assert loss.item() == pytest.approx(-(2.0 - 1.0) / 4)
    assert clipped.item() == 0
    loss.backward()
    expected = [[-2 / 2 / 4, -2 / 2 / 4, 0.0], [1 / 3 / 4] * 3]
    assert logprobs.grad.tolist() == [pytest.approx(row) for row in expected]
    # engines that agree weigh every token by 1
    weight = importance_ratio(logprobs, logprobs.detach().clone())
    assert torch.equal(weight, torch.ones(2, 3))
    assert not weight.requires_grad
    assert policy_loss(*given, weight_NT=weight)[0] == loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [(1.5, 1.0, 1.2, 1), (1.5, -1.0, -1.5, 0), (0.5, 1.0, 0.5, 0), (0.5, -1.0, -0.8, 1)],
)
def test_policy_loss_clips_on_the_pessimistic_side(
    ratio: float, advantage: float, expected: float, clipped: int
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, found = policy_loss(logprobs, 0 * one, advantage * one[0], one, 0.2, 1, one[0])
    assert loss.item() == pytest.approx(-expected)
    assert found.item() == clipped
    loss.backward()
    assert (logprobs.grad.item() == 0) == bool(clipped)


def test_importance_weights_above_the_cap_are_truncated_or_masked() -> None:
    ratio = torch.tensor([2.0, 0.5, 9.0, 3.0])
    assert truncate(ratio, cap=3.0).tolist() == [2.0, 0.5, 3.0, 3.0]
    assert mask_above(ratio, cap=3.0).tolist() == [2.0, 0.5, 0.0, 3.0]


# --- recipes, against plain renderings that walk over every token in float64

GROUP = 4
SAMPLES = 16
WIDTH = 7
CLIP = 0.4


class Step:
    """Samples of one optimizer step: lengths, rewards, and log-probabilities of three sources."""

    def __init__(self, seed: int, solved: float = 0.6) -> None:
        draw = random.Random(seed)
        self.lengths = [draw.randint(1, WIDTH) for _ in range(SAMPLES)]
        self.rewards = [float(draw.random() < solved) for _ in range(SAMPLES)]
        torch.manual_seed(seed)
        shape = (SAMPLES, WIDTH)
        self.old = -2 * torch.rand(shape, dtype=torch.float64) - 0.1
        self.new = (self.old + torch.randn(shape, dtype=torch.float64) / 3).requires_grad_()
        self.rollout = self.old - torch.randn(shape, dtype=torch.float64)  # ratios up to 10

    def targets(self, recipe: str) -> dict[str, torch.Tensor]:
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        return RECIPES[recipe].targets(rewards, torch.tensor(self.lengths), GROUP)

    def loss(self, recipe: str) -> torch.Tensor:
        """Return the loss as the trainer has it: the mean over shuffled micro-batches."""
        chosen, targets = RECIPES[recipe], self.targets(recipe)
        mask = (torch.arange(WIDTH) < torch.tensor(self.lengths)[:, None]).int()
        ratio = importance_ratio(self.old, self.rollout)
        weight = chosen.limit(ratio, chosen.importance_cap)
        losses = []
        for part in torch.randperm(SAMPLES).split(4):
            given = (self.new[part], self.old[part], targets["advantages"][part], mask[part], CLIP)
            divisor = targets["divisor"][part]
            losses.append(policy_loss(*given, len(part), divisor, weight[part])[0])
        return torch.stack(losses).mean()

    def token(self, i: int, t: int, advantage: float) -> tuple[float, float, float, float]:
        """Return a token's importance weight, ratio, plain and clipped objective."""
        new, old, rollout = (x[i, t].item() for x in (self.new, self.old, self.rollout))
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        return math.exp(old - rollout), ratio, ratio * advantage, clipped * advantage


def test_the_papers_loss_is_a_mean_of_means() -> None:
    step, total = Step(0), 0.0
    for i, length in enumerate(step.lengths):
        group = step.rewards[i // GROUP * GROUP : i // GROUP * GROUP + GROUP]
        mean = sum(group) / GROUP
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (GROUP - 1))
        for t in range(length):
            weight, _, plain, clipped = step.token(i, t, (step.rewards[i] - mean) / (std + 1e-4))
            total -= min(weight, 3) * min(plain, clipped) / length / SAMPLES
    assert step.loss("paper").item() == pytest.approx(total, rel=1e-6)


def test_the_published_loss_is_the_mean_over_all_tokens_of_the_step() -> None:
    """Masked tokens, those whose p / q is above 5, are in the number that the sum is divided by."""
    step = Step(0)
    flat: list[float] = []
    for reward, length in zip(step.rewards, step.lengths, strict=True):
        flat += [(reward - 0.5) * 10] * length
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    total, masked, gradient = 0.0, 0, torch.zeros_like(step.old)
    for i in range(SAMPLES):
        advantage = ((step.rewards[i] - 0.5) * 10 - mean) / (std + 1e-5)
        for t in range(step.lengths[i]):
            weight, ratio, plain, clipped = step.token(i, t, advantage)
            if weight > 5:
                masked += 1
                continue
            total -= weight * min(plain, clipped) / len(flat)
            if plain <= clipped:
                gradient[i, t] = -weight * ratio * advantage / len(flat)
    found = step.loss("published")
    assert masked > 0
    assert found.item() == pytest.approx(total, rel=1e-6)
    found.backward()
    assert (step.new.grad - gradient).abs().max() < 1e-6 * gradient.abs().max()


def test_the_published_penalty_takes_the_mean_reward_of_the_batch() -> None:
    step = Step(1)
    groups = [sum(step.rewards[i : i + GROUP]) / GROUP for i in range(0, SAMPLES, GROUP)]
    expected = torch.tensor(groups, dtype=torch.float64)
    assert step.targets("paper")["mean_reward"].view(-1, GROUP)[:, 0].equal(expected)
    assert step.targets("published")["mean_reward"].tolist() == pytest.approx(
        [expected.mean().item()] * 16
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_rewards_and_empty_completions_are_harmless(recipe: str) -> None:
    for solved in (0.0, 1.0):
        assert Step(2, solved).targets(recipe)["advantages"].tolist() == [0.0] * SAMPLES
    targets = RECIPES[recipe].targets(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 2)
    assert (targets["divisor"] >= 1).all()
    assert targets["advantages"].isfinite().all()
    assert targets["advantages"].dtype == torch.float32
