"""RLKVTrainer: trl's GRPOTrainer with gates as the only parameters, the adaptive L1 penalty, and exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.models import unwrap_model_for_generation

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import GatedEngine, Rows, Sample
from rlkv.training.callbacks import ClampGates, GateMean, ReturnMemory
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.early_stop import StopWhenStable
from rlkv.training.gate_loss import GateLossTrainer
from rlkv.training.head_gate import HeadGateConfig, gate_parameters, gates_matrix, set_gates
from rlkv.training.micro_batches import RowSampler, Shares, gather_rows, make_micro_batches
from rlkv.training.nonfinite import SkipNonFinite
from rlkv.training.recipes import RECIPES
from rlkv.training.rollout import judged, roll_out
from rlkv.training.sharding import in_step, nothing, shard_base, take_sharding
from rlkv.training.stopping import StopOnTermination
from rlkv.verifier.verifier import are_correct

ROW_TENSORS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "source"}
ROW_TENSORS |= {"sampling_per_token_logps", "old_per_token_logps"}
SAMPLES = 8  # texts of a rollout that are kept for the log
# (completions as text, answers) -> whether each is right
Reward = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]


def verifier_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """1 if the verifier accepts a completion's answer, else 0."""
    return are_correct(zip(completions, answers, strict=True))


class RLKVTrainer(GateLossTrainer):
    """Trains head gates by GRPO without KL, with an L1 penalty per group.

    One optimizer step: sample completions under the mixed attention, verify them, maximise
    ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`), clamp the gates to [0, 1].

    Args:
        model: the frozen model; it is wrapped with :class:`HeadGateConfig`.
        train_dataset: columns ``prompt`` (messages) and ``answer``.
        tokenizer: padding on the left, with a chat template.
        reward: decides which completions are right; the verifier by default.
        engine: samples the completions instead of ``model``; of rollout servers only the main process has a client.

    Raises:
        ValueError: if the data do not fill one step, or the launcher asks for a sharding that is not supported.
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
        dropout = getattr(model.config.get_text_config(), "attention_dropout", 0)
        if dropout:
            raise ValueError(f"gated attention has no dropout: set attention_dropout to 0 (it is {dropout})")
        self.sharding, self.release_weights = take_sharding(args), nothing
        self.settings = settings
        self.reward = reward
        self.engine = engine
        self.gate_mean, self.skip_nonfinite = GateMean(), SkipNonFinite(Path(args.output_dir or "."))
        self._seconds = {"rollout": 0.0, "reward": 0.0, "cpu": 0.0}
        self._rewards = torch.zeros(0)
        self._answers: list[str] = []
        self._of_samples: list[tuple[Sample, float]] = []  # with their rewards
        self.samples: list[dict[str, Any]] = []  # texts of the last rollout, for the log
        self._of_rollout, self._tally = {}, {}
        super().__init__(
            model=model,
            reward_funcs=cast(Any, self._reward_function),
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            peft_config=HeadGateConfig(sink=settings.sink, window=settings.window, init_value=settings.init_value),
            # the clamp comes first: whatever looks at the gates after a step sees them in [0, 1]
            callbacks=[
                *(ClampGates(), self.gate_mean, self.skip_nonfinite, ReturnMemory()),
                *(callbacks or []),
                StopOnTermination(),
            ],
        )
        self.remove_callback(PrinterCallback)
        if self.sharding is not None:
            self.release_weights = shard_base(self.model, self.accelerator, self.sharding)
        found = [callback for callback in callbacks or [] if isinstance(callback, StopWhenStable)]
        self.stop_when_stable = found[0] if found else None
        self.gates = [parameter for _, parameter in gate_parameters(self.model)]

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self.sharding is None:  # else it might not fit
            super()._move_model_to_device(model, device)

    @cached_property
    def shares(self) -> Shares:
        """How the rows of a rollout are divided for sampling."""
        args = self.args
        slots = (args.generation_batch_size or 0) // args.world_size
        return Shares(args.prompts_per_rollout * self.num_generations, slots, args.world_size)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RowSampler:
        return RowSampler(
            self.shares,
            self.steps_per_rollout,
            epoch=lambda: int(self.state.epoch or 0),
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.prompts_per_rollout,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        """The next micro-batch; those of a rollout are made when it begins."""
        if self._step % self.steps_per_rollout == 0 or self._buffered_inputs is None:
            rows, args = self._generate_and_score_completions(generation_batch), self.args
            number = args.steps_per_generation or 1
            per_part = math.gcd(args.gradient_accumulation_steps, number)
            # which rows meet in an optimizer step: the same on all processes and after a resume
            order = torch.Generator().manual_seed(args.seed * 1_000_003 + self._step)
            drawn = torch.randperm(self.shares.rows, generator=order).to(self.accelerator.device)
            place = args.world_size, self.accelerator.process_index
            self._buffered_inputs = make_micro_batches(rows, drawn.chunk(number // per_part), per_part, *place)
        return self._buffered_inputs[self._step % (self.args.steps_per_generation or 1)]

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], Any]:
        started, before = time.perf_counter(), self._seconds["reward"]
        samples = self._roll_out(prompt_ids[: len(self.shares.of(self.accelerator.process_index))])
        self._seconds["rollout"] += time.perf_counter() - started - (self._seconds["reward"] - before)
        self._of_samples = samples
        empty = len(prompt_ids) - len(samples)
        ids = [sample.token_ids for sample, _ in samples] + [[self.eos_token_ids[0]]] * empty
        return ids, [sample.logprobs for sample, _ in samples] + [[0.0]] * empty

    def _roll_out(self, prompt_ids: list[list[int]]) -> list[tuple[Sample, float]]:
        """Samples of this process's rows, and their rewards."""
        rollout, own = self._step // self.steps_per_rollout, self.shares.of(self.accelerator.process_index)
        alpha_LH, sampling = gates_matrix(self.model), self._sampling()

        def judged_rows(items: list[tuple[list[int], str, int]]) -> list[tuple[Sample, float]]:
            """Completions with their rewards, which are found out while other rows are decoded."""

            def judge(batch: list[tuple[int, Sample]]) -> list[float]:
                ids = [sample.token_ids for _, sample in batch]
                texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
                return [float(right) for right in self.reward(texts, [items[index][1] for index, _ in batch])]

            rows = Rows([prompt for prompt, _, _ in items], [number for _, _, number in items], rollout)
            samples, seconds = judged(self._sample(rows, alpha_LH, sampling), judge)
            assert len(samples) == len(items), "a prompt of the step is lost"
            self._seconds["reward"] += seconds
            return samples

        return self._where_sampled(list(zip(prompt_ids, self._answers, own, strict=False)), judged_rows)

    def complete_greedily(self, prompt_ids: list[list[int]], alpha_LH: Tensor) -> list[list[int]]:
        """Completions of this process's prompts under other gates; training goes on with its own, from its own draws.

        All processes call it.
        """
        before, sampling = gates_matrix(self.model), SamplingParams(self.max_completion_length)

        def completed(prompts: list[list[int]]) -> list[list[int]]:
            found = dict(self._sample(Rows(prompts, list(range(len(prompts))), 0), alpha_LH, sampling))
            return [found[i].token_ids for i in range(len(prompts))]

        set_gates(self.model, alpha_LH)
        try:
            return self._where_sampled(prompt_ids, completed)
        finally:
            set_gates(self.model, before)

    def _where_sampled(self, mine: list[Any], work: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """What ``work`` makes of this process's items; with rollout servers the main process works for all."""
        if self.settings.rollout != "vllm-server":
            return work(mine)
        everything, counts = gather_object(mine), gather_object([len(mine)])
        outcome: list[Any] = [work(everything) if self.accelerator.is_main_process else None]
        first = sum(counts[: self.accelerator.process_index])
        return broadcast_object_list(outcome)[0][first : first + len(mine)]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(self.max_completion_length, self.temperature, self.top_p, self.top_k, self.args.seed)

    def _sample(self, rows: Rows, alpha_LH: Tensor, sampling: SamplingParams) -> Iterator[tuple[int, Sample]]:
        """``(index into rows.prompts, sample)`` as completions end."""
        ends = self.eos_token_ids
        if self.engine is not None:
            version = self.engine.set_gates(alpha_LH)
            for index, sample in self.engine.sample(rows, sampling, ends):
                assert sample.version == version, "a sample of other gates than the trainer's"
                yield index, sample
            return
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as unwrapped:
            unwrapped.eval()
            try:
                base, pad_id = unwrapped.get_base_model(), self._tokenizer.pad_token_id
                max_rows, sharded = self.settings.rollout_rows or DEFAULT_ROWS, self.sharding is not None
                with in_step(base) if sharded else nullcontext():
                    for row in roll_out(base, rows, sampling, ends, pad_id, max_rows, sharded):
                        yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason or "", "the trainer's")
            finally:
                unwrapped.train()

    def _reward_function(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        known = [reward for _, reward in self._of_samples]
        return known + [0.0] * (len(completion_ids) - len(known))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # gathered over the processes
        self._rewards = rewards[self.shares.filled(), 0]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The rows of all processes, with the targets of the recipe."""
        self._answers = [row["answer"] for row in inputs]
        output = super()._generate_and_score_completions(inputs)
        self._keep_samples(inputs)
        sources = [sample.source for sample, _ in self._of_samples]
        output["source"] = torch.tensor(sources + [0] * (len(inputs) - len(sources)), device=self.accelerator.device)
        local = {name: values for name, values in output.items() if name in ROW_TENSORS}
        rows = gather_rows(self.accelerator, local, self.shares)
        rewards, tokens = self._rewards, rows["completion_mask"].sum(1)
        rows |= RECIPES[self.args.recipe].targets(rewards, tokens, self.num_generations)._asdict()
        last = rows["completion_ids"].gather(1, tokens[:, None] - 1)
        truncated = torch.isin(last, last.new_tensor(self.eos_token_ids), invert=True)
        groups = rewards.view(-1, self.num_generations)
        self._of_rollout = {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std().item(),
            "reward/zero_spread_share": (groups == groups[:, :1]).all(1).float().mean().item(),
            "response/length_mean": tokens.float().mean().item(),
            "response/length_max": float(tokens.max()),
            "response/truncated_share": truncated.float().mean().item(),
        }
        return rows

    def _keep_samples(self, inputs: list[dict[str, Any]]) -> None:
        """The first texts of this process, for the log."""
        self.samples = []
        for row, (sample, reward) in zip(inputs[:SAMPLES], self._of_samples, strict=False):
            text = self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            verdict = {"text": text, "right": reward > 0, "tokens": len(sample.token_ids)}
            self.samples.append({"problem": row["prompt"][-1]["content"], "answer": row["answer"], **verdict})
