"""trl's GRPOTrainer with our log and exact resume: a killed run goes on as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor
from transformers import Trainer, TrainerState
from trl import GRPOTrainer

from rlkv.training.callbacks import GateMean
from rlkv.training.checkpoint import (
    begin_checkpoint,
    checkpoint_folder,
    finish_checkpoint,
    load_tensors,
    save_tensors,
)
from rlkv.training.config import GateTrainingArguments
from rlkv.training.head_gate import gates_matrix
from rlkv.training.records import step_record

ROLLOUT_STATE = "rollout_state"  # file per process: samples that later steps of the same rollout still need
GATE_MEAN = "gate_mean.pt"


class ResumableGRPOTrainer(GRPOTrainer):
    """Checkpoints that are whole or not there, and one log record per step.

    Subclasses set the attributes below before ``__init__``, and write to ``_seconds`` and ``_of_rollout``.
    """

    # narrower than the declarations of transformers and trl
    model: Any
    args: GateTrainingArguments
    num_generations: int
    max_completion_length: int
    _buffered_inputs: Any
    gate_mean: GateMean
    _seconds: dict[str, float]  # of this step: rollout, reward, cpu
    _of_rollout: dict[str, float]  # what is known of the last rollout, for all steps that use it

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir or ".")

    @property
    def steps_per_rollout(self) -> int:
        """Forward and backward passes that one rollout is used for."""
        return (self.args.steps_per_generation or 1) * self.num_iterations

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
