"""The end of a training whose answer, the full heads at given sparsities, has been the same for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlkv.gates.allocation import HeadAllocation, is_decided
from rlkv.gates.head_gates import HeadGates


class StopWhenStable(TrainerCallback):
    """Ends the training when the full heads at all ``sparsities`` have stayed the same for ``steps`` steps.

    Steps that left the gates as they were do not count, nor those after which the gates at the boundary are equal.

    Attributes:
        unchanged: steps for which the full heads have been the same.
    """

    def __init__(self, make_gates: Callable[[], HeadGates], sparsities: Sequence[float], steps: int) -> None:
        self.make_gates, self.sparsities, self.steps = make_gates, tuple(sparsities), steps
        self.unchanged = 0
        self._full: Tensor | None = None  # bool [sparsities, layers, KV heads]
        self._alpha: Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gates = self.make_gates()
        full = torch.stack([HeadAllocation.from_gates(gates, sparsity).full for sparsity in self.sparsities])
        same = self._full is not None and torch.equal(full, self._full) and all(is_decided(gates, own) for own in full)
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
                f"stopped after step {state.global_step} of {state.max_steps}: the full heads at sparsity {listed} "
                f"have been the same for {self.unchanged} steps",
                flush=True,
            )

    def state(self) -> dict[str, Any]:
        return {"sparsities": list(self.sparsities), "full": self._full, "unchanged": self.unchanged}

    def load(self, state: dict[str, Any]) -> None:
        """Of an earlier run; one with other sparsities is ignored."""
        if state.get("sparsities") == list(self.sparsities):
            self._full, self.unchanged = state["full"], state["unchanged"]
