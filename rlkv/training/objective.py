"""The objective of gate training as pure functions of tensors.

Maximised (arXiv 2510.08525)::

    mean_i [ mean_t min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) ] - beta'(rbar, tau) * mean(alpha)

Shapes: N samples in groups of G neighbours (the G samples of one prompt), T completion tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0; the value that trl uses


def group_means(rewards_N: Tensor, group_size: int) -> Tensor:
    """``rbar``, each sample's group mean: ``[N]``; ``ValueError`` if N is not a multiple of ``group_size``."""
    if rewards_N.dim() != 1 or len(rewards_N) % group_size:
        raise ValueError(f"rewards of shape {list(rewards_N.shape)} do not form groups of {group_size}")
    return rewards_N.view(-1, group_size).mean(1).repeat_interleave(group_size)


def adaptive_weight(mean_reward: Tensor, beta: float, tau: float) -> Tensor:
    """``beta'(rbar, tau) = 1[rbar > tau] * beta * (exp(rbar) - 1)``, elementwise.

    ``rbar`` is the plain mean of 0/1 rewards, whatever scaling the policy loss uses.
    """
    return torch.where(mean_reward > tau, beta * torch.expm1(mean_reward), torch.zeros_like(mean_reward))


def constant_weight(mean_reward: Tensor, beta: float) -> Tensor:
    """``beta * (e - 1)`` whatever the reward: the ablation without adaptive weighting (arXiv 2510.08525, figure 8)."""
    return torch.full_like(mean_reward, beta * math.expm1(1.0))


def penalty(weight_N: Tensor, alphas: Tensor) -> Tensor:
    """``mean_i beta'_i * mean(alpha)``, the L1 penalty (gates are never negative): a scalar."""
    return weight_N.mean() * alphas.float().mean()


def advantages(rewards_N: Tensor, group_size: int, normalization: str = "group") -> Tensor:
    """``A_i = (r_i - mean) / (std + 1e-4)``, std with N - 1; 0 throughout a group (batch) of equal rewards.

    Args:
        normalization: ``group``: mean and std of the sample's own group (the paper's formula); ``batch``: of all
            samples of the step (the published run).
    """
    size = group_size if normalization == "group" else len(rewards_N)
    means = group_means(rewards_N, size)
    stds = rewards_N.view(-1, size).std(1).repeat_interleave(size)
    return (rewards_N - means) / (stds + EPSILON)


def truncated_ratio(trainer_NT: Tensor, rollout_NT: Tensor, cap: float) -> Tensor:
    """``w_it = min(p_trainer(token) / p_rollout(token), cap)``, importance weights of an engine that rounds otherwise.

    Exactly 1 where the engines agree.

    Args:
        trainer_NT: log-probabilities of the sampled tokens under the trainer's model and the gates that sampled them.
        rollout_NT: those of the engine that sampled them.
        cap: largest weight, at least 1.
    """
    return torch.exp(trainer_NT.detach() - rollout_NT).clamp(max=cap)


def policy_loss(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_N: Tensor,
    mask_NT: Tensor,
    clip: float,
    num_samples: int,
    weight_NT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``-1/num_samples * sum_i mean_t w_it min(rho_it A_i, clip(rho_it, 1 - clip, 1 + clip) A_i)``.

    Args:
        logprobs_NT: log-probabilities of the sampled tokens under the current gates; the gradient flows here.
        old_logprobs_NT: under the gates that sampled them, without gradient; ``rho = exp(logprobs - old)``.
        mask_NT: 1 for the completion's tokens, 0 for padding.
        num_samples: what the sum is divided by; more than N where samples of advantage 0 were left out.
        weight_NT: ``w`` of :func:`truncated_ratio`, without gradient; None: 1.

    Returns:
        The loss to minimise (a scalar), and the number of tokens whose ratio was clipped.
    """
    ratio = torch.exp(logprobs_NT - old_logprobs_NT)
    advantage = advantages_N[:, None]
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    objective = objective if weight_NT is None else objective * weight_NT
    per_sample = (objective * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1)
    outside = ((ratio < 1 - clip) & (advantage < 0)) | ((ratio > 1 + clip) & (advantage > 0))
    return -per_sample.sum() / num_samples, (outside * mask_NT).sum().detach()
