"""Recorded solutions of the tiny model's task."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rlkv.tiny import draw_problem


@pytest.fixture(scope="session")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = []
    for seed in range(6):
        drawn = draw_problem(random.Random(seed), 5)
        row = {"problem": drawn.problem, "answer": drawn.answer, "output": drawn.solution}
        lines.append(json.dumps(row) + "\n")
    path = tmp_path_factory.mktemp("solutions") / "curriculum.jsonl"
    path.write_text("".join(lines))
    return path
