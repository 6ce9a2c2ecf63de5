"""The objective of gate training as pure functions of tensors.

Maximised (arXiv 2510.08525)::

    mean_i [ mean_t min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) ]
        - beta'(rbar, tau) * mean(alpha)

The published run averages, normalises and weighs otherwise: the recipe ``published``.

Shapes: N samples in groups of G neighbours (the G samples of one prompt), T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0; the value that trl uses
# the published run has 1e-5 for rewards of (r - 0.5) * 10: so neither offset nor factor is left
PUBLISHED_EPSILON = 1e-6

# (input_ids, attention_mask, labels) -> log-probabilities [rows, tokens - 1]; labels are -100 where
# none is wanted
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def group_means(rewards_N: Tensor, group_size: int) -> Tensor:
    """Return ``rbar``, each sample's group mean: ``[N]``, of whole groups."""
    return rewards_N.view(-1, group_size).mean(1).repeat_interleave(group_size)


def penalty_weight(mean_reward: Tensor, beta: float, tau: float | None) -> Tensor:
    """Return ``beta'(rbar, tau) = 1[rbar > tau] * beta * (exp(rbar) - 1)``, elementwise.

    ``rbar`` is the plain mean of 0/1 rewards, whatever scaling the policy loss uses.  Without
    ``tau`` it is ``beta * (e - 1)`` whatever the reward: the ablation without adaptive weighting
    (arXiv 2510.08525, figure 8).
    """
    if tau is None:
        return torch.full_like(mean_reward, beta * math.expm1(1.0))
    return torch.where(mean_reward > tau, beta * torch.expm1(mean_reward), 0.0)


def penalty(weight_N: Tensor, alphas: Tensor) -> Tensor:
    """Return the L1 penalty ``mean_i beta'_i * mean(alpha)``; gates are never negative."""
    return weight_N.mean() * alphas.float().mean()


def advantages(rewards_N: Tensor, group_size: int) -> Tensor:
    """Return ``A_i = (r_i - mean) / (std + 1e-4)`` over the sample's group, std with N - 1.

    It is 0 in a group of equal rewards.
    """
    stds = rewards_N.view(-1, group_size).std(1).repeat_interleave(group_size)
    return (rewards_N - group_means(rewards_N, group_size)) / (stds + EPSILON)


def token_advantages(rewards_N: Tensor, tokens_N: Tensor) -> Tensor:
    """Return ``A_i = (r_i - m) / (s + 1e-6)``, m and s over all tokens of the batch.

    ``m = sum_i T_i r_i / T`` and ``s^2 = sum_i T_i (r_i - m)^2 / (T - 1)`` with ``T = sum_i T_i``:
    long samples count for more, as in the published run (areal/utils/data.py, ``Normalization``).
    It is 0 throughout a batch of equal rewards.

    Args:
        tokens_N: ``T_i``, the number of completion tokens of each sample.
    """
    rewards, tokens = rewards_N.double(), tokens_N.double()
    total = tokens.sum()
    centred = rewards - (tokens * rewards).sum() / total.clamp(min=1)
    std = ((tokens * centred**2).sum() / (total - 1).clamp(min=1)).sqrt()
    return (centred / (std + PUBLISHED_EPSILON)).to(rewards_N.dtype)


def completion_logprobs(
    score: Score, ids_NT: Tensor, mask_NT: Tensor, num_completion: int, max_rows: int
) -> Tensor:
    """Return log-probabilities of the last ``num_completion`` columns: ``[N, num_completion]``.

    They are 0 for padding.  The padding on the left is moved behind the tokens: without it plain
    causal attention needs no mask, which would cost ~64 MB per row at 8k tokens.

    Args:
        ids_NT, mask_NT: prompts padded on the left, completions on the right.
        max_rows: rows of one call of ``score``; rows of similar length share a call.
    """
    width = ids_NT.shape[1]
    offset_N = mask_NT.int().argmax(-1)  # padding on the left
    column_NT = (torch.arange(width, device=ids_NT.device) + offset_N[:, None]) % width
    shifted = ids_NT.gather(1, column_NT)
    length_N = mask_NT.sum(-1)
    start_N = width - num_completion - offset_N  # of the completion, after the shift
    logprobs = torch.zeros(len(ids_NT), num_completion, device=ids_NT.device)
    for rows in length_N.argsort(descending=True).split(max_rows):
        column = torch.arange(int(length_N[rows].max()), device=ids_NT.device)
        real = column < length_N[rows, None]
        ids = torch.where(real, shifted[rows, : len(column)], shifted.new_zeros(()))
        wanted = real & (column >= start_N[rows, None])
        found = score(ids, real.to(mask_NT.dtype), ids.masked_fill(~wanted, -100))
        # entry k of a score belongs to column k + 1 of the shifted row
        target = column[1:] - start_N[rows, None]
        keep = wanted[:, 1:]
        place = (rows[:, None].expand_as(target)[keep], target[keep])
        logprobs = logprobs.index_put(place, found.to(logprobs.dtype)[keep])
    return logprobs


def importance_ratio(trainer_NT: Tensor, rollout_NT: Tensor) -> Tensor:
    """Return ``w_it = p_trainer(token) / p_rollout(token)``, for an engine that rounds otherwise.

    It is exactly 1 where both agree.

    Args:
        trainer_NT: log-probabilities of the sampled tokens under the trainer's model and the gates
            that sampled them.
        rollout_NT: those of the engine that sampled them.
    """
    return torch.exp(trainer_NT.detach() - rollout_NT)


def truncate(ratio_NT: Tensor, cap: float) -> Tensor:
    """Return ``min(w, cap)``, cap at least 1: truncated importance weights."""
    return ratio_NT.clamp(max=cap)


def mask_above(ratio_NT: Tensor, cap: float) -> Tensor:
    """Return ``w`` where ``w <= cap``, else 0.

    Such tokens are left out of the loss, not of the number that it is divided by.
    """
    return torch.where(ratio_NT > cap, 0.0, ratio_NT)


def policy_loss(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_N: Tensor,
    mask_NT: Tensor,
    clip: float,
    num_samples: float | Tensor,
    divisor_N: Tensor,
    weight_NT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped policy loss and the number of tokens whose ratio was clipped.

    ``-1/num_samples * sum_i 1/d_i sum_t w_it min(rho_it A_i, clip(rho_it, 1 - clip, 1 + clip)
    A_i)``, a scalar to minimise.

    Args:
        logprobs_NT: log-probabilities of the sampled tokens under the current gates; the gradient
            flows here.
        old_logprobs_NT: under the gates that sampled them, without gradient; ``rho = exp(logprobs -
            old)``.
        mask_NT: 1 for the completion's tokens, 0 for padding.
        num_samples: what the sum is divided by: the samples of the step over its micro-batches on
            all processes, where those of advantage 0 were left out.
        divisor_N: ``d_i``: the sample's own tokens for a mean over tokens, then over samples; the
            mean of all samples of the rollout for a mean over all its tokens, however its samples
            are split over micro-batches and processes.
        weight_NT: ``w`` of :func:`truncate` or :func:`mask_above`, without gradient; None: 1.
    """
    ratio = torch.exp(logprobs_NT - old_logprobs_NT)
    advantage = advantages_N[:, None]
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    if weight_NT is not None:
        objective = objective * weight_NT
    per_sample = (objective * mask_NT).sum(1) / divisor_N
    outside = ((ratio < 1 - clip) & (advantage < 0)) | ((ratio > 1 + clip) & (advantage > 0))
    return -per_sample.sum() / num_samples, (outside * mask_NT).sum().detach()


@dataclass(frozen=True)
class Recipe:
    """The differences between the recipes.

    Attributes:
        targets: of every sample of a rollout over all processes, from rewards ``[N]``, completion
            tokens ``[N]`` and group size: ``advantages`` ``A_i``, ``mean_reward`` ``rbar`` of the
            penalty, and ``divisor`` ``d_i`` of :func:`policy_loss`, all ``[N]``.
        limit: importance weights from their ratio and ``importance_cap``.
        importance_cap, epsilon: defaults of the options.
    """

    targets: Callable[[Tensor, Tensor, int], dict[str, Tensor]]
    limit: Callable[[Tensor, float], Tensor]
    importance_cap: float
    epsilon: float


def paper_targets(rewards_N: Tensor, tokens_N: Tensor, group_size: int) -> dict[str, Tensor]:
    """Take advantages and ``rbar`` of a group; average over tokens, then over samples."""
    return {
        "advantages": advantages(rewards_N, group_size),
        "mean_reward": group_means(rewards_N, group_size),
        "divisor": tokens_N.clamp(min=1),
    }


def published_targets(rewards_N: Tensor, tokens_N: Tensor, group_size: int) -> dict[str, Tensor]:
    """Take advantages and ``rbar`` of the batch; average over all of its tokens.

    The run computes ``rbar`` in every micro-batch, but what splits its batches
    (areal/utils/data.py, ``split_padded_tensor_dict_into_mb_list``) hands each of them the rewards
    of all samples.
    """
    return {
        "advantages": token_advantages(rewards_N, tokens_N),
        "mean_reward": group_means(rewards_N, len(rewards_N)),
        "divisor": tokens_N.float().mean().clamp(min=1).expand(len(tokens_N)),
    }


RECIPES = {
    "paper": Recipe(paper_targets, truncate, importance_cap=3.0, epsilon=0.2),
    "published": Recipe(published_targets, mask_above, importance_cap=5.0, epsilon=0.4),
}
