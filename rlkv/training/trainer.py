"""RLKVTrainer: trl's GRPOTrainer with gates as the only parameters, the adaptive L1 penalty, and
exact resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler

from rlkv.attention import LocalSizes
from rlkv.attention.head_gate import (
    HeadGateConfig,
    gate_parameters,
    gate_shares,
    gates_matrix,
    set_gates,
)
from rlkv.cache.reallocation import full_cache
from rlkv.rollout.base import GatedEngine, Rows, Sample, SamplingParams, gate_version
from rlkv.rollout.decoding import Decoding, Row
from rlkv.rollout.footprint import DEFAULT_KV_GIB
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
from rlkv.training.objective import RECIPES
from rlkv.training.run_folder import PARTIAL, load_tensors, new_checkpoint, save_tensors
from rlkv.training.sharding import in_step, nothing, shard_base, take_sharding
from rlkv.verifier import are_correct

if TYPE_CHECKING:
    from rlkv.training.config import GateTrainingArguments, RLKVSettings

# (input_ids, attention_mask, labels) -> log-probabilities [rows, tokens - 1]; labels are -100 where
# none is wanted
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def shift_left(ids_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Every row's left padding moved behind its tokens: ``(ids, offset)``, offset int64 ``[N]``."""
    offset_N = mask_NT.int().argmax(-1)
    width = ids_NT.shape[1]
    index = (torch.arange(width, device=ids_NT.device) + offset_N[:, None]) % width
    return ids_NT.gather(1, index), offset_N


def completion_logprobs(
    score: Score, ids_NT: Tensor, mask_NT: Tensor, num_completion: int, max_rows: int
) -> Tensor:
    """Log-probabilities of the last ``num_completion`` columns, 0 for padding:

    ``[N, num_completion]``.

    Without padding on the left plain causal attention needs no mask, which would cost ~64 MB per
    row at 8k tokens.

    Args:
        ids_NT, mask_NT: prompts padded on the left, completions on the right.
        max_rows: rows of one call of ``score``; rows of similar length share a call.
    """
    shifted, offset_N = shift_left(ids_NT, mask_NT)
    length_N = mask_NT.sum(-1)
    completion_start = (
        ids_NT.shape[1] - num_completion - offset_N
    )  # first column of the completion after the shift
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


GATE_MEAN, STABLE, SKIPPED, BATCHES = "gate_mean.pt", "stable", "skipped", "batches"
_MEASURED = (
    *(
        "reward/mean",
        "reward/std",
        "reward/zero_spread_share",
        "penalty/beta_prime",
        "penalty/value",
    ),
    *("policy/loss", "policy/clip_share"),
    *("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/truncated_share"),
    *("response/length_mean", "response/length_max", "response/truncated_share"),
)


class ResumableGRPOTrainer(GRPOTrainer):
    """Checkpoints that are complete or absent, and one log record per step.

    Subclasses set the attributes below before ``__init__``, and write to ``_seconds`` and
    ``_of_rollout``.
    """

    # narrower than the declarations of transformers and trl
    model: Any
    args: GateTrainingArguments
    num_generations: int
    max_completion_length: int
    _buffered_inputs: Any
    gate_mean: GateMean
    skip_nonfinite: SkipNonFinite
    stop_when_stable: StopWhenStable | None
    _seconds: dict[
        str, float
    ]  # of this step: rollout, reward, cpu (all threads, without the verifier's processes)
    _of_rollout: dict[str, float]  # what is known of the last rollout, for all steps that use it

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir or ".")

    @property
    def steps_per_rollout(self) -> int:
        """Forward and backward passes that use the same rollout."""
        return (self.args.steps_per_generation or 1) * self.num_iterations

    def _note(self, name: str, value: Tensor | float) -> None:
        self._metrics["train"][name].append(float(value))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One record per step; the update takes what remains of the step after rollout and reward."""
        if "grad_norm" in logs:
            measured = {name: found for name, found in self._metrics["train"].items() if found}
            means = {name: sum(found) / len(found) for name, found in measured.items()}
            largest = {
                name: max(found) for name, found in measured.items() if name.endswith("_max")
            }
            values = {**self._of_rollout, **means, **largest}
            seconds, step = self._seconds, sum(measured.get("step_time", []))
            logs = {
                **{name: values[name] for name in _MEASURED},
                **gate_shares(gates_matrix(self.model)),
                "gates/grad_norm": logs["grad_norm"],
                "train/skipped_steps": self.skip_nonfinite.skipped,
                "train/learning_rate": logs["learning_rate"],
                "time/rollout_s": seconds["rollout"],
                "time/reward_s": seconds["reward"],
                "time/update_s": max(0.0, step - seconds["rollout"] - seconds["reward"]),
                "time/step_s": step,
                "time/step_cpu_s": seconds["cpu"],
            }
            self._metrics["train"].clear()
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        Trainer.log(self, logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """The adapter alone; without trl's model card and peft's look at the hub."""
        model: PeftModel = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(output_dir or str(self.output_dir), save_embedding_layers=False)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output_dir / PARTIAL)  # of checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        main, wait = self.accelerator.is_main_process, self.accelerator.wait_for_everyone
        step, keep = self.state.global_step, self.args.save_total_limit
        with new_checkpoint(self.output_dir, step, keep, main, wait) as folder:
            Trainer._save_checkpoint(self, model, trial)
            if self._step % self.steps_per_rollout:  # later steps need these samples too
                state = {"inputs": self._buffered_inputs, "values": self._of_rollout}
                save_tensors(self._rollout_state(folder), state)
            if main:
                found = {
                    STABLE: self._stable_state(),
                    SKIPPED: self.skip_nonfinite.state(),
                    BATCHES: self._step,
                }
                save_tensors(folder / GATE_MEAN, self.gate_mean.state() | found)

    def _rollout_state(self, folder: Path) -> Path:
        return folder / f"rollout_state_{self.accelerator.process_index}.pt"

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called just before the first batch after a resume: everything that trl itself does not
        restore.
        """
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self._load_means(folder)
        if self._rollout_state(folder).exists():
            state = load_tensors(self._rollout_state(folder))
            self._of_rollout = state["values"]
            self._buffered_inputs = [self._prepare_input(batch) for batch in state["inputs"]]

    def restore(self, checkpoint: Path) -> None:
        """Load gates, their mean and the step count of ``checkpoint`` without further training."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self._load_means(checkpoint)

    def _stable_state(self) -> dict[str, Any]:
        return {} if self.stop_when_stable is None else self.stop_when_stable.state()

    def _load_means(self, checkpoint: Path) -> None:
        state = load_tensors(checkpoint / GATE_MEAN)
        self.gate_mean.load(state)
        self.skip_nonfinite.load(state[SKIPPED])
        # checkpoints of earlier versions do not say it
        self._step = state.get(
            BATCHES, self.state.global_step * self.args.gradient_accumulation_steps
        )
        if self.stop_when_stable is not None:
            self.stop_when_stable.load(state[STABLE])

    def _send_telemetry(self) -> None:
        """trl reports each start of a trainer to its authors; this one does not."""


# mean |difference| of log-probabilities above which two engines hold different models; rounding in
# bf16 gives ~0.02
SAME_MODEL = 0.5


class GateLossTrainer(ResumableGRPOTrainer):
    """Maximises ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`).

    Inputs are those of :func:`~rlkv.training.trainer.make_micro_batches`.
    """

    settings: RLKVSettings
    gates: list[nn.Parameter]
    release_weights: Callable[[], None]  # of a sharded base, after a backward pass
    _tally: dict[str, Tensor]  # of this process in this step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As trl, which measures the wall-clock time of the same span."""
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        self.release_weights()
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
        """The log-probabilities alone; trl gives a ``batch_size`` for those of a whole rollout,
        without gradients.
        """

        def score(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with self.accelerator.autocast():
                return model(
                    input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
                ).log_probs

        # DDP synchronises at every forward with gradients: there all processes make exactly one
        alone = self.accelerator.num_processes == 1
        rows = batch_size or (self.settings.forward_rows if alone else len(input_ids))
        return (
            completion_logprobs(score, input_ids, attention_mask, logits_to_keep, rows),
            None,
            None,
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        settings, mean_reward = self.settings, inputs["mean_reward"]
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
        everyones = self.accelerator.gather(
            torch.cat([value.float().view(-1) for value in tally.values()])[None]
        )
        total = dict(zip(tally, everyones.sum(0).split(widths), strict=True))
        largest = dict(zip(tally, everyones.amax(0).split(widths), strict=True))["largest"]
        compared, num_compared = total["compared"], total["compared"].sum().clamp(min=1)
        self._note(
            "policy/loss",
            total["policy"] / (self.current_gradient_accumulation_steps * len(everyones)),
        )
        self._note("policy/clip_share", total["clipped"] / total["tokens"].clamp(min=1))
        self._note("rollout/logprob_diff_mean", total["difference"].sum() / num_compared)
        self._note("rollout/logprob_diff_max", largest)
        self._note("rollout/truncated_share", total["above"] / num_compared)
        mean, source = (total["difference"] / compared.clamp(min=1)).max(0)
        if mean > SAME_MODEL:
            where = (
                f" at {self.settings.servers[int(source)]}"
                if self.settings.rollout == "vllm-server"
                else ""
            )
            raise ValueError(
                f"the log-probabilities of the rollouts differ from the trainer's by {mean:.2f} on "
                "average: the "
                f"rollout engine{where} must serve the same model with the same sink and window"
            )

    def _policy_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """And the number of clipped tokens.

        The row of an idle process has advantage 0 and is compared only.
        """
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        completion_mask = inputs["completion_mask"]
        mask = torch.cat([inputs["prompt_mask"], completion_mask], dim=1)
        # under DDP every process takes part in the backward
        with torch.set_grad_enabled(
            self.accelerator.num_processes > 1 or bool(inputs["advantages"].any())
        ):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, completion_mask.shape[1]
            )
        old = (
            logprobs.detach()
            if inputs.get("old_per_token_logps") is None
            else inputs["old_per_token_logps"]
        )
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

    def _importance(
        self, old_NT: Tensor, rollout_NT: Tensor, mask_NT: Tensor, source_N: Tensor
    ) -> Tensor | None:
        """Note how far the rollout's log-probabilities are from the trainer's.

        The weights that correct for it.

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
        self._tally["largest"] = torch.maximum(
            self._tally.get("largest", difference.max()), difference.max()
        )
        return weight


@dataclass(frozen=True)
class Shares:
    """How the rows of a rollout are divided for sampling.

    Attributes:
        rows: of all processes.
        slots: of each process, at least its share.
    """

    rows: int
    slots: int
    processes: int

    def of(self, rank: int) -> range:
        """The rows of a process; shares differ by one row at most."""
        return range(self.rows * rank // self.processes, self.rows * (rank + 1) // self.processes)

    def filled(self) -> list[int]:
        """The slots of the rows, in the order of rows, if those of all processes are one list."""
        return [
            rank * self.slots + i
            for rank in range(self.processes)
            for i in range(len(self.of(rank)))
        ]


class RowSampler(RepeatSampler):
    """trl's sampler of prompts, in slots, with an order per epoch that depends on (seed, epoch)
    alone.

    Args:
        uses: how often each rollout is asked for: once per forward and backward pass.
        epoch: the current one.
    """

    def __init__(self, shares: Shares, uses: int, epoch: Callable[[], int], **options: Any) -> None:
        super().__init__(**options)
        self.shares, self.uses, self._epoch = shares, uses, epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        prompts = super().__iter__()
        while rows := list(islice(prompts, self.shares.rows)):
            slots = rows[:1] * (self.shares.slots * self.shares.processes)
            for slot, index in zip(self.shares.filled(), rows, strict=True):
                slots[slot] = index
            for _ in range(self.uses):
                yield from slots

    def __len__(self) -> int:
        return (
            super().__len__()
            // self.shares.rows
            * self.shares.slots
            * self.shares.processes
            * self.uses
        )


def gather_rows(accelerator: Any, tensors: dict[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """The rows of all processes in the order of their numbers, from tensors ``[slots, ...]`` of
    this one.
    """
    filled = torch.tensor(shares.filled(), device=accelerator.device)
    found = {}
    for name, values in tensors.items():
        if values.dim() == 2:  # prompts are padded on the left
            values = accelerator.pad_across_processes(
                values, dim=1, pad_first=name.startswith("prompt")
            )
        found[name] = accelerator.gather(values)[filled]
    return found


def make_micro_batches(
    rows: dict[str, Tensor], parts: Sequence[Tensor], number: int, processes: int, rank: int
) -> list[dict[str, Tensor]]:
    """The micro-batches of one process: rows of advantage 0 have no gradient, and the others are
    dealt out by length.

    Ranks work on rows of about the same length at the same time.  A process without a row takes the
    shortest one, with advantage 0, because every process takes part in every backward pass.

    Args:
        rows: of a whole rollout, with advantages and masks.
        parts: the rows of each optimizer step.
        number: micro-batches of a part.

    Returns:
        ``number`` for each part: some of the rows, ``mean_reward`` of all rows of the part, and as
        scalars how many rows and tokens of it fall to a micro-batch on average.
    """
    length_N = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1)
    found = []
    for part in parts:
        whole = {
            "mean_reward": rows["mean_reward"][part],
            "num_samples": torch.tensor(len(part) / (number * processes), device=part.device),
            "num_tokens": rows["completion_mask"][part].sum() / (number * processes),
        }
        teaching = part[rows["advantages"][part] != 0]
        teaching = teaching[length_N[teaching].argsort(descending=True, stable=True)]
        shortest = part[length_N[part].argmin()][None]
        for i in range(number):
            mine = teaching[len(teaching) * i // number : len(teaching) * (i + 1) // number][
                rank::processes
            ]
            batch = {name: values[mine if len(mine) else shortest] for name, values in rows.items()}
            if not len(mine):
                batch["advantages"] = torch.zeros_like(batch["advantages"])
            found.append(batch | whole)
    return found


def roll_out(
    model: PreTrainedModel,
    rows: Rows,
    sampling: SamplingParams,
    eos_ids: list[int],
    pad_id: int,
    max_rows: int,
    sharded: bool = False,
) -> Iterator[Row]:
    """A completion per row, in the order of their ends.

    Args:
        model: in eval mode, on its device.
        rows: their numbers count among the rows of all processes, ``rows.rollout`` since the start
            of training.
        max_rows: rows decoded at once.
        sharded: as of :class:`~rlkv.rollout.decoding.Decoding`.
    """

    def new_cache(limit: int, rows: list[int]) -> Cache:
        return full_cache(model.config, limit)

    decoding = Decoding(
        model,
        sampling,
        eos_ids,
        pad_id,
        max_rows,
        new_cache,
        rows.rollout,
        logprobs=True,
        sharded=sharded,
    )
    return decoding.run(rows.prompts, rows.numbers)


class GatedHFEngine:
    """A :class:`~rlkv.rollout.base.GatedEngine`:

    ``max_rows`` rows at once, as in the training loop.
    """

    def __init__(
        self, model: PreTrainedModel, sizes: LocalSizes, pad_id: int, max_rows: int = 64
    ) -> None:
        """``model`` should be on its device; all gates are 1 at first."""
        self.model = get_peft_model(
            model, HeadGateConfig(sink=sizes.sink, window=sizes.window)
        ).eval()
        self.pad_id, self.max_rows = pad_id, max_rows

    def gates(self) -> Tensor:
        """Float32 ``[num_layers, num_kv_heads]``."""
        return gates_matrix(self.model)

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; their version; ``ValueError`` for another shape."""
        expected = self.gates().shape
        if alpha_LH.shape != expected:
            raise ValueError(f"the model has gates {list(expected)}, got {list(alpha_LH.shape)}")
        set_gates(self.model, alpha_LH)
        return gate_version(self.gates())

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as rows end, the longest prompts first."""
        base: Any = self.model.get_base_model()
        version = gate_version(self.gates())
        for row in roll_out(base, rows, sampling, eos_ids, self.pad_id, self.max_rows):
            assert row.finish_reason is not None
            yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason, version)


@contextmanager
def open_engine(
    settings: RLKVSettings, args: GateTrainingArguments, longest_prompt: int
) -> Iterator[GatedEngine | None]:
    """What samples in this process instead of the trainer's own model: an engine, or for the main
    one a client.

    At the end an engine gives its memory back, unless the trainer has a process group.

    Raises:
        ValueError: if the engine is not installed, a server cannot be reached, or it does not fit
            the settings.
    """
    sizes = LocalSizes(settings.sink, settings.window)
    positions = longest_prompt + (args.max_completion_length or 0)
    if settings.rollout == "vllm-server" and args.process_index == 0:
        from rlkv.rollout.remote import RolloutClient

        client = RolloutClient(settings.servers, settings.rollout_patience)
        client.check(sizes, positions)
        yield client
        return
    if settings.rollout != "vllm":
        yield None
        return
    from rlkv.training.config import DEFAULT_ROWS
    from rlkv.vllm.engine import VLLMEngine

    # vLLM ends any process group with its own: also the trainer's, which it then uses too
    alone = not torch.distributed.is_initialized()
    engine = VLLMEngine(
        settings.model,
        sizes,
        settings.dtype,
        max_positions=positions,
        kv_gib=settings.rollout_kv_gib or DEFAULT_KV_GIB,
        max_rows=settings.rollout_rows or DEFAULT_ROWS,
        enforce_eager=settings.rollout_eager,
    )
    with closing(engine) if alone else nullcontext():
        yield engine


def judged(
    ended: Iterable[tuple[int, Sample]],
    judge: Callable[[list[tuple[int, Sample]]], Sequence[float]],
) -> tuple[list[tuple[Sample, float]], float]:
    """Samples in the order of their indices with what ``judge`` says of them, on another thread
    while others decode.

    Those that end while it judges are its next batch, so that the verifier's processes share them.

    Returns:
        Them, and the seconds for which ``judge`` was waited for at the end.
    """
    arrived: SimpleQueue[tuple[int, Sample]] = SimpleQueue()
    found: dict[int, tuple[Sample, float]] = {}

    def judge_arrived() -> None:
        if batch := [arrived.get() for _ in range(arrived.qsize())]:
            for (index, sample), verdict in zip(batch, judge(batch), strict=True):
                found[index] = sample, verdict

    thread, calls = ThreadPoolExecutor(1, "judge"), []
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
    ``policy objective - beta' * mean(alpha)`` (:mod:`rlkv.training.objective`), clamp the gates to
    [0, 1].

    Args:
        model: the frozen model; it is wrapped with :class:`HeadGateConfig`.
        train_dataset: columns ``prompt`` (messages) and ``answer``.
        tokenizer: padding on the left, with a chat template.
        reward: decides which completions are right; the verifier by default.
        engine: samples the completions instead of ``model``; of rollout servers only the main
            process has a client.

    Raises:
        ValueError: if the data do not fill one step, or the launcher asks for a sharding that is
            not supported.
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
                f"the curriculum has {len(train_dataset)} problems, but one step takes {prompts}: "
                "lower "
                "prompts_per_step or add problems"
            )
        dropout = getattr(model.config.get_text_config(), "attention_dropout", 0)
        if dropout:
            raise ValueError(
                f"gated attention has no dropout: set attention_dropout to 0 (it is {dropout})"
            )
        self.sharding, self.release_weights = take_sharding(args), nothing
        self.settings = settings
        self.reward = reward
        self.engine = engine
        self.gate_mean = GateMean()
        self.skip_nonfinite = SkipNonFinite()
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
            peft_config=HeadGateConfig(
                sink=settings.sink, window=settings.window, init_value=settings.init_value
            ),
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
            self._buffered_inputs = make_micro_batches(
                rows, drawn.chunk(number // per_part), per_part, *place
            )
        return self._buffered_inputs[self._step % (self.args.steps_per_generation or 1)]

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], Any]:
        started, before = time.perf_counter(), self._seconds["reward"]
        samples = self._roll_out(prompt_ids[: len(self.shares.of(self.accelerator.process_index))])
        self._seconds["rollout"] += (
            time.perf_counter() - started - (self._seconds["reward"] - before)
        )
        self._of_samples = samples
        empty = len(prompt_ids) - len(samples)
        ids = [sample.token_ids for sample, _ in samples] + [[self.eos_token_ids[0]]] * empty
        return ids, [sample.logprobs for sample, _ in samples] + [[0.0]] * empty

    def _roll_out(self, prompt_ids: list[list[int]]) -> list[tuple[Sample, float]]:
        """Samples of this process's rows, and their rewards."""
        rollout, own = (
            self._step // self.steps_per_rollout,
            self.shares.of(self.accelerator.process_index),
        )
        alpha_LH, sampling = gates_matrix(self.model), self._sampling()

        def judged_rows(items: list[tuple[list[int], str, int]]) -> list[tuple[Sample, float]]:
            """Completions with their rewards, which are found out while other rows are decoded."""

            def judge(batch: list[tuple[int, Sample]]) -> list[float]:
                ids = [sample.token_ids for _, sample in batch]
                texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
                return [
                    float(right)
                    for right in self.reward(texts, [items[index][1] for index, _ in batch])
                ]

            rows = Rows(
                [prompt for prompt, _, _ in items], [number for _, _, number in items], rollout
            )
            samples, seconds = judged(self._sample(rows, alpha_LH, sampling), judge)
            assert len(samples) == len(items), "a prompt of the step is lost"
            self._seconds["reward"] += seconds
            return samples

        return self._where_sampled(
            list(zip(prompt_ids, self._answers, own, strict=False)), judged_rows
        )

    def complete_greedily(self, prompt_ids: list[list[int]], alpha_LH: Tensor) -> list[list[int]]:
        """Completions of this process's prompts under other gates.

        Training goes on with its own, from its own draws.

        All processes call it.
        """
        before, sampling = gates_matrix(self.model), SamplingParams(self.max_completion_length)

        def completed(prompts: list[list[int]]) -> list[list[int]]:
            found = dict(
                self._sample(Rows(prompts, list(range(len(prompts))), 0), alpha_LH, sampling)
            )
            return [found[i].token_ids for i in range(len(prompts))]

        set_gates(self.model, alpha_LH)
        try:
            return self._where_sampled(prompt_ids, completed)
        finally:
            set_gates(self.model, before)

    def _where_sampled(self, mine: list[Any], work: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """What ``work`` makes of this process's items.

        With rollout servers the main process works for all.
        """
        if self.settings.rollout != "vllm-server":
            return work(mine)
        everything, counts = gather_object(mine), gather_object([len(mine)])
        outcome: list[Any] = [work(everything) if self.accelerator.is_main_process else None]
        first = sum(counts[: self.accelerator.process_index])
        return broadcast_object_list(outcome)[0][first : first + len(mine)]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, self.args.seed
        )

    def _sample(
        self, rows: Rows, alpha_LH: Tensor, sampling: SamplingParams
    ) -> Iterator[tuple[int, Sample]]:
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
                max_rows, sharded = (
                    self.settings.rollout_rows or DEFAULT_ROWS,
                    self.sharding is not None,
                )
                with in_step(base) if sharded else nullcontext():
                    for row in roll_out(base, rows, sampling, ends, pad_id, max_rows, sharded):
                        yield (
                            row.index,
                            Sample(
                                row.token_ids,
                                row.logprobs,
                                row.finish_reason or "",
                                "the trainer's",
                            ),
                        )
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
        output["source"] = torch.tensor(
            sources + [0] * (len(inputs) - len(sources)), device=self.accelerator.device
        )
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
            self.samples.append(
                {"problem": row["prompt"][-1]["content"], "answer": row["answer"], **verdict}
            )
