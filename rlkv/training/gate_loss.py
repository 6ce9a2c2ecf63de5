"""The loss of gate training: the policy objective of the samples that teach, the L1 penalty, and what is logged."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from rlkv.training import objective
from rlkv.training.config import RLKVSettings
from rlkv.training.engine_rollout import check_same_model
from rlkv.training.logprobs import completion_logprobs
from rlkv.training.resumable import ResumableGRPOTrainer


class GateLossTrainer(ResumableGRPOTrainer):
    """Maximises ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`).

    Inputs are trl's, with ``group_mean``, the mean reward of each sample's group.
    """

    settings: RLKVSettings
    gates: list[nn.Parameter]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As trl, which measures the wall-clock time of the same span."""
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        self._seconds["cpu"] += time.process_time() - started
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        def score(ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            with self.accelerator.autocast():
                outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            return outputs.log_probs, outputs.entropy

        # DDP synchronises at every forward: there all processes make exactly one
        alone = self.accelerator.num_processes == 1
        rows = self.settings.forward_rows if alone else len(input_ids)
        return *completion_logprobs(score, input_ids, attention_mask, logits_to_keep, rows), None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        samples = len(inputs["advantages"])
        accumulated = self.current_gradient_accumulation_steps
        weight = self._penalty_weight(inputs["group_mean"])
        l1 = objective.penalty(weight, torch.cat([gate.view(-1) for gate in self.gates]))
        policy, clipped = self._policy_loss(model, inputs, samples)
        tokens = inputs["completion_mask"].sum()
        counts = self.accelerator.reduce(torch.stack([clipped, tokens.to(clipped)]), reduction="sum")
        for name, value in (("penalty/beta_prime", weight.mean()), ("penalty/value", l1), ("policy/loss", policy)):
            self._note(name, self.accelerator.gather(value.detach()).mean())
        self._note("policy/clip_share", counts[0] / counts[1].clamp(min=1))
        return (policy + l1) / accumulated

    def _penalty_weight(self, group_mean: Tensor) -> Tensor:
        beta = self.settings.l1_beta
        if self.settings.adaptive:
            return objective.adaptive_weight(group_mean, beta, self.settings.tau)
        return objective.constant_weight(group_mean, beta)

    def _policy_loss(self, model: Any, inputs: dict[str, Any], samples: int) -> objective.PolicyLoss:
        """Samples of advantage 0 (groups without spread) have no gradient: their forward and backward are left out."""
        rows = inputs["advantages"].nonzero()[:, 0]
        idle = len(rows) == 0
        if idle:  # one row all the same: it is compared, and under DDP every process takes part in the backward
            rows = torch.zeros(1, dtype=torch.int64, device=rows.device)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[rows]
        completion_mask = inputs["completion_mask"][rows]
        mask = torch.cat([inputs["prompt_mask"][rows], completion_mask], dim=1)
        no_loss = idle and self.accelerator.num_processes == 1
        with torch.set_grad_enabled(not no_loss):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, completion_mask.shape[1])
        old = inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old[rows]
        weight = self._importance(old, inputs["sampling_per_token_logps"][rows], completion_mask)
        if no_loss:
            zero = torch.zeros((), device=rows.device)
            return objective.PolicyLoss(zero, zero)
        return objective.policy_loss(
            logprobs,
            old,
            inputs["advantages"][rows],
            completion_mask,
            clip=self.epsilon_low,
            num_samples=samples,
            weight_NT=weight,
        )

    def _importance(self, old_NT: Tensor, rollout_NT: Tensor, mask_NT: Tensor) -> Tensor | None:
        """Note how far the rollout's log-probabilities are from the trainer's; the weights that correct for it.

        None where the trainer's own model sampled: it differs by rounding alone.
        """
        cap = self.settings.importance_cap
        difference = (old_NT - rollout_NT).abs() * mask_NT
        corrects = self.settings.rollout != "hf" and cap > 0
        weight = objective.truncated_ratio(old_NT, rollout_NT, cap) if corrects else None
        truncated = torch.zeros_like(mask_NT) if weight is None else (weight >= cap) * mask_NT
        sums = torch.stack([part.sum().float() for part in (difference, truncated, mask_NT)])
        sums = self.accelerator.reduce(sums, reduction="sum")
        mean, share = (sums[:2] / sums[2].clamp(min=1)).tolist()
        self._note("rollout/logprob_diff_mean", mean)
        self._note("rollout/logprob_diff_max", self.accelerator.gather(difference.max()).max())
        self._note("rollout/truncated_share", share)
        check_same_model(mean)
        return weight
