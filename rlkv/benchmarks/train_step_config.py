"""Options of ``rlkv-bench train-step``, which are read without peft."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.benchmarks.common import ModelConfig, at_least


@dataclass(frozen=True, kw_only=True)
class TrainStepConfig(ModelConfig):
    """Time and memory of one forward and backward pass with gates, against the model without them.

    rlkv-bench train-step                       # 98 M parameters, a few minutes on 2 cores
    rlkv-bench train-step --device cuda --dtype bfloat16 --checkpointing --lengths 512 3000 8000 --layers 32 \
        --hidden 4096 --intermediate 14336 --query-heads 32 --head-dim 128 --vocabulary 128256    # 8 B parameters
    """

    rounds: int = 3
    """Turns that each model takes."""
    lengths: tuple[int, ...] = (256, 512, 1024)
    """Tokens of the text."""
    sink: int = 128
    """First tokens that local attention sees."""
    window: int = 256
    """Last tokens that it sees."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def check(self) -> None:
        super().check()
        at_least(2, lengths=self.lengths)
        at_least(1, window=self.window)
