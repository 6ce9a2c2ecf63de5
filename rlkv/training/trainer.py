"""Training of gates alone by trl's GRPOTrainer, with an adaptive L1 penalty and exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import one_hot
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

from rlkv.attention.head_gate import (
    HeadGateConfig,
    gate_parameters,
    gate_shares,
    gate_values,
    gates_matrix,
    set_gates,
)
from rlkv.rollout.base import GatedEngine, Rows, Sample, SamplingParams, completion_text
from rlkv.rollout.hf import roll_out
from rlkv.training import objective
from rlkv.training.callbacks import (
    ClampGates,
    GateMean,
    ReturnMemory,
    SkipNonFinite,
    StopOnTermination,
    StopWhenStable,
)
from rlkv.training.config import DEFAULT_ROWS, GateTrainingArguments, RLKVSettings
from rlkv.training.logs import cut_logs
from rlkv.training.objective import RECIPES, completion_logprobs
from rlkv.training.run_folder import PARTIAL, load_tensors, new_checkpoint, save_tensors
from rlkv.training.sharding import (
    RowSampler,
    Shares,
    gather_rows,
    in_step,
    make_micro_batches,
    nothing,
    shard_base,
    take_sharding,
)
from rlkv.training.solutions import check_dropout
from rlkv.verifier import are_correct
from rlkv.verifier.extraction import opening

# (completions as text, answers) -> whether each is right
Reward = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]

# of what trl makes of a rollout, what the loss needs
ROW_TENSORS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "sampling_per_token_logps",
    "old_per_token_logps",
)
GATE_MEAN = "gate_mean.pt"  # what a checkpoint holds besides the files of transformers

SAMPLES = 8  # texts of a rollout that are kept for the log
SAME_MODEL = 0.5  # mean difference of log-probabilities between two engines with the same model


def verifier_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Return whether the verifier accepts each completion's answer."""
    return are_correct(zip(completions, answers, strict=True))


# --- rollout: verdicts while other rows are sampled


def judged(
    ended: Iterable[tuple[int, Sample]],
    judge: Callable[[list[tuple[int, Sample]]], Sequence[float]],
) -> tuple[list[tuple[Sample, float]], float]:
    """Judge samples on another thread while others are decoded.

    Those that end while it judges are its next batch, so that the verifier's processes share them.

    Returns:
        The samples in the order of their indices with what ``judge`` says of them, and the seconds
        for which it was waited for at the end.
    """
    arrived: SimpleQueue[tuple[int, Sample]] = SimpleQueue()
    found: dict[int, tuple[Sample, float]] = {}

    def judge_arrived() -> None:
        batch = [arrived.get() for _ in range(arrived.qsize())]
        if batch:
            for (index, sample), verdict in zip(batch, judge(batch), strict=True):
                found[index] = (sample, verdict)

    thread = ThreadPoolExecutor(1, "judge")
    calls = []
    try:
        for item in ended:
            arrived.put(item)
            calls.append(thread.submit(judge_arrived))
        waiting = time.perf_counter()
        for call in calls:
            call.result()
        return [found[index] for index in sorted(found)], time.perf_counter() - waiting
    finally:  # an error or a signal does not wait for verdicts
        thread.shutdown(wait=False, cancel_futures=True)


class RLKVTrainer(GRPOTrainer):
    """Trains head gates by GRPO without KL, with an L1 penalty per group.

    One optimizer step: sample completions under the mixed attention, verify them, maximise
    ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`), clamp the gates to
    [0, 1].  Checkpoints are complete or absent, and the log has one record per step.

    Args:
        model: the frozen model; it is wrapped with :class:`HeadGateConfig`.
        train_dataset: columns ``prompt`` (messages) and ``answer``.
        tokenizer: padding on the left, with a chat template.
        reward: decides which completions are right.
        engine: samples the completions, None: ``model`` does; of rollout servers only the main
            process has a client.

    Raises:
        ValueError: if the data do not fill one step, or the launcher asks for a sharding that is
            not supported.
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
        reward: Reward,
        callbacks: list[TrainerCallback],
        engine: GatedEngine | None,
    ) -> None:
        prompts = args.prompts_per_rollout
        if len(train_dataset) < prompts:
            raise ValueError(
                f"the curriculum has {len(train_dataset)} problems, but one step takes {prompts}: "
                "lower prompts_per_step or add problems"
            )
        check_dropout(model.config)
        if args.steps_per_generation < args.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={args.steps_per_generation} makes several rollouts a step, "
                "of which the log would show the last: give at least the "
                f"{args.gradient_accumulation_steps} forward passes of a step, or a larger "
                "generation_batch_size"
            )
        self.settings = settings
        self.reward = reward
        self.engine = engine
        self.output_dir = Path(str(args.output_dir))
        self.shares = Shares(
            rows=prompts * args.num_generations,
            slots=args.generation_batch_size // args.world_size,
            processes=args.world_size,
        )
        self.sharding = take_sharding(args)
        self.release_weights = nothing  # of a sharded base, after a backward pass
        self.gate_mean = GateMean()
        self.skip_nonfinite = SkipNonFinite()
        stops = [callback for callback in callbacks if isinstance(callback, StopWhenStable)]
        self.stop_when_stable = stops[0] if stops else None
        self.samples: list[dict[str, Any]] = []  # texts of the last rollout, for the log
        self._answers: list[str] = []  # of the rows that are being sampled
        self._sampled: list[tuple[Sample, float]] = []  # this process's, with their rewards
        self._rewards = torch.zeros(0)  # of the rows of all processes
        self._of_rollout: dict[str, float] = {}  # figures of a rollout, for all steps that use it
        self._of_step: dict[str, float] = {}  # figures of the last step
        self._tally: dict[str, Tensor] = {}  # of this process in this step
        # of this step; rollout has reward in it, cpu is of all threads, without the verifier's
        # processes
        self._seconds = {"rollout": 0.0, "reward": 0.0, "cpu": 0.0}
        super().__init__(
            model=model,
            reward_funcs=cast(Any, self._reward_function),
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            peft_config=HeadGateConfig(
                sink=settings.sink, window=settings.window, init_value=settings.init_value
            ),
            # the clamp comes first: whatever looks at the gates after a step sees them in [0, 1]
            callbacks=[
                ClampGates(),
                self.gate_mean,
                self.skip_nonfinite,
                ReturnMemory(),
                *callbacks,
                StopOnTermination(),
            ],
        )
        self.remove_callback(PrinterCallback)
        if self.sharding is not None:
            self.release_weights = shard_base(self.model, self.accelerator, self.sharding)
        self.gates: list[Tensor] = [parameter for _, parameter in gate_parameters(self.model)]
        for gate in self.gates:
            # trl has trainable parameters of a quantized model in bfloat16
            gate.data = gate.data.float()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self.sharding is None:  # else it might not fit
            super()._move_model_to_device(model, device)

    def _send_telemetry(self) -> None:
        """trl reports each start of a trainer to its authors; this one does not."""

    # --- sampler

    @property
    def steps_per_rollout(self) -> int:
        """Forward and backward passes that use the same rollout."""
        return self.args.steps_per_generation * self.num_iterations

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

    # --- rollout

    def _generate_single_turn(
        self, prompt_ids: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        """Sample and judge this process's rows; empty slots get a lone end token."""
        started = time.perf_counter()
        own = self.shares.of(self.accelerator.process_index)
        items = list(zip(prompt_ids, self._answers, own, strict=False))
        self._sampled = self._where_sampled(items, self._sample_and_judge)
        self._seconds["rollout"] += time.perf_counter() - started
        ids = [sample.token_ids for sample, _ in self._sampled]
        logprobs = [sample.logprobs for sample, _ in self._sampled]
        empty = len(prompt_ids) - len(ids)
        return ids + [[self.eos_token_ids[0]]] * empty, logprobs + [[0.0]] * empty

    def _sample_and_judge(
        self, items: list[tuple[list[int], str, int]]
    ) -> list[tuple[Sample, float]]:
        """Sample completions of ``(prompt, answer, row number)``, with their rewards."""
        rows = Rows(
            prompts=[prompt for prompt, _, _ in items],
            numbers=[number for _, _, number in items],
            rollout=self._step // self.steps_per_rollout,
        )
        sampling = SamplingParams(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, self.args.seed
        )

        def judge(batch: list[tuple[int, Sample]]) -> list[float]:
            prompts = [items[index][0] for index, _ in batch]
            answers = [items[index][1] for index, _ in batch]
            return self.judge(prompts, [sample.token_ids for _, sample in batch], answers)

        ended = self._sample(rows, gates_matrix(self.model), sampling)
        samples, seconds = judged(ended, judge)
        assert len(samples) == len(items), "a prompt of the step is lost"
        self._seconds["reward"] += seconds
        return samples

    def judge(
        self, prompts: list[list[int]], completions: list[list[int]], answers: list[str]
    ) -> list[float]:
        """Return the rewards of token ids, with the mark of thoughts that a prompt opens."""
        texts = [completion_text(self._tokenizer, ids) for ids in completions]
        opened = map(opening, self._tokenizer.batch_decode(prompts))
        whole = [mark + text for mark, text in zip(opened, texts, strict=True)]
        return [float(right) for right in self.reward(whole, answers)]

    def complete_greedily(self, prompt_ids: list[list[int]], alpha_LH: Tensor) -> list[list[int]]:
        """Complete this process's prompts under other gates; all processes call it.

        Training goes on with its own gates, from its own draws.
        """
        before = gates_matrix(self.model)
        sampling = SamplingParams(self.max_completion_length)

        def complete(prompts: list[list[int]]) -> list[list[int]]:
            rows = Rows(prompts, list(range(len(prompts))), rollout=0)
            found = dict(self._sample(rows, alpha_LH, sampling))
            return [found[index].token_ids for index in range(len(prompts))]

        set_gates(self.model, alpha_LH)
        try:
            return self._where_sampled(prompt_ids, complete)
        finally:
            set_gates(self.model, before)

    def _where_sampled(self, mine: list[Any], work: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return ``work(mine)``; with rollout servers the main process works for all."""
        if self.settings.rollout != "vllm-server":
            return work(mine)
        everything = gather_object(mine)
        counts = gather_object([len(mine)])
        outcome: list[Any] = [work(everything) if self.accelerator.is_main_process else None]
        first = sum(counts[: self.accelerator.process_index])
        return broadcast_object_list(outcome)[0][first : first + len(mine)]

    def _sample(
        self, rows: Rows, alpha_LH: Tensor, sampling: SamplingParams
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as completions end."""
        if self.engine is not None:
            version = self.engine.set_gates(alpha_LH)
            for index, sample in self.engine.sample(rows, sampling, self.eos_token_ids):
                assert sample.version == version, "a sample of other gates than the trainer's"
                yield index, sample
            return
        pad_id = self._tokenizer.pad_token_id
        max_rows = self.settings.rollout_rows or DEFAULT_ROWS
        sharded = self.sharding is not None
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as unwrapped:
            unwrapped.eval()
            base = unwrapped.get_base_model()
            try:
                with in_step(base) if sharded else nullcontext():
                    for row in roll_out(
                        base, rows, sampling, self.eos_token_ids, pad_id, max_rows, sharded
                    ):
                        reason = row.finish_reason or ""
                        yield row.index, Sample(row.token_ids, row.logprobs, reason, "trainer")
            finally:
                unwrapped.train()

    def _reward_function(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rewards = [reward for _, reward in self._sampled]
        return rewards + [0.0] * (len(completion_ids) - len(rewards))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # gathered over the processes
        self._rewards = rewards[self.shares.filled(), 0]
        return rewards

    # --- micro-batches

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        """Return the next micro-batch; those of a rollout are made when it begins."""
        if self._step % self.steps_per_rollout == 0 or self._buffered_inputs is None:
            args = self.args
            rows = self._generate_and_score_completions(generation_batch)
            number = args.steps_per_generation
            per_part = math.gcd(args.gradient_accumulation_steps, number)
            # which rows meet in an optimizer step: the same on all processes and after a resume
            order = torch.Generator().manual_seed(args.seed * 1_000_003 + self._step)
            drawn = torch.randperm(self.shares.rows, generator=order).to(self.accelerator.device)
            self._buffered_inputs = make_micro_batches(
                rows,
                drawn.chunk(number // per_part),
                per_part,
                args.world_size,
                self.accelerator.process_index,
            )
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Sample and judge: the rows of all processes, with the targets of the recipe."""
        self._answers = [row["answer"] for row in inputs]
        output = super()._generate_and_score_completions(inputs)
        self._keep_samples(inputs)
        own = {name: output[name] for name in ROW_TENSORS if name in output}
        sources = [sample.source for sample, _ in self._sampled]
        sources += [0] * (len(inputs) - len(sources))
        own["source"] = torch.tensor(sources, device=self.accelerator.device)
        rows = gather_rows(self.accelerator, own, self.shares)
        rewards = self._rewards
        tokens = rows["completion_mask"].sum(1)
        rows |= RECIPES[self.args.recipe].targets(rewards, tokens, self.num_generations)
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
        """Keep the first texts of this process, for the log."""
        self.samples = []
        for row, (sample, reward) in zip(inputs[:SAMPLES], self._sampled, strict=False):
            self.samples.append(
                {
                    "problem": row["prompt"][-1]["content"],
                    "answer": row["answer"],
                    "text": completion_text(self._tokenizer, sample.token_ids),
                    "right": reward > 0,
                    "tokens": len(sample.token_ids),
                }
            )

    # --- loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Make a forward and backward pass, and note the figures of a step."""
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        self.release_weights()
        if self.accelerator.sync_gradients:
            self._note_step()
        self._seconds["cpu"] += time.process_time() - started
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        settings = self.settings
        tau = settings.tau if settings.adaptive else None
        weight = objective.penalty_weight(inputs["mean_reward"], settings.l1_beta, tau)
        l1 = objective.penalty(weight, torch.cat(self.gates))
        policy, clipped = self._policy_loss(model, inputs)
        self._add(
            weight=weight.mean(),
            penalty=l1.detach(),
            policy=policy.detach(),
            clipped=clipped,
            tokens=inputs["num_tokens"],
        )
        return (policy + l1) / self.current_gradient_accumulation_steps

    def _policy_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the policy's loss and the number of clipped tokens.

        The row of an idle process has advantage 0 and is compared only.
        """
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        completion_mask = inputs["completion_mask"]
        mask = torch.cat([inputs["prompt_mask"], completion_mask], dim=1)
        # under DDP every process takes part in the backward
        trains = self.accelerator.num_processes > 1 or bool(inputs["advantages"].any())
        with torch.set_grad_enabled(trains):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, completion_mask.shape[1]
            )
        old = inputs.get("old_per_token_logps")
        if old is None:
            old = logprobs.detach()
        weight = self._importance(
            old, inputs["sampling_per_token_logps"], completion_mask, inputs["source"]
        )
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
        """Return log-probabilities alone.

        trl gives a ``batch_size`` for those of a whole rollout, without gradients.
        """

        def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with self.accelerator.autocast():
                return model(
                    input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
                ).log_probs

        # DDP synchronises at every forward with gradients: there all processes make exactly one
        alone = self.accelerator.num_processes == 1
        rows = batch_size or (self.settings.forward_rows if alone else len(input_ids))
        logprobs = completion_logprobs(score, input_ids, attention_mask, logits_to_keep, rows)
        return logprobs, None, None

    def _importance(
        self, old_NT: Tensor, rollout_NT: Tensor, mask_NT: Tensor, source_N: Tensor
    ) -> Tensor | None:
        """Return the weights that correct for another engine's rounding, and tally the differences.

        None where the trainer's own model sampled: it differs by rounding alone.
        """
        cap = self.args.importance_cap
        difference = (old_NT - rollout_NT).abs() * mask_NT
        corrects = self.settings.rollout != "hf" and cap > 0
        ratio = objective.importance_ratio(old_NT, rollout_NT)
        per_source = one_hot(source_N, len(self.settings.servers)).T.float()
        self._add(
            difference=per_source @ difference.sum(1).float(),
            compared=per_source @ mask_NT.sum(1).float(),
            above=((ratio > cap) * mask_NT * corrects).sum(),
        )
        largest = self._tally.get("largest", difference.max())
        self._tally["largest"] = torch.maximum(largest, difference.max())
        return RECIPES[self.args.recipe].limit(ratio, cap) if corrects else None

    # --- log

    def _add(self, **values: Tensor) -> None:
        """Add to the tally of the step."""
        for name, value in values.items():
            self._tally[name] = self._tally.get(name, torch.zeros_like(value)) + value

    def _note_step(self) -> None:
        """Note what all processes measured in the micro-batches of a step: their one exchange."""
        tally = self._tally
        self._tally = {}
        widths = [value.numel() for value in tally.values()]
        own = torch.cat([value.float().view(-1) for value in tally.values()])
        everyones = self.accelerator.gather(own[None])
        total = dict(zip(tally, everyones.sum(0).split(widths), strict=True))
        largest = dict(zip(tally, everyones.amax(0).split(widths), strict=True))["largest"]
        losses = self.current_gradient_accumulation_steps * len(everyones)
        compared = total["compared"].sum().clamp(min=1)
        self._of_step = {
            "penalty/beta_prime": float(total["weight"] / losses),
            "penalty/value": float(total["penalty"] / losses),
            "policy/loss": float(total["policy"] / losses),
            "policy/clip_share": float(total["clipped"] / total["tokens"].clamp(min=1)),
            "rollout/logprob_diff_mean": float(total["difference"].sum() / compared),
            "rollout/logprob_diff_max": float(largest),
            "rollout/truncated_share": float(total["above"] / compared),
        }
        # A server with other weights still returns plausible text: only the log-probabilities show
        # it, so a wrong engine must stop the run here.  Rounding in bf16 gives about 0.02.
        mean, source = (total["difference"] / total["compared"].clamp(min=1)).max(0)
        # vLLM's are those after top-p, which raises each by at most -log(top_p)
        if mean > SAME_MODEL - math.log(self.args.top_p):
            by_server = self.settings.rollout == "vllm-server"
            where = f" at {self.settings.servers[int(source)]}" if by_server else ""
            raise ValueError(
                f"the log-probabilities of the rollouts differ from the trainer's by {mean:.2f} on "
                f"average: the rollout engine{where} must serve the same model with the same sink "
                "and window" + ("; a small --top-k raises them too" if self.args.top_k else "")
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step's record; its update takes what remains after rollout and reward."""
        if "grad_norm" in logs:
            seconds = self._seconds
            step = sum(self._metrics["train"]["step_time"])
            logs = {
                **self._of_rollout,
                **self._of_step,
                **gate_shares(gate_values(self.model)),
                "gates/grad_norm": logs["grad_norm"],
                "train/skipped_steps": self.skip_nonfinite.skipped,
                "train/learning_rate": logs["learning_rate"],
                "time/rollout_s": seconds["rollout"] - seconds["reward"],
                "time/reward_s": seconds["reward"],
                "time/update_s": max(0.0, step - seconds["rollout"]),
                "time/step_s": step,
                "time/step_cpu_s": seconds["cpu"],
            }
            self._metrics["train"].clear()
            self._seconds = dict.fromkeys(seconds, 0.0)
        Trainer.log(self, logs, start_time)

    # --- exact resume: what trl does not restore

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save the adapter alone, without trl's model card and peft's look at the hub."""
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(output_dir or str(self.output_dir), save_embedding_layers=False)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output_dir / PARTIAL)  # of checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        main = self.accelerator.is_main_process
        with new_checkpoint(
            self.output_dir,
            self.state.global_step,
            self.args.save_total_limit,
            main,
            self.accelerator.wait_for_everyone,
        ) as folder:
            Trainer._save_checkpoint(self, model, trial)
            if self._step % self.steps_per_rollout:  # later steps need these samples too
                state = {"inputs": self._buffered_inputs, "values": self._of_rollout}
                save_tensors(self._rollout_state(folder), state)
            if main:
                stop = self.stop_when_stable
                state = {
                    **self.gate_mean.state(),
                    "stable": {} if stop is None else stop.state(),
                    "skipped": self.skip_nonfinite.state(),
                    "batches": self._step,
                }
                save_tensors(folder / GATE_MEAN, state)

    def _rollout_state(self, folder: Path) -> Path:
        return folder / f"rollout_state_{self.accelerator.process_index}.pt"

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the rest too: this is called just before the first batch after a resume."""
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self._load_means(folder)
        # the checkpoint brings the interval of the run that wrote it
        self.state.compute_steps(self.args, self.state.max_steps)
        if self._rollout_state(folder).exists():
            state = load_tensors(self._rollout_state(folder))
            self._of_rollout = state["values"]
            self._buffered_inputs = [self._prepare_input(batch) for batch in state["inputs"]]
            for batch in self._buffered_inputs:
                # there may be fewer rollout servers now than when these rows were sampled
                batch["source"].clamp_(max=len(self.settings.servers) - 1)

    def run(self, checkpoint: Path | None) -> None:
        """Train, from ``checkpoint`` on if there is one; what has ended is loaded alone."""
        if checkpoint is None:
            self.train()
            return
        self._load_means(checkpoint)
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        # more steps may be asked for now
        *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        stop = self.stop_when_stable
        if state.global_step < steps and (stop is None or not stop.ended):
            self.train(resume_from_checkpoint=str(checkpoint))
            return
        self._load_from_checkpoint(str(checkpoint))
        self.state = state
        if self.accelerator.is_main_process:
            cut_logs(self.output_dir, state.global_step)

    def _load_means(self, checkpoint: Path) -> None:
        state = load_tensors(checkpoint / GATE_MEAN)
        self.gate_mean.load(state)
        self.skip_nonfinite.load(state["skipped"])
        self._step = state["batches"]
        if self.stop_when_stable is not None:
            self.stop_when_stable.load(state["stable"])
