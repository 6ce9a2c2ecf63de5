"""RLKVTrainer: trl's GRPOTrainer with gates as the only parameters, the adaptive L1 penalty, and exact resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import GatedEngine, Rows
from rlkv.training.callbacks import ClampGates, GateMean
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.early_stop import StopWhenStable
from rlkv.training.gate_loss import GateLossTrainer
from rlkv.training.head_gate import HeadGateConfig, gate_parameters, gates_matrix
from rlkv.training.nonfinite import SkipNonFinite
from rlkv.training.recipes import RECIPES
from rlkv.training.resumable import RESPONSE_METRICS
from rlkv.training.rollout import engine_roll_out, roll_out
from rlkv.training.stopping import StopOnTermination
from rlkv.verifier.verifier import are_correct

# (completions as text, answers) -> whether each is right
Reward = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]


def verifier_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """1 if the verifier accepts a completion's answer, else 0."""
    return are_correct(zip(completions, answers, strict=True))


class EpochSampler(RepeatSampler):
    """trl's sampler with an order per epoch that depends on (seed, epoch) alone, not on how often it was iterated."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        return super().__iter__()


class RLKVTrainer(GateLossTrainer):
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
        prompts = args.prompts_per_rollout
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
        self.gate_mean, self.skip_nonfinite = GateMean(), SkipNonFinite(Path(args.output_dir or "."))
        self._seconds = {"rollout": 0.0, "reward": 0.0, "cpu": 0.0}
        self._rewards = torch.zeros(0)
        self._of_rollout = {}
        super().__init__(
            model=model,
            reward_funcs=cast(Any, self._reward_function),
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            peft_config=HeadGateConfig(sink=settings.sink, window=settings.window, init_value=settings.init_value),
            # the clamp comes first: whatever looks at the gates after a step sees them in [0, 1]
            callbacks=[ClampGates(), self.gate_mean, self.skip_nonfinite, *(callbacks or []), StopOnTermination()],
        )
        self.remove_callback(PrinterCallback)
        found = [callback for callback in callbacks or [] if isinstance(callback, StopWhenStable)]
        self.stop_when_stable = found[0] if found else None
        self.gates = [parameter for _, parameter in gate_parameters(self.model)]

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.prompts_per_rollout,
            repeat_count=self.steps_per_rollout,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], Any]:
        started = time.perf_counter()
        samples = self._roll_out(prompt_ids)
        self._seconds["rollout"] += time.perf_counter() - started
        return [ids for ids, _ in samples], [logprobs for _, logprobs in samples]

    def _roll_out(self, prompt_ids: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        rollout, ends = self._step // self.steps_per_rollout, self.eos_token_ids
        sampling = SamplingParams(self.max_completion_length, self.temperature, self.top_p, self.top_k, self.args.seed)
        if self.settings.rollout != "hf":
            alpha_LH = gates_matrix(self.model)
            return engine_roll_out(self.engine, self.accelerator, alpha_LH, prompt_ids, rollout, sampling, ends)
        first = self.accelerator.process_index * len(prompt_ids)
        rows = Rows(prompt_ids, list(range(first, first + len(prompt_ids))), rollout)
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as unwrapped:
            unwrapped.eval()
            try:
                base, pad_id = unwrapped.get_base_model(), self._tokenizer.pad_token_id
                ended = roll_out(base, rows, sampling, ends, pad_id, self.settings.rollout_rows or DEFAULT_ROWS)
                return [(row.token_ids, row.logprobs) for row in sorted(ended, key=lambda row: row.index)]
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
        """As trl, with the targets of the recipe, which are shuffled and split with their samples."""
        output = super()._generate_and_score_completions(inputs)
        rewards = self._rewards
        tokens = self.accelerator.gather(output["completion_mask"].sum(1))
        targets = RECIPES[self.args.recipe].targets(rewards, tokens, self.num_generations)
        first = self.accelerator.process_index * len(inputs)
        local = slice(first, first + len(inputs))
        output.update({name: values[local] for name, values in targets._asdict().items()})
        groups = rewards.view(-1, self.num_generations)
        self._of_rollout = {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std().item(),
            "reward/zero_spread_share": (groups == groups[:, :1]).all(1).float().mean().item(),
            **{name: self._metrics["train"][source][-1] for name, source in RESPONSE_METRICS.items()},
        }
        return output
