"""The recipes against plain renderings that walk over every token in float64, and in whole training
runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.gates.head_gates import HeadGates
from rlkv.rollout.hf import GatedHFEngine
from rlkv.training import objective
from rlkv.training.objective import RECIPES, Targets
from rlkv.utils.files import read_log
from tests.helpers import random_run

GROUP, SAMPLES, WIDTH, CLIP, BETA, TAU = 4, 16, 7, 0.4, 0.02, 0.5
RANKS, MICRO_BATCHES = 2, 2  # four of four samples each


class Step:
    """Samples of one optimizer step: lengths, rewards, and log-probabilities of three sources
    (float64).
    """

    def __init__(self, seed: int, solved: float = 0.6) -> None:
        draw = random.Random(seed)
        self.lengths = [draw.randint(1, WIDTH) for _ in range(SAMPLES)]
        self.rewards = [float(draw.random() < solved) for _ in range(SAMPLES)]
        generator = torch.Generator().manual_seed(seed)
        shape = SAMPLES, WIDTH
        self.old = -2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
        self.new = (
            self.old + torch.randn(shape, generator=generator, dtype=torch.float64) / 3
        ).requires_grad_()
        self.rollout = self.old - torch.randn(
            shape, generator=generator, dtype=torch.float64
        )  # ratios up to 10

    @property
    def mask(self) -> torch.Tensor:
        return (torch.arange(WIDTH) < torch.tensor(self.lengths)[:, None]).int()

    def targets(self, recipe: str) -> Targets:
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        return RECIPES[recipe].targets(rewards, torch.tensor(self.lengths), GROUP)


def split_loss(step: Step, recipe: str) -> torch.Tensor:
    """The policy loss as the trainer has it: shuffled micro-batches, their mean, and the mean over
    processes.
    """
    chosen, targets = RECIPES[recipe], step.targets(recipe)
    order = random.Random(5).sample(range(SAMPLES), SAMPLES)
    weight = chosen.limit(objective.importance_ratio(step.old, step.rollout), chosen.importance_cap)
    losses = []
    for part in torch.tensor(order).split(SAMPLES // (RANKS * MICRO_BATCHES)):
        losses.append(
            objective.policy_loss(
                step.new[part],
                step.old[part],
                targets.advantages[part],
                step.mask[part],
                CLIP,
                len(part),
                targets.divisor[part],
                weight[part],
            )[0]
        )
    return torch.stack(losses).mean()


def published_tokens(step: Step) -> tuple[float, list[list[float]], int]:
    """Loss, gradient and the number of masked tokens as the published run has them, token by token.

    Rewards are (r - 0.5) * 10, normalised over all tokens with std of N - 1 and 1e-5; a token
    counts p / q, or nothing where that is above 5; the sum is divided by the number of all tokens,
    the masked ones among them.
    """
    scaled = [(r - 0.5) * 10 for r in step.rewards]
    flat = [
        reward for reward, length in zip(scaled, step.lengths, strict=True) for _ in range(length)
    ]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    total, masked = 0.0, 0
    gradient = [[0.0] * WIDTH for _ in range(SAMPLES)]
    for i in range(SAMPLES):
        advantage = (scaled[i] - mean) / (std + 1e-5)
        for t in range(step.lengths[i]):
            new, old, rollout = (
                values[i, t].item() for values in (step.new, step.old, step.rollout)
            )
            weight = math.exp(old - rollout)
            if weight > 5:
                masked += 1
                continue
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 0.6), 1.4)
            total -= weight * min(ratio * advantage, clipped * advantage)
            if ratio * advantage <= clipped * advantage:
                gradient[i][t] = -weight * ratio * advantage / len(flat)
    return total / len(flat), gradient, masked


@pytest.mark.parametrize("seed", range(3))
def test_the_published_loss_is_the_mean_over_all_tokens_of_the_step(seed: int) -> None:
    step = Step(seed)
    expected, gradient, masked = published_tokens(step)
    assert masked > 0
    found = split_loss(step, "published")
    assert found.item() == pytest.approx(expected, rel=1e-6)
    found.backward()
    assert step.new.grad is not None
    difference = (step.new.grad - torch.tensor(gradient, dtype=torch.float64)).abs().max()
    assert difference < 1e-6 * torch.tensor(gradient).abs().max()


def test_the_papers_loss_is_a_mean_of_means() -> None:
    step = Step(0)
    total = 0.0
    for i, length in enumerate(step.lengths):
        group = step.rewards[i // GROUP * GROUP : i // GROUP * GROUP + GROUP]
        mean = sum(group) / GROUP
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (GROUP - 1))
        advantage = (step.rewards[i] - mean) / (std + 1e-4)
        for t in range(length):
            new, old, rollout = (
                values[i, t].item() for values in (step.new, step.old, step.rollout)
            )
            ratio, weight = math.exp(new - old), min(math.exp(old - rollout), 3)
            total -= (
                weight
                * min(ratio * advantage, min(max(ratio, 0.6), 1.4) * advantage)
                / length
                / SAMPLES
            )
    assert split_loss(step, "paper").item() == pytest.approx(total, rel=1e-6)


def test_the_published_penalty_takes_the_mean_reward_of_the_batch() -> None:
    step = Step(1)
    mean = sum(step.rewards) / SAMPLES
    assert TAU < mean < 1
    groups = [sum(step.rewards[i : i + GROUP]) / GROUP for i in range(0, SAMPLES, GROUP)]
    assert min(groups) <= TAU  # of which the paper penalises nothing
    weights = objective.adaptive_weight(step.targets("published").mean_reward, BETA, TAU)
    assert weights.tolist() == pytest.approx([BETA * (math.exp(mean) - 1)] * SAMPLES, rel=1e-6)
    weights = objective.adaptive_weight(step.targets("paper").mean_reward, BETA, TAU)
    expected = [BETA * (math.exp(mean) - 1) * (mean > TAU) for mean in groups]
    assert weights.view(-1, GROUP)[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("solved", [0.0, 1.0])
def test_equal_rewards_teach_nothing(recipe: str, solved: float) -> None:
    assert Step(2, solved).targets(recipe).advantages.tolist() == [0.0] * SAMPLES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_completion_without_tokens_does_not_divide_by_zero(recipe: str) -> None:
    targets = RECIPES[recipe].targets(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 2)
    assert (targets.divisor >= 1).all()
    assert targets.advantages.isfinite().all()


def test_a_published_run_does_not_depend_on_its_micro_batches(tmp_path: Path) -> None:
    options = ["--recipe", "published", "--learning_rate", "0.2", "--per_device_train_batch_size"]
    whole = random_run.run(tmp_path / "whole", [*options, "16"])
    parts = random_run.run(tmp_path / "parts", [*options, "4"])
    assert (whole.alpha < 0.9).any()
    assert (whole.alpha - parts.alpha).abs().max() < 1e-5
    for record in read_log(tmp_path / "parts" / "log.jsonl"):
        mean = record["reward/mean"]
        expected = 0.05 * math.expm1(mean) if mean > 0.4 else 0.0
        assert record["penalty/beta_prime"] == pytest.approx(expected, rel=1e-6)
        assert record["policy/loss"] == pytest.approx(
            0, abs=1e-6
        )  # advantages whose mean over tokens is 0


class OffEngine(GatedHFEngine):
    """Says of the fourth and eleventh token that they were less likely, by the factor
    exp(``shift``).
    """

    shift = 0.0

    def sample(self, *args: Any) -> Iterator[Any]:
        for index, sample in super().sample(*args):
            logprobs = [
                value - self.shift * (t % 7 == 3) for t, value in enumerate(sample.logprobs)
            ]
            yield index, replace(sample, logprobs=logprobs)


def run_off(folder: Path, shift: float, recipe: str, monkeypatch: pytest.MonkeyPatch) -> HeadGates:
    model, tokenizer = random_run.make_policy()
    engine = OffEngine(model, LocalSizes(2, 6), tokenizer.pad_token_id)
    engine.shift = shift
    monkeypatch.setattr("rlkv.training.grpo.open_engine", lambda *args: nullcontext(engine))
    options = ["--rollout", "vllm-server", "--max_steps", "2", "--learning_rate", "0.2"]
    return random_run.run(folder, [*options, "--recipe", recipe])


def test_tokens_above_the_cap_are_left_out_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of e^1.7 = 5.5 and e^2 = 7.4 are above 5, e^1.5 = 4.5 is not."""
    found = {s: run_off(tmp_path / str(s), s, "published", monkeypatch) for s in (1.5, 1.7, 2.0)}
    shares = {
        s: read_log(tmp_path / str(s) / "log.jsonl")[0]["rollout/truncated_share"] for s in found
    }
    assert shares[1.5] == 0
    assert 0.05 < shares[1.7] == shares[2.0] < 0.25
    assert torch.equal(found[1.7].alpha, found[2.0].alpha)
    assert not torch.equal(found[1.5].alpha, found[2.0].alpha)
    paper = run_off(tmp_path / "paper", 2.0, "paper", monkeypatch)
    assert read_log(tmp_path / "paper" / "log.jsonl")[0]["rollout/truncated_share"] > 0
    assert not torch.equal(paper.alpha, found[2.0].alpha)
