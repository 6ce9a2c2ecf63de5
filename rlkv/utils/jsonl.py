"""JSON as it comes from a user, and JSONL files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlkv.utils.atomic import append_whole, write_text


def parse_json(content: str | bytes) -> Any:
    """What ``json.loads`` finds; ``ValueError`` also for values that are nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``ValueError`` with its name if it is none."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(where, row)`` of each line with text; ``where`` names file and line; ``ValueError`` if it is not an object."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a {type(row).__name__}: expected an object")
            yield where, row


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete records of a JSONL log; the last line may be cut off where a process died."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(parse_json(line))
        except ValueError:
            break
    return records


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a JSONL log; errors as of :func:`rlkv.utils.atomic.append_whole`."""
    with path.open("ab", buffering=0) as out:
        append_whole(out.fileno(), json.dumps(record).encode() + b"\n", path)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the file atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8; half a surrogate pair, or a byte that is no UTF-8, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)
