"""The problems of a training run: a curriculum file, or for the built-in model new ones of its own task."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlkv.data.deepscaler import TINY, read_curriculum
from rlkv.models.prompts import build_messages
from rlkv.tiny.task import MAX_DEFINITIONS, MIN_DEFINITIONS, longest_solution, problems
from rlkv.training.config import GateTrainingArguments, RLKVSettings
from rlkv.training.prompt_order import prompts_per_rollout

DRAWN = 200  # as many as configs/filter_tiny.yaml selects


def load_curriculum(settings: RLKVSettings, args: GateTrainingArguments) -> Dataset:
    """Columns ``prompt`` (messages) and ``answer``.

    Raises:
        ValueError: if there is no curriculum; as :func:`rlkv.data.deepscaler.read_curriculum`.
    """
    if settings.curriculum is not None:
        return read_problems(settings.curriculum, settings.template)
    if settings.model != TINY:
        raise ValueError("no problems to train on: pass --curriculum FILE, which rlkv-filter writes")
    room = args.max_completion_length or 0
    fitting = [n for n in range(MIN_DEFINITIONS, MAX_DEFINITIONS + 1) if longest_solution(n) <= room]
    longest = max(fitting, default=MIN_DEFINITIONS)
    number = max(DRAWN, prompts_per_rollout(args))
    if args.process_index == 0:
        print(
            f"no --curriculum: training on {number} problems of the built-in task, of up to {longest} definitions, "
            f"drawn with seed {args.seed}",
            flush=True,
        )
    return _as_dataset(problems(number, args.seed, max_definitions=longest), settings.template)


def read_problems(path: str | Path, template: str) -> Dataset:
    """The rows of a curriculum file as :func:`load_curriculum`."""
    return _as_dataset(read_curriculum(path), template)


def _as_dataset(rows: list[dict[str, str]], template: str) -> Dataset:
    return Dataset.from_list(
        [{"prompt": build_messages(r["problem"], template), "answer": str(r["answer"])} for r in rows]
    )


def longest_prompt(curriculum: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    rendered = (
        tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in curriculum["prompt"]
    )
    return max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered)
