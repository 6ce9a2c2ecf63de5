"""Recorded solutions of the tiny model's task."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

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
