"""Callbacks of a training run: clamp and mean of the gates, the step line, and what ends a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from rlkv.attention.head_gate import gate_parameters, gates_matrix
from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates
from rlkv.models.loading import return_freed_memory
from rlkv.training.logs import HELD_OUT
from rlkv.training.sharding import any_process
from rlkv.utils.progress import duration

if TYPE_CHECKING:
    from rlkv.training.config import RLKVSettings


@torch.no_grad()
def clamp_gate(gate: Tensor) -> None:
    """Clamp to [0, 1] in place.

    Under DeepSpeed also its float32 master copy, from which the next step starts.
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
    """Gives memory of a CPU back: the tensors of the next micro-batch have other sizes."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cpu":
            return_freed_memory()

    on_step_end = on_substep_end


class GateMean(TrainerCallback):
    """The mean of every gate over all steps so far: a head whose gate fell later matters more."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        alpha = gates_matrix(model).double()  # a sum of many
        self._sum = alpha if self._sum is None else self._sum + alpha
        self._count += 1

    def mean(self) -> Tensor:
        """Return float32 ``[num_layers, num_kv_heads]``; ValueError before the first step."""
        if self._sum is None:
            raise ValueError(
                "no training step has been made: max_steps and num_train_epochs leave none"
            )
        return (self._sum / self._count).float()

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._sum = state["sum"]
        self._count = state["count"]


class StepLine(TrainerCallback):
    """One line per step on stdout: progress, reward, gates and the time left."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self._first = state.global_step

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
    """Ends the training when the full heads have stayed the same for ``steps`` steps.

    They are those at all ``sparsities``.  Steps that left the gates as they were do not count, nor
    those after which the gates at the boundary are equal.

    Attributes:
        unchanged: steps for which the full heads have been the same.
    """

    def __init__(
        self, make_gates: Callable[[], HeadGates], sparsities: Sequence[float], steps: int
    ) -> None:
        self.make_gates = make_gates
        self.sparsities = list(sparsities)
        self.steps = steps
        self.unchanged = 0
        self._full: Tensor | None = None  # bool [sparsities, layers, KV heads]
        self._alpha: Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gates = self.make_gates()
        full = torch.stack([HeadAllocation.from_gates(gates, s).full for s in self.sparsities])
        same = self._full is not None and torch.equal(full, self._full)
        if not same or not all(is_decided(gates, own) for own in full):
            self.unchanged = 0
        elif self._alpha is None or not torch.equal(gates.alpha, self._alpha):
            self.unchanged += 1
        self._full = full
        self._alpha = gates.alpha.clone()
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
                f"sparsity {listed} have been the same for {self.unchanged} steps",
                flush=True,
            )

    def state(self) -> dict[str, Any]:
        return {
            "sparsities": self.sparsities,
            "full": self._full,
            "unchanged": self.unchanged,
            "alpha": self._alpha,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier run, unless it had other sparsities."""
        if state.get("sparsities") == self.sparsities:
            self._full = state["full"]
            self.unchanged = state["unchanged"]
            self._alpha = state.get("alpha")  # missing in checkpoints of 0.2 and before


class HeldOut(TrainerCallback):
    """Measures accuracy on held-out problems, every ``held_out_steps`` steps and at the end.

    The full heads at a sparsity get gate 1 and all others gate 0, with the sink and window of
    training.  The figures join the log record of their step.

    Args:
        problems: columns ``prompt`` (messages) and ``answer``; the processes share them out evenly.
        get_trainer: returns the :class:`~rlkv.training.trainer.RLKVTrainer`, which is made after
            its callbacks.
    """

    def __init__(
        self,
        problems: Dataset,
        settings: RLKVSettings,
        make_gates: Callable[[], HeadGates],
        get_trainer: Callable[[], Any],
    ) -> None:
        self.problems = problems
        self.sparsities = settings.target_sparsity or []
        self.every = settings.held_out_steps
        self.make_gates = make_gates
        self.get_trainer = get_trainer
        self._found: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ends = control.should_training_stop or state.global_step == state.max_steps
        if state.global_step % self.every and not ends:
            return
        started = time.perf_counter()
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
        prompts = trainer.processing_class.apply_chat_template(
            list(own["prompt"]), add_generation_prompt=True
        )
        full = HeadAllocation.from_gates(self.make_gates(), sparsity).full
        completions = trainer.complete_greedily(prompts["input_ids"], full.float())
        right = trainer.judge(prompts["input_ids"], completions, own["answer"])
        truncated = [ids[-1] not in trainer.eos_token_ids for ids in completions]
        lengths = map(len, completions)
        rows = gather_object(list(zip(right, truncated, lengths, strict=True)))
        for place, name in enumerate(("accuracy", "truncated_share", "length_mean")):
            self._found[f"{HELD_OUT}{name}_at_{sparsity:g}"] = fmean(row[place] for row in rows)


MOST_IN_A_ROW = 3


class SkipNonFinite(TrainerCallback):
    """Drops gradients that are not finite, so that the optimizer leaves gates and momenta alone.

    They are reduced over all processes, so all of them leave out the same steps.  DeepSpeed, which
    has made its step by then, does so of its own accord.

    Attributes:
        skipped: steps since the start of the run.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._in_a_row = 0

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
        if args.process_index == 0:
            step = state.global_step + 1
            print(f"step {step} is left out: its gradients are not finite", flush=True)
        if self._in_a_row == MOST_IN_A_ROW:
            raise ValueError(
                f"the gradients of {MOST_IN_A_ROW} steps in a row are not finite: try --dtype "
                "float32, or resume with the same command, which goes on from the last checkpoint"
            )

    def state(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load(self, state: dict[str, int]) -> None:
        self.skipped = state["skipped"]
        self._in_a_row = state["in_a_row"]


def _finite(gates: Sequence[Tensor]) -> bool:
    grads = [gate.grad.flatten() for gate in gates if gate.grad is not None]
    return not grads or bool(torch.cat(grads).isfinite().all())  # one wait for the GPU


GRACE = 20.0  # seconds for the running step: launchers kill their processes after 30


class StopOnTermination(TrainerCallback):
    """Ends the training with the running step when SIGTERM comes.

    A step that takes longer than ``GRACE`` is given up.  Under several processes all end with the
    same step, whichever of them was told.  It should be the last callback: at the end of the
    training it leaves the program.
    """

    def __init__(self) -> None:
        self.told = False
        self.stopped = False
        self._late = False
        self._timer = threading.Timer(GRACE, self._remind)
        self._timer.daemon = True
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # elsewhere Python takes no handlers
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: Any) -> None:
        if not self.told:
            self.told = True
            self._timer.start()
        elif self._late:
            text = "the same command goes on from the last checkpoint"
            print(f"stopped by SIGTERM within a step: {text}", flush=True)
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
            text = "the same command goes on from there"
            print(f"stopped by SIGTERM after step {state.global_step}: {text}", flush=True)
            sys.exit(0)
