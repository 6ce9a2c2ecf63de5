"""Problems of a task from rows in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkv.evaluation.tasks.base import EvalProblem
from rlkv.evaluation.tasks.registry import load_task
from rlkv.utils.files import write_jsonl


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., list[EvalProblem]]:
    """Return a function of the name of a task and of its rows."""

    def load_rows(task: str, *rows: dict[str, Any]) -> list[EvalProblem]:
        write_jsonl(tmp_path / "rows.jsonl", rows)
        return load_task(task, tmp_path / "rows.jsonl")

    return load_rows
