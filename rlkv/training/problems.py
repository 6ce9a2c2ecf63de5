"""The problems of a run as trl takes them."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlkv.data.deepscaler import read_curriculum
from rlkv.models.builtin import TINY
from rlkv.models.prompts import build_messages, choose_template
from rlkv.tiny.task import MAX_DEFINITIONS, MIN_DEFINITIONS, longest_solution, problems
from rlkv.training.config import GateTrainingArguments, RLKVSettings

DRAWN = 200  # problems of the built-in task; as many as configs/filter_tiny.yaml selects


def load_curriculum(settings: RLKVSettings, args: GateTrainingArguments) -> Dataset:
    """Columns ``prompt`` (messages) and ``answer``: a curriculum file, or new problems of the built-in model's task.

    Raises:
        ValueError: if there is no curriculum, and as :func:`rlkv.data.deepscaler.read_curriculum`.
    """
    if settings.curriculum is not None:
        rows = read_curriculum(settings.curriculum)
    elif settings.model != TINY:
        raise ValueError(
            f"no problems to train on: pass --curriculum FILE, which `rlkv-filter --model {settings.model}` writes"
        )
    else:
        room = args.max_completion_length or 0
        fitting = [n for n in range(MIN_DEFINITIONS, MAX_DEFINITIONS + 1) if longest_solution(n) <= room]
        longest = max(fitting, default=MIN_DEFINITIONS)
        number = max(DRAWN, args.prompts_per_rollout) + settings.held_out
        rows = problems(number, args.seed, max_definitions=longest)
        if args.process_index == 0:
            print(
                f"no --curriculum: training on {len(rows) - settings.held_out} problems of the built-in task, of up to "
                f"{longest} definitions, drawn with seed {args.seed}",
                flush=True,
            )
    template = choose_template(settings.template, model=settings.model)
    return Dataset.from_list(
        [{"prompt": build_messages(row["problem"], template), "answer": str(row["answer"])} for row in rows]
    )


def longest_prompt(curriculum: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    prompts: Any = tokenizer.apply_chat_template(list(curriculum["prompt"]), add_generation_prompt=True)
    return max(map(len, prompts["input_ids"]))
