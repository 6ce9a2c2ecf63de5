"""The two recipes of training: the paper's formulas, and what the published run computes.

``paper`` is arXiv 2510.08525.  ``published`` is the code and the configuration that the authors ran: AReaL, in
github.com/Kurt232/rlkv-areal-v0.3.4.post1 (areal/engine, examples/rlkv), less its staleness.  There rollouts are up to
two updates old; here every rollout is sampled under the gates that it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rlkv.training import objective


class Targets(NamedTuple):
    """What the loss needs to know of every sample of a rollout over all processes: three tensors ``[N]``.

    Attributes:
        advantages: ``A_i``.
        mean_reward: ``rbar`` of the penalty.
        divisor: ``d_i`` of :func:`rlkv.training.objective.policy_loss`.
    """

    advantages: Tensor
    mean_reward: Tensor
    divisor: Tensor


@dataclass(frozen=True)
class Recipe:
    """What the recipes differ in.

    Attributes:
        targets: from the rewards ``[N]``, completion tokens ``[N]`` and group size of a rollout.
        limit: importance weights from their ratio and ``importance_cap``.
        importance_cap, epsilon: defaults of the options.
    """

    targets: Callable[[Tensor, Tensor, int], Targets]
    limit: Callable[[Tensor, float], Tensor]
    importance_cap: float
    epsilon: float


def paper_targets(rewards_N: Tensor, tokens_N: Tensor, group_size: int) -> Targets:
    """Advantages and ``rbar`` of a sample's group; the mean over its tokens, then over samples."""
    return Targets(
        objective.advantages(rewards_N, group_size),
        objective.group_means(rewards_N, group_size),
        tokens_N.clamp(min=1),
    )


def published_targets(rewards_N: Tensor, tokens_N: Tensor, group_size: int) -> Targets:
    """Advantages over the tokens of the batch, ``rbar`` of the batch, the mean over all of its tokens.

    The run computes ``rbar`` in every micro-batch, but what splits its batches (areal/utils/data.py,
    ``split_padded_tensor_dict_into_mb_list``) hands each of them the rewards of all samples.
    """
    return Targets(
        objective.token_advantages(rewards_N, tokens_N),
        objective.group_means(rewards_N, len(rewards_N)),
        tokens_N.float().mean().clamp(min=1).expand(len(tokens_N)),
    )


RECIPES = {
    "paper": Recipe(paper_targets, objective.truncate, importance_cap=3.0, epsilon=0.2),
    "published": Recipe(published_targets, objective.mask_above, importance_cap=5.0, epsilon=0.4),
}
