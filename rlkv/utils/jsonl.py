"""JSONL files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlkv.utils.atomic import write_text


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(where, row)`` of each line with text; ``where`` names file and line; ``ValueError`` if it is not an object."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a {type(row).__name__}: expected an object")
            yield where, row


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete records of a JSONL log; the last line may be cut off where a process died."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the file atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
