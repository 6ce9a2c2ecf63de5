"""A small training run on a random model:

``python -m tests.helpers.random_run OUTPUT_DIR [--name value ...]``.

Tests call it in their own process, in processes that they kill, and in several at once.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

DEFAULTS = """--finder rlkv --use-cpu --dtype float32 --sink 2 --window 6 --prompts-per-step 4
    --per-device-train-batch-size 8 --max-completion-length 14 --max-steps 5 --save-steps 1
    --tau 0.4 --l1-beta 0.05 --image-steps 0 --seed 3"""
OPTIONS = DEFAULTS.split()


def checksum_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Right or wrong by the text alone, about two of three: groups with and without spread."""
    return [
        zlib.crc32((text + answer).encode()) % 3 > 0
        for text, answer in zip(completions, answers, strict=True)
    ]


def write_curriculum(path: Path, number: int = 10) -> None:
    from rlkv.tiny import problems
    from rlkv.utils.files import write_jsonl

    write_jsonl(path, problems(number, 0, max_definitions=4))


def make_policy() -> tuple[Any, Any]:
    from tests.helpers.models import build_tokenizer, make_tiny_model

    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2)
    # a random model would never end a completion
    model.generation_config.eos_token_id = [2, *range(20, 40)]
    return model, tokenizer


def run(output_dir: Path, options: Sequence[str] = (), callbacks: Sequence[Any] = ()) -> Any:
    """Train and export; the curriculum is written beside the output folder if it is absent."""
    from rlkv.cli.train import parse_config
    from rlkv.training.grpo import train_gates

    curriculum = output_dir.parent / "curriculum.jsonl"
    if not curriculum.exists():
        write_curriculum(curriculum)
    folders = ["--output-dir", str(output_dir), "--curriculum", str(curriculum)]
    arguments = [*OPTIONS, *folders, *options]
    model, tokenizer = make_policy()
    return train_gates(*parse_config(arguments), model, tokenizer, checksum_reward, list(callbacks))


@contextmanager
def hard_case() -> Iterator[None]:
    """Truncate rows 8 to 15 of every rollout, and make the loss of their batch NaN in step 2.

    With two processes of 8 rows all this happens in the second.
    """
    from rlkv.training import trainer
    from rlkv.training.trainer import RLKVTrainer

    sample = trainer.roll_out
    loss = RLKVTrainer._policy_loss

    def truncated(
        model: Any, rows: Any, sampling: Any, ends: list[int], *others: Any
    ) -> Iterator[Any]:
        for half, half_ends in (({*range(8)}, ends), ({*range(8, 16)}, [])):
            indices = [index for index, number in enumerate(rows.numbers) if number in half]
            if indices:
                for row in sample(model, rows.only(indices), sampling, half_ends, *others):
                    yield replace(row, index=indices[row.index])

    def spoiled(self: RLKVTrainer, model: Any, inputs: dict[str, Any]) -> Any:
        found, clipped = loss(self, model, inputs)
        upper = self.accelerator.process_index == self.accelerator.num_processes - 1
        bad = upper and self.state.global_step == 1
        return found * (float("nan") if bad else 1.0), clipped

    with (
        patch.object(trainer, "roll_out", truncated),
        patch.object(RLKVTrainer, "_policy_loss", spoiled),
    ):
        yield


class Held(TrainerCallback):
    """Prints after every step what share of the frozen weights this process holds."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in frozen)
        held += sum(p.ds_tensor.numel() for p in frozen if hasattr(p, "ds_tensor"))
        total = sum(getattr(p, "ds_numel", p.numel()) for p in frozen)
        print(f"held {held / total:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        # without its compiled operator for shared memory, which takes minutes to build: gloo gives
        # the same sums
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        # and without keeping all weights of fewer than 100,000 numbers, which here are all
        whole = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        sharding = import_module("rlkv.training.sharding")
        shard = sharding._shard_zero3
        sharding._shard_zero3 = lambda base, accelerator, options: shard(
            base, accelerator, options | whole
        )
    with hard_case() if "HARD_CASE" in os.environ else nullcontext():
        run(Path(sys.argv[1]), sys.argv[2:], [Held()])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
