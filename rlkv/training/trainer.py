"""RLKVTrainer: trl's GRPOTrainer with gates as the only parameters, the adaptive L1 penalty, and exact resume."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import GatedEngine
from rlkv.training import objective
from rlkv.training.callbacks import ClampGates, GateMean
from rlkv.training.checkpoint import (
    begin_checkpoint,
    checkpoint_folder,
    finish_checkpoint,
    load_tensors,
    save_tensors,
)
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.engine_rollout import check_same_model, engine_roll_out
from rlkv.training.head_gate import HeadGateConfig, gate_parameters, gates_matrix
from rlkv.training.logprobs import completion_logprobs
from rlkv.training.prompt_order import EpochSampler, prompts_per_rollout
from rlkv.training.records import RESPONSE_METRICS, step_record
from rlkv.training.reward import Reward, verifier_reward
from rlkv.training.rollout import RolloutSettings, roll_out

ROLLOUT_STATE = "rollout_state"  # file per process: samples that later steps of the same rollout still need
GATE_MEAN = "gate_mean.pt"


class RLKVTrainer(GRPOTrainer):
    """Trains head gates by GRPO without KL, with an L1 penalty per group.

    One optimizer step: sample completions under the mixed attention, verify them, maximise
    ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`), clamp the gates to [0, 1].

    Args:
        model: the frozen model; it is wrapped with :class:`HeadGateConfig`.
        train_dataset: columns ``prompt`` (messages) and ``answer``.
        tokenizer: padding on the left, with a chat template.
        reward: decides which completions are right; the verifier by default.
        engine: samples the completions instead of ``model`` (on the main process; the others pass None).

    Raises:
        ValueError: if the data do not fill one step, or DeepSpeed ZeRO-3 is configured.
    """

    # narrower than the declarations of transformers and trl
    model: Any
    args: GateTrainingArguments
    num_generations: int
    max_completion_length: int
    _buffered_inputs: Any

    def __init__(
        self,
        model: PreTrainedModel,
        args: GateTrainingArguments,
        settings: RLKVSettings,
        train_dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward = verifier_reward,
        callbacks: list[TrainerCallback] | None = None,
        engine: GatedEngine | None = None,
    ) -> None:
        prompts = prompts_per_rollout(args)
        if len(train_dataset) < prompts:
            raise ValueError(
                f"the curriculum has {len(train_dataset)} problems, but one step takes {prompts}: lower "
                "prompts_per_step or add problems"
            )
        plugin = args.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            raise ValueError("DeepSpeed ZeRO-3 is not supported: the frozen weights stay whole, use zero_stage 2")
        self.settings = settings
        self.reward = reward
        self.engine = engine
        self.gate_mean = GateMean()
        self._seconds = {"rollout": 0.0, "reward": 0.0, "cpu": 0.0}
        self._rewards = torch.zeros(0)
        self._of_rollout: dict[str, float] = {}  # what is known of the last rollout, for all steps that use it
        super().__init__(
            model=model,
            reward_funcs=cast(Any, self._reward_function),
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            peft_config=HeadGateConfig(sink=settings.sink, window=settings.window, init_value=settings.init_value),
            # the clamp comes first: whatever looks at the gates after a step sees them in [0, 1]
            callbacks=[ClampGates(), self.gate_mean, *(callbacks or [])],
        )
        self.remove_callback(PrinterCallback)
        self.gates = [parameter for _, parameter in gate_parameters(self.model)]

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir or ".")

    @property
    def steps_per_rollout(self) -> int:
        """Forward and backward passes that one rollout is used for."""
        return (self.args.steps_per_generation or 1) * self.num_iterations

    # ---- data ----

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=prompts_per_rollout(self.args),
            repeat_count=self.steps_per_rollout,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    # ---- rollout and reward ----

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], Any]:
        started = time.perf_counter()
        samples = self._roll_out(prompt_ids)
        self._seconds["rollout"] += time.perf_counter() - started
        return [ids for ids, _ in samples], [logprobs for _, logprobs in samples]

    def _roll_out(self, prompt_ids: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        rollout = self._step // self.steps_per_rollout
        if self.settings.rollout != "hf":
            sampling = SamplingParams(
                self.max_completion_length, self.temperature, self.top_p, self.top_k, self.args.seed
            )
            alpha_LH = gates_matrix(self.model)
            return engine_roll_out(
                self.engine, self.accelerator, alpha_LH, prompt_ids, rollout, sampling, self.eos_token_ids
            )
        first_row = self.accelerator.process_index * len(prompt_ids)
        settings = RolloutSettings(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.args.seed,
            rows=self.settings.rollout_rows,
        )
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as unwrapped:
            unwrapped.eval()
            try:
                return roll_out(
                    unwrapped.get_base_model(),
                    prompt_ids,
                    numbers=range(first_row, first_row + len(prompt_ids)),
                    rollout=rollout,
                    eos_ids=self.eos_token_ids,
                    pad_id=self._tokenizer.pad_token_id,
                    settings=settings,
                )
            finally:
                unwrapped.train()

    def _reward_function(self, completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [float(right) for right in self.reward(texts, answer)]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        rewards = super()._calculate_rewards(*args, **kwargs)  # gathered over the processes
        self._rewards = rewards[:, 0]
        self._seconds["reward"] += time.perf_counter() - started
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """As trl, with our advantages and each sample's group mean, which is shuffled and split with its sample."""
        output = super()._generate_and_score_completions(inputs)
        rewards, settings = self._rewards, self.settings
        scaled = objective.scale_rewards(rewards, settings.reward_offset, settings.reward_scale)
        first = self.accelerator.process_index * len(inputs)
        local = slice(first, first + len(inputs))
        output["advantages"] = objective.advantages(scaled, self.num_generations, settings.advantage)[local]
        means = objective.group_means(rewards, self.num_generations)
        output["group_mean"] = means[local]
        groups = rewards.view(-1, self.num_generations)
        self._of_rollout = {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std().item(),
            "reward/zero_spread_share": (groups == groups[:, :1]).all(1).float().mean().item(),
            **{name: self._metrics["train"][source][-1] for name, source in RESPONSE_METRICS.items()},
        }
        return output

    # ---- loss ----

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

    # ---- log ----

    def _note(self, name: str, value: Tensor | float) -> None:
        self._metrics["train"][name].append(float(value))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One record per step with the keys of :func:`rlkv.training.records.step_record`."""
        if "grad_norm" in logs:
            measured = {name: found for name, found in self._metrics["train"].items() if found}
            values = {
                name: max(found) if name.endswith("_max") else sum(found) / len(found)
                for name, found in measured.items()
            }
            seconds = {**self._seconds, "step": sum(self._metrics["train"].get("step_time", []))}
            logs = step_record({**self._of_rollout, **values}, gates_matrix(self.model), logs, seconds)
            self._metrics["train"].clear()
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        Trainer.log(self, logs, start_time)

    # ---- checkpoints ----

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """The adapter alone; without trl's model card and peft's look at the hub."""
        model: PeftModel = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(output_dir or str(self.output_dir), save_embedding_layers=False)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        folder = checkpoint_folder(self.output_dir, step)
        keep, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go when this one is whole
        main = self.accelerator.is_main_process
        if main:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        try:
            Trainer._save_checkpoint(self, model, trial)
        finally:
            self.args.save_total_limit = keep
        if self._step % self.steps_per_rollout:
            state = {"inputs": self._buffered_inputs, "values": self._of_rollout}
            save_tensors(self._rollout_state(folder), state)
        if main:
            save_tensors(folder / GATE_MEAN, self.gate_mean.state())
        self.accelerator.wait_for_everyone()
        if main:
            finish_checkpoint(folder, step, keep)
        self.accelerator.wait_for_everyone()

    def _rollout_state(self, folder: Path) -> Path:
        return folder / f"{ROLLOUT_STATE}_{self.accelerator.process_index}.pt"

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called just before the first batch after a resume: everything that trl itself does not restore."""
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        self.gate_mean.load(load_tensors(folder / GATE_MEAN))
        if self._rollout_state(folder).exists():
            state = load_tensors(self._rollout_state(folder))
            self._of_rollout = state["values"]
            self._buffered_inputs = [self._prepare_input(batch) for batch in state["inputs"]]

    def restore(self, checkpoint: Path) -> None:
        """Take over gates, their mean and the step count of ``checkpoint`` without training on."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.gate_mean.load(load_tensors(checkpoint / GATE_MEAN))

    def _send_telemetry(self) -> None:
        """trl reports each start of a trainer to its authors; this one does not."""
