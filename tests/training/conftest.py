"""Recorded solutions of the tiny model's task, random texts, and options of the finders."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cli.train import parse_config
from rlkv.data.recall import MarkedText
from rlkv.tiny import draw_problem
from rlkv.utils.files import write_jsonl


@pytest.fixture(scope="session")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = []
    for seed in range(6):
        drawn = draw_problem(random.Random(seed), 5)
        rows.append({"problem": drawn.problem, "answer": drawn.answer, "output": drawn.solution})
    path = tmp_path_factory.mktemp("solutions") / "curriculum.jsonl"
    write_jsonl(path, rows)
    return path


def random_texts(
    sizes: Iterable[tuple[int, int]], seed: int = 0, vocabulary: int = 128
) -> list[MarkedText]:
    """Draw texts of these (tokens of the prompt, tokens of the whole text)."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt, length in sizes:
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        texts.append(MarkedText(tuple(ids), tuple(range(prompt, length))))
    return texts


def finder_options(**given: object) -> Any:
    """Parse options of a finder on the tiny model."""
    words = ["--config", "tiny", "--use-cpu"]
    for name, value in given.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return parse_config(words)
