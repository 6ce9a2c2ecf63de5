"""A small training run on a random model: ``python -m tests.helpers.random_run OUTPUT_DIR [--name value ...]``.

The tests call it in the same process, in processes that they kill, and in several processes at once.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

OPTIONS = [
    *["--use_cpu", "true", "--dtype", "float32", "--sink", "2", "--window", "6", "--prompts_per_step", "4"],
    *["--per_device_train_batch_size", "8", "--max_completion_length", "14", "--max_steps", "5", "--save_steps", "1"],
    *["--tau", "0.4", "--l1_beta", "0.05", "--image_steps", "0", "--seed", "3"],
]


def checksum_reward(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Right or wrong by the text alone, about two of three: groups with and without spread."""
    return [zlib.crc32((text + answer).encode()) % 3 > 0 for text, answer in zip(completions, answers, strict=True)]


def write_curriculum(path: Path, number: int = 10) -> Path:
    from rlkv.tiny import problems

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(p) + "\n" for p in problems(number, 0, max_definitions=4)))
    return path


def make_policy() -> tuple[Any, Any]:
    from rlkv.tiny.tokenizer import build_tokenizer
    from tests.helpers.models import make_tiny_model

    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2)
    model.generation_config.eos_token_id = [2, *range(20, 40)]  # a random model would never end a completion
    return model, tokenizer


def run(output_dir: Path, options: Sequence[str] = (), callbacks: Sequence[Any] = ()) -> Any:
    """Train and export; the curriculum lies beside the output folder and is written if it is absent."""
    from rlkv.training.config import parse_config
    from rlkv.training.run import train_gates

    curriculum = output_dir.parent / "curriculum.jsonl"
    if not curriculum.exists():
        write_curriculum(curriculum)
    arguments = [*OPTIONS, "--output_dir", str(output_dir), "--curriculum", str(curriculum), *options]
    model, tokenizer = make_policy()
    return train_gates(*parse_config(arguments), model, tokenizer, checksum_reward, list(callbacks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--deepspeed" in sys.argv:
        # without its compiled operator for shared memory, which takes minutes to build: gloo gives the same sums
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    run(Path(sys.argv[1]), sys.argv[2:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
