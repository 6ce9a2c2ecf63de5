"""trl's GRPOTrainer with our log and exact resume: a killed run continues as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor
from transformers import Trainer, TrainerState
from trl import GRPOTrainer

from rlkv.training.callbacks import GateMean
from rlkv.training.checkpoints import PARTIAL, load_tensors, new_checkpoint, save_tensors
from rlkv.training.config import GateTrainingArguments
from rlkv.training.early_stop import StopWhenStable
from rlkv.training.head_gate import gate_shares, gates_matrix
from rlkv.training.nonfinite import SkipNonFinite

GATE_MEAN, STABLE, SKIPPED, BATCHES = "gate_mean.pt", "stable", "skipped", "batches"
_MEASURED = (
    *("reward/mean", "reward/std", "reward/zero_spread_share", "penalty/beta_prime", "penalty/value"),
    *("policy/loss", "policy/clip_share"),
    *("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/truncated_share"),
    *("response/length_mean", "response/length_max", "response/truncated_share"),
)


class ResumableGRPOTrainer(GRPOTrainer):
    """Checkpoints that are complete or absent, and one log record per step.

    Subclasses set the attributes below before ``__init__``, and write to ``_seconds`` and ``_of_rollout``.
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
    _seconds: dict[str, float]  # of this step: rollout, reward, cpu (all threads, without the verifier's processes)
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
            largest = {name: max(found) for name, found in measured.items() if name.endswith("_max")}
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
                found = {STABLE: self._stable_state(), SKIPPED: self.skip_nonfinite.state(), BATCHES: self._step}
                save_tensors(folder / GATE_MEAN, self.gate_mean.state() | found)

    def _rollout_state(self, folder: Path) -> Path:
        return folder / f"rollout_state_{self.accelerator.process_index}.pt"

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called just before the first batch after a resume: everything that trl itself does not restore."""
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
        self._step = state.get(BATCHES, self.state.global_step * self.args.gradient_accumulation_steps)
        if self.stop_when_stable is not None:
            self.stop_when_stable.load(state[STABLE])

    def _send_telemetry(self) -> None:
        """trl reports each start of a trainer to its authors; this one does not."""
