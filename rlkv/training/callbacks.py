"""Callbacks of a training run: the clamp of the gates, their mean, and a line per step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from rlkv.attention.head_gate import gate_parameters, gates_matrix
from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import return_freed_memory
from rlkv.training.run_folder import HELD_OUT, save_tensors
from rlkv.training.sharding import any_process
from rlkv.utils.progress import duration

if TYPE_CHECKING:
    from rlkv.training.config import RLKVSettings


@torch.no_grad()
def clamp_gate(gate: Tensor) -> None:
    """Clamp to [0, 1] in place; under DeepSpeed also its float32 master copy, from which the next
    step starts.
    """
    if hasattr(gate, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        safe_set_full_fp32_param(gate, safe_get_full_fp32_param(gate).clamp(0, 1))
    gate.clamp_(0, 1)


class ClampGates(TrainerCallback):
    """Keeps the gates in [0, 1] after each step of the optimizer (arXiv 2510.08525)."""

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        for _, gate in gate_parameters(model):
            clamp_gate(gate)


class ReturnMemory(TrainerCallback):
    """On a CPU memory goes back to the system between micro-batches, as the next ones have tensors
    of other sizes.
    """

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cpu":
            return_freed_memory()

    on_step_end = on_substep_end


class GateMean(TrainerCallback):
    """The mean of every gate over all steps so far, float64: a head whose gate fell later matters
    more.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        alpha = gates_matrix(model).double()
        self._sum = alpha if self._sum is None else self._sum + alpha
        self._count += 1

    def mean(self) -> Tensor:
        """Float32 ``[num_layers, num_kv_heads]``."""
        if self._sum is None:
            raise ValueError(
                "no training step has been made: max_steps and num_train_epochs leave none"
            )
        return (self._sum / self._count).float()

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]


class StepLine(TrainerCallback):
    """One line per step on stdout: progress, reward, gates and the time left."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" not in logs:
            return
        per_step = (time.monotonic() - self._started) / max(1, state.global_step - self._first)
        left = duration(per_step * (state.max_steps - state.global_step))
        print(
            f"step {state.global_step}/{state.max_steps}  reward {logs['reward/mean']:.3f}  "
            f"gates {logs['gates/mean']:.3f}  below 0.5: {logs['gates/below_0.5']:.2f}  "
            f"beta' {logs['penalty/beta_prime']:.4g}  {logs['time/step_s']:.1f} s, {left} left",
            flush=True,
        )


class StopWhenStable(TrainerCallback):
    """Ends the training when the full heads at all ``sparsities`` have stayed the same for
    ``steps`` steps.

    Steps that left the gates as they were do not count, nor those after which the gates at the
    boundary are equal.

    Attributes:
        unchanged: steps for which the full heads have been the same.
    """

    def __init__(
        self, make_gates: Callable[[], HeadGates], sparsities: Sequence[float], steps: int
    ) -> None:
        self.make_gates, self.sparsities, self.steps = make_gates, tuple(sparsities), steps
        self.unchanged = 0
        self._full: Tensor | None = None  # bool [sparsities, layers, KV heads]
        self._alpha: Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gates = self.make_gates()
        full = torch.stack(
            [HeadAllocation.from_gates(gates, sparsity).full for sparsity in self.sparsities]
        )
        same = (
            self._full is not None
            and torch.equal(full, self._full)
            and all(is_decided(gates, own) for own in full)
        )
        moved = self._alpha is None or not torch.equal(gates.alpha, self._alpha)
        self.unchanged = self.unchanged + moved if same else 0
        self._full, self._alpha = full, gates.alpha.clone()
        if self.ended and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    @property
    def ended(self) -> bool:
        return self.unchanged >= self.steps

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ended and state.global_step < state.max_steps and args.process_index == 0:
            listed = ", ".join(f"{sparsity:g}" for sparsity in self.sparsities)
            print(
                f"stopped after step {state.global_step} of {state.max_steps}: the full heads at "
                f"sparsity {listed} "
                f"have been the same for {self.unchanged} steps",
                flush=True,
            )

    def state(self) -> dict[str, Any]:
        return {
            "sparsities": list(self.sparsities),
            "full": self._full,
            "unchanged": self.unchanged,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Of an earlier run; one with other sparsities is ignored."""
        if state.get("sparsities") == list(self.sparsities):
            self._full, self.unchanged = state["full"], state["unchanged"]


def hold_out(curriculum: Dataset, number: int, args: Any) -> tuple[Dataset, Dataset | None]:
    """``(problems to train on, problems held out)``, drawn with the seed of ``args``.

    None where ``number`` is 0.

    Raises:
        ValueError: if none would be left, or the processes cannot share out the others evenly.
    """
    if number == 0:
        return curriculum, None
    if number >= len(curriculum):
        raise ValueError(
            f"held_out={number} leaves none of {len(curriculum)} problems to train on: lower it"
        )
    if number % args.world_size:
        raise ValueError(
            f"held_out={number} is not a multiple of the {args.world_size} processes: change it"
        )
    parts = curriculum.train_test_split(test_size=number, seed=args.seed)
    return parts["train"], parts["test"]


class HeldOut(TrainerCallback):
    """Measures every ``held_out_steps`` steps and at the end.

    The figures join the log record of their step.

    The full heads at a sparsity get gate 1 and all others gate 0, with the sink and window of
    training.

    Args:
        problems: columns ``prompt`` (messages) and ``answer``; the processes share them out evenly.
        get_trainer: returns the :class:`~rlkv.training.trainer.RLKVTrainer`, which is made after
            its callbacks.
    """

    def __init__(
        self,
        problems: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        settings: RLKVSettings,
        make_gates: Callable[[], HeadGates],
        get_trainer: Callable[[], Any],
    ) -> None:
        self.problems, self.tokenizer = problems, tokenizer
        self.sparsities, self.every = settings.target_sparsity or [], settings.held_out_steps
        self.make_gates, self.get_trainer = make_gates, get_trainer
        self._found: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            state.global_step % self.every == 0
            or state.global_step == state.max_steps
            or control.should_training_stop
        ):
            started = time.perf_counter()
            self._found = {}
            for sparsity in self.sparsities:
                self._measure(sparsity, args)
            self._found["time/held_out_s"] = time.perf_counter() - started

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gates/mean" in logs:
            logs.update(self._found)
            self._found = {}

    def _measure(self, sparsity: float, args: Any) -> None:
        trainer = self.get_trainer()
        own = self.problems.select(range(args.process_index, len(self.problems), args.world_size))
        prompts: Any = self.tokenizer.apply_chat_template(
            list(own["prompt"]), add_generation_prompt=True
        )
        full = HeadAllocation.from_gates(self.make_gates(), sparsity).full
        completions = trainer.complete_greedily(prompts["input_ids"], full.float())
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        right = trainer.reward(texts, own["answer"])
        truncated = [ids[-1] not in trainer.eos_token_ids for ids in completions]
        rows = gather_object(list(zip(right, truncated, map(len, completions), strict=True)))
        for name, values in zip(
            ("accuracy", "truncated_share", "length_mean"), zip(*rows, strict=True), strict=True
        ):
            self._found[f"{HELD_OUT}{name}_at_{sparsity:g}"] = fmean(values)


MOST_IN_A_ROW = 3


class SkipNonFinite(TrainerCallback):
    """Drops the gradients of such a step, so that the optimizer leaves gates and momenta as they
    are.

    They are reduced over all processes, so all of them leave out the same steps.  DeepSpeed, which
    has made its step by then, does so of its own accord.

    Attributes:
        skipped: steps since the start of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped = self._in_a_row = 0
        self._written = -1  # step
        self._started = time.time()

    def look(
        self, loss: Tensor, gates: Sequence[Tensor], inputs: dict[str, Any], step: int, rank: int
    ) -> None:
        """After a backward pass: keep the first batch of the step after ``step`` whose own loss is
        not finite.

        Gradients are those of all processes: they tell which batch it was only where there is one
        process.
        """
        alone = not (dist.is_available() and dist.is_initialized())
        bad = not bool(loss.isfinite().all()) or (alone and not _finite(gates))
        if bad and self._written != step:
            self._written = step
            tensors = {
                name: value.cpu() for name, value in inputs.items() if isinstance(value, Tensor)
            }
            save_tensors(
                self._path(step, rank),
                {"inputs": tensors, "gates": [gate.detach().cpu() for gate in gates]},
            )

    def state(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load(self, state: dict[str, int]) -> None:
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def _path(self, step: int, rank: int | str) -> Path:
        return self.folder / f"nonfinite_step_{step + 1:06d}_{rank}.pt"

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        gates = [gate for group in optimizer.param_groups for gate in group["params"]]
        by_deepspeed = args.deepspeed_plugin is not None and optimizer.step_was_skipped
        if _finite(gates) and not by_deepspeed:
            self._in_a_row = 0
            return
        for gate in gates:
            gate.grad = None
        self.skipped += 1
        self._in_a_row += 1
        # with several processes only one whose own loss was not finite has written its batch
        found = sorted(self.folder.glob(self._path(state.global_step, "*").name))
        written = [
            str(path) for path in found if path.stat().st_mtime >= self._started
        ]  # not of an earlier attempt
        where = f" ({', '.join(written)})" if written else ""
        if args.process_index == 0:
            print(
                f"step {state.global_step + 1} is left out: its gradients are not finite{where}",
                flush=True,
            )
        if self._in_a_row == MOST_IN_A_ROW:
            raise ValueError(
                f"the gradients of {MOST_IN_A_ROW} steps in a row are not finite{where}: try "
                "--dtype float32, or "
                "resume with the same command, which goes on from the last checkpoint"
            )


def _finite(gates: Sequence[Tensor]) -> bool:
    grads = [gate.grad.flatten() for gate in gates if gate.grad is not None]
    return not grads or bool(torch.cat(grads).isfinite().all())  # one wait for the GPU


GRACE = 20.0  # seconds for the running step: launchers kill their processes after 30


class StopOnTermination(TrainerCallback):
    """Ends the training with the running step; a step that takes longer than ``GRACE`` is given up.

    Under several processes all end with the same step, whichever of them was told.  It should be
    the last callback: at the end of the training it leaves the program.
    """

    def __init__(self) -> None:
        self.told = self.stopped = self._late = False
        self._timer = threading.Timer(GRACE, self._remind)
        self._timer.daemon = True
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # elsewhere Python takes no handlers
            self._before = signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: Any) -> None:
        if not self.told:
            self.told = True
            self._timer.start()
        elif self._late:
            print(
                "stopped by SIGTERM within a step: the same command goes on from the last "
                "checkpoint",
                flush=True,
            )
            sys.exit(0)

    def _remind(self) -> None:
        self._late = True
        os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any_process(self.told) and state.global_step < state.max_steps:
            self._timer.cancel()  # the checkpoint may take its time
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self.stopped:
            print(
                f"stopped by SIGTERM after step {state.global_step}: the same command goes on from "
                "there",
                flush=True,
            )
            sys.exit(0)
