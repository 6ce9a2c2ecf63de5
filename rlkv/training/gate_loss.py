"""The loss of gate training: the policy objective of the samples that teach, the L1 penalty, and what is logged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlkv.training import objective
from rlkv.training.config import RLKVSettings
from rlkv.training.logprobs import completion_logprobs
from rlkv.training.recipes import RECIPES
from rlkv.training.resumable import ResumableGRPOTrainer

# mean |difference| of log-probabilities above which two engines hold different models; rounding in bf16 gives ~0.02
SAME_MODEL = 0.5


class GateLossTrainer(ResumableGRPOTrainer):
    """Maximises ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`).

    Inputs are those of :func:`~rlkv.training.micro_batches.make_micro_batches`.
    """

    settings: RLKVSettings
    gates: list[nn.Parameter]
    release_weights: Callable[[], None]  # of a sharded base, after a backward pass
    _inputs: dict[str, Any]  # of the last loss
    _tally: dict[str, Tensor]  # of this process in this step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As trl, which measures the wall-clock time of the same span; gradients that are not finite are noted."""
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        self.release_weights()
        rank = self.accelerator.process_index
        self.skip_nonfinite.look(loss, self.gates, self._inputs, self.state.global_step, rank)
        if self.accelerator.sync_gradients:
            self._note_step()
        self._seconds["cpu"] += time.process_time() - started
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None, None]:
        """The log-probabilities alone; trl gives a ``batch_size`` for those of a whole rollout, without gradients."""

        def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with self.accelerator.autocast():
                return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs

        # DDP synchronises at every forward with gradients: there all processes make exactly one
        alone = self.accelerator.num_processes == 1
        rows = batch_size or (self.settings.forward_rows if alone else len(input_ids))
        return completion_logprobs(score, input_ids, attention_mask, logits_to_keep, rows), None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        settings, mean_reward, self._inputs = self.settings, inputs["mean_reward"], inputs
        if settings.adaptive:
            weight = objective.adaptive_weight(mean_reward, settings.l1_beta, settings.tau)
        else:
            weight = objective.constant_weight(mean_reward, settings.l1_beta)
        l1 = objective.penalty(weight, torch.cat([gate.view(-1) for gate in self.gates]))
        policy, clipped = self._policy_loss(model, inputs)
        self._note("penalty/beta_prime", weight.mean())
        self._note("penalty/value", l1.detach())
        self._add(policy=policy.detach(), clipped=clipped, tokens=inputs["num_tokens"])
        return (policy + l1) / self.current_gradient_accumulation_steps

    def _add(self, **values: Tensor) -> None:
        """To the tally of the step."""
        for name, value in values.items():
            self._tally[name] = self._tally.get(name, torch.zeros_like(value)) + value

    def _note_step(self) -> None:
        """What all processes measured in the micro-batches of a step: their one exchange."""
        tally, self._tally = self._tally, {}
        widths = [value.numel() for value in tally.values()]
        everyones = self.accelerator.gather(torch.cat([value.float().view(-1) for value in tally.values()])[None])
        total = dict(zip(tally, everyones.sum(0).split(widths), strict=True))
        largest = dict(zip(tally, everyones.amax(0).split(widths), strict=True))["largest"]
        compared, num_compared = total["compared"], total["compared"].sum().clamp(min=1)
        self._note("policy/loss", total["policy"] / (self.current_gradient_accumulation_steps * len(everyones)))
        self._note("policy/clip_share", total["clipped"] / total["tokens"].clamp(min=1))
        self._note("rollout/logprob_diff_mean", total["difference"].sum() / num_compared)
        self._note("rollout/logprob_diff_max", largest)
        self._note("rollout/truncated_share", total["above"] / num_compared)
        mean, source = (total["difference"] / compared.clamp(min=1)).max(0)
        if mean > SAME_MODEL:
            where = f" at {self.settings.servers[int(source)]}" if self.settings.rollout == "vllm-server" else ""
            raise ValueError(
                f"the log-probabilities of the rollouts differ from the trainer's by {mean:.2f} on average: the "
                f"rollout engine{where} must serve the same model with the same sink and window"
            )

    def _policy_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """And the number of clipped tokens; the row of an idle process has advantage 0 and is compared only."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        completion_mask = inputs["completion_mask"]
        mask = torch.cat([inputs["prompt_mask"], completion_mask], dim=1)
        # under DDP every process takes part in the backward
        with torch.set_grad_enabled(self.accelerator.num_processes > 1 or bool(inputs["advantages"].any())):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, completion_mask.shape[1])
        old = logprobs.detach() if inputs.get("old_per_token_logps") is None else inputs["old_per_token_logps"]
        weight = self._importance(old, inputs["sampling_per_token_logps"], completion_mask, inputs["source"])
        return objective.policy_loss(
            logprobs,
            old,
            inputs["advantages"],
            completion_mask,
            clip=self.epsilon_low,
            num_samples=inputs["num_samples"],
            divisor_N=inputs["divisor"],
            weight_NT=weight,
        )

    def _importance(self, old_NT: Tensor, rollout_NT: Tensor, mask_NT: Tensor, source_N: Tensor) -> Tensor | None:
        """Note how far the rollout's log-probabilities are from the trainer's; the weights that correct for it.

        None where the trainer's own model sampled: it differs by rounding alone.
        """
        cap = self.args.importance_cap
        difference = (old_NT - rollout_NT).abs() * mask_NT
        corrects = self.settings.rollout != "hf" and cap > 0
        ratio = objective.importance_ratio(old_NT, rollout_NT)
        weight = RECIPES[self.args.recipe].limit(ratio, cap) if corrects else None
        per_source = torch.nn.functional.one_hot(source_N, len(self.settings.servers)).T.float()
        self._add(
            difference=per_source @ difference.sum(1).float(),
            compared=per_source @ mask_NT.sum(1).float(),
            above=((ratio > cap) * mask_NT * corrects).sum(),
        )
        self._tally["largest"] = torch.maximum(self._tally.get("largest", difference.max()), difference.max())
        return weight
