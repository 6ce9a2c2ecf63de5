"""Accuracy at the target sparsity while gates train: greedy, with hard masks, on problems that are not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback

from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.training.logs import HELD_OUT

if TYPE_CHECKING:
    from rlkv.training.config import RLKVSettings
    from rlkv.training.trainer import RLKVTrainer


def hold_out(curriculum: Dataset, number: int, args: Any) -> tuple[Dataset, Dataset | None]:
    """``(problems to train on, problems held out)``, drawn with the seed of ``args``; None where ``number`` is 0.

    Raises:
        ValueError: if none would be left, or the processes cannot share out the others evenly.
    """
    if number == 0:
        return curriculum, None
    if number >= len(curriculum):
        raise ValueError(f"held_out={number} leaves none of {len(curriculum)} problems to train on: lower it")
    if number % args.world_size:
        raise ValueError(f"held_out={number} is not a multiple of the {args.world_size} processes: change it")
    parts = curriculum.train_test_split(test_size=number, seed=args.seed)
    return parts["train"], parts["test"]


class HeldOut(TrainerCallback):
    """Measures every ``held_out_steps`` steps and at the end; the figures join the log record of their step.

    The full heads at a sparsity get gate 1 and all others gate 0, with the sink and window of training.

    Args:
        problems: columns ``prompt`` (messages) and ``answer``; the processes share them out evenly.
        get_trainer: of the trainer, which is made after its callbacks.
    """

    def __init__(
        self,
        problems: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        settings: RLKVSettings,
        make_gates: Callable[[], HeadGates],
        get_trainer: Callable[[], RLKVTrainer],
    ) -> None:
        self.problems, self.tokenizer = problems, tokenizer
        self.sparsities, self.every = settings.target_sparsity or [], settings.held_out_steps
        self.make_gates, self.get_trainer = make_gates, get_trainer
        self._found: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps or control.should_training_stop:
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
        prompts: Any = self.tokenizer.apply_chat_template(list(own["prompt"]), add_generation_prompt=True)
        full = HeadAllocation.from_gates(self.make_gates(), sparsity).full
        completions = trainer.complete_greedily(prompts["input_ids"], full.float())
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        right = trainer.reward(texts, own["answer"])
        truncated = [ids[-1] not in trainer.eos_token_ids for ids in completions]
        rows = gather_object(list(zip(right, truncated, map(len, completions), strict=True)))
        for name, values in zip(("accuracy", "truncated_share", "length_mean"), zip(*rows, strict=True), strict=True):
            self._found[f"{HELD_OUT}{name}_at_{sparsity:g}"] = fmean(values)
