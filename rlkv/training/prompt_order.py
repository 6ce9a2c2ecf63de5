"""Which prompts a training step gets, in an order that survives a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trl.trainer.utils import RepeatSampler

from rlkv.training.config import GateTrainingArguments


def prompts_per_rollout(args: GateTrainingArguments) -> int:
    """Different prompts of one rollout over all processes."""
    return (args.generation_batch_size or 0) // (args.num_generations or 1)


class EpochSampler(RepeatSampler):
    """trl's sampler with an order per epoch that depends on (seed, epoch) alone, not on how often it was iterated."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self._epoch())
        return super().__iter__()
