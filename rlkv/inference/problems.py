"""Problems to answer, from a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_problems(path: Path) -> list[dict[str, Any]]:
    """One object per line, each with a text ``problem`` and, if known, an ``answer``.

    Raises:
        ValueError: if the file is absent or empty, or a line is not such an object; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the problems from {path}: {error}") from None
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(problem, dict) or not isinstance(problem.get("problem"), str) or not problem["problem"]:
            raise ValueError(f"{path}, line {number} has no text field 'problem'")
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path} holds no problems: it needs one JSON object with a field 'problem' per line")
    return problems
