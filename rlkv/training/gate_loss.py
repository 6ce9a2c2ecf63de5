"""The loss of gate training: the policy objective of the samples that teach, the L1 penalty, and what is logged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlkv.training import objective
from rlkv.training.config import RLKVSettings
from rlkv.training.recipes import RECIPES
from rlkv.training.resumable import ResumableGRPOTrainer

# mean |difference| of log-probabilities above which two engines hold different models; rounding in bf16 gives ~0.02
SAME_MODEL = 0.5
# (input_ids, attention_mask, labels) -> log-probabilities [rows, tokens - 1]; labels are -100 where none is wanted
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def shift_left(ids_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Every row's left padding moved behind its tokens: ``(ids, offset)``, offset int64 ``[N]``."""
    offset_N = mask_NT.int().argmax(-1)
    width = ids_NT.shape[1]
    index = (torch.arange(width, device=ids_NT.device) + offset_N[:, None]) % width
    return ids_NT.gather(1, index), offset_N


def completion_logprobs(score: Score, ids_NT: Tensor, mask_NT: Tensor, num_completion: int, max_rows: int) -> Tensor:
    """Log-probabilities of the last ``num_completion`` columns, 0 for padding: ``[N, num_completion]``.

    Without padding on the left plain causal attention needs no mask, which would cost ~64 MB per row at 8k tokens.

    Args:
        ids_NT, mask_NT: prompts padded on the left, completions on the right.
        max_rows: rows of one call of ``score``; rows of similar length share a call.
    """
    shifted, offset_N = shift_left(ids_NT, mask_NT)
    length_N = mask_NT.sum(-1)
    completion_start = ids_NT.shape[1] - num_completion - offset_N  # first column of the completion after the shift
    logprobs = torch.zeros(len(ids_NT), num_completion, device=ids_NT.device)
    for rows in length_N.argsort(descending=True).split(max_rows):
        column = torch.arange(int(length_N[rows].max()), device=ids_NT.device)
        real = column < length_N[rows, None]
        ids = torch.where(real, shifted[rows, : len(column)], shifted.new_zeros(()))
        wanted = real & (column >= completion_start[rows, None])
        found = score(ids, real.to(mask_NT.dtype), ids.masked_fill(~wanted, -100))
        # entry k of a score belongs to column k + 1 of the shifted row
        target = column[1:] - completion_start[rows, None]
        keep = wanted[:, 1:]
        place = (rows[:, None].expand_as(target)[keep], target[keep])
        logprobs = logprobs.index_put(place, found.to(logprobs.dtype)[keep])
    return logprobs


class GateLossTrainer(ResumableGRPOTrainer):
    """Maximises ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`).

    Inputs are trl's, with the :class:`~rlkv.training.recipes.Targets` of each sample.
    """

    settings: RLKVSettings
    gates: list[nn.Parameter]
    _inputs: dict[str, Any]  # of the last loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As trl, which measures the wall-clock time of the same span; gradients that are not finite are noted."""
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        rank = self.accelerator.process_index
        self.skip_nonfinite.look(loss, self.gates, self._inputs, self.state.global_step, rank)
        self._seconds["cpu"] += time.process_time() - started
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """The log-probabilities alone."""

        def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with self.accelerator.autocast():
                return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs

        # DDP synchronises at every forward: there all processes make exactly one
        alone = self.accelerator.num_processes == 1
        rows = self.settings.forward_rows if alone else len(input_ids)
        return completion_logprobs(score, input_ids, attention_mask, logits_to_keep, rows), None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        settings, mean_reward, self._inputs = self.settings, inputs["mean_reward"], inputs
        if settings.adaptive:
            weight = objective.adaptive_weight(mean_reward, settings.l1_beta, settings.tau)
        else:
            weight = objective.constant_weight(mean_reward, settings.l1_beta)
        l1 = objective.penalty(weight, torch.cat([gate.view(-1) for gate in self.gates]))
        policy, clipped = self._policy_loss(model, inputs)
        counts = torch.stack([clipped, inputs["completion_mask"].sum().to(clipped)])
        counts = self.accelerator.reduce(counts, reduction="sum")
        for name, value in (("penalty/beta_prime", weight.mean()), ("penalty/value", l1), ("policy/loss", policy)):
            self._note(name, self.accelerator.gather(value.detach()).mean())
        self._note("policy/clip_share", counts[0] / counts[1].clamp(min=1))
        return (policy + l1) / self.current_gradient_accumulation_steps

    def _policy_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Samples of advantage 0 (groups without spread) have no gradient: their forward and backward are skipped."""
        rows = inputs["advantages"].nonzero()[:, 0]
        idle = len(rows) == 0
        if idle:  # one row all the same: it is compared, and under DDP every process takes part in the backward
            rows = torch.zeros(1, dtype=torch.int64, device=rows.device)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[rows]
        completion_mask = inputs["completion_mask"][rows]
        mask = torch.cat([inputs["prompt_mask"][rows], completion_mask], dim=1)
        with torch.set_grad_enabled(not idle or self.accelerator.num_processes > 1):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, completion_mask.shape[1])
        old = logprobs.detach() if inputs.get("old_per_token_logps") is None else inputs["old_per_token_logps"][rows]
        weight = self._importance(old, inputs["sampling_per_token_logps"][rows], completion_mask)
        return objective.policy_loss(
            logprobs,
            old,
            inputs["advantages"][rows],
            completion_mask,
            clip=self.epsilon_low,
            num_samples=len(inputs["advantages"]),
            divisor_N=inputs["divisor"][rows],
            weight_NT=weight,
        )

    def _importance(self, old_NT: Tensor, rollout_NT: Tensor, mask_NT: Tensor) -> Tensor | None:
        """Note how far the rollout's log-probabilities are from the trainer's; the weights that correct for it.

        None where the trainer's own model sampled: it differs by rounding alone.
        """
        cap = self.args.importance_cap
        difference = (old_NT - rollout_NT).abs() * mask_NT
        corrects = self.settings.rollout != "hf" and cap > 0
        ratio = objective.importance_ratio(old_NT, rollout_NT)
        weight = RECIPES[self.args.recipe].limit(ratio, cap) if corrects else None
        above = (ratio > cap) * mask_NT * corrects
        sums = torch.stack([part.sum().float() for part in (difference, above, mask_NT)])
        sums = self.accelerator.reduce(sums, reduction="sum")
        mean, share = (sums[:2] / sums[2].clamp(min=1)).tolist()
        self._note("rollout/logprob_diff_mean", mean)
        self._note("rollout/logprob_diff_max", self.accelerator.gather(difference.max()).max())
        self._note("rollout/truncated_share", share)
        if mean > SAME_MODEL:
            raise ValueError(
                f"the log-probabilities of the rollouts differ from the trainer's by {mean:.2f} on average: the "
                "rollout engine must serve the same model with the same sink and window"
            )
        return weight
