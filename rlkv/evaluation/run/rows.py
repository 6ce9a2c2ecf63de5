"""Measured rows in a JSONL file, flushed one by one, so that a killed measurement goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_NAMED = 8  # differences that a refusal lists
SHORT = 16  # characters up to which it shows values
ABSENT = object()


class RowsInUseError(ValueError):
    """Another process is writing the file."""


class RowLog:
    """The rows of a file that this measurement may go on with, and a way to add more.

    The first line holds the settings that the rows depend on.  A line torn by a kill is cut off.
    """

    def __init__(self, path: Path, rows: list[dict[str, Any]], out: Any) -> None:
        self.path, self.rows, self._out = path, rows, out

    def append(self, row: dict[str, Any]) -> None:
        """Add a row to the file at once."""
        self.rows.append(row)
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()


@contextmanager
def open_rows(path: Path, settings: dict[str, Any]) -> Iterator[RowLog]:
    """Open or start the file, for this process alone.

    Raises:
        ValueError: if its rows were measured with other settings (it is left as it is, the differences are named), or
            it is no file of rows.
        RowsInUseError: if another process is writing it.
    """
    settings = json.loads(json.dumps(settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        _lock(out, path, fcntl.LOCK_EX)
        rows, end = _read(path, settings)
        if end < path.stat().st_size:
            os.truncate(path, end)
        if end == 0:
            out.write(json.dumps({"settings": settings}) + "\n")
            out.flush()
        yield RowLog(path, rows, out)


def read_rows(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that nobody is writing, which is left as it is.

    Raises:
        ValueError: as :func:`open_rows`.
    """
    with path.open("rb") as file:
        _lock(file, path, fcntl.LOCK_SH)
        return _read(path, json.loads(json.dumps(settings)))[0]


def _lock(file: Any, path: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RowsInUseError(
            f"{path} is being written by another process: wait for it, or take another folder"
        ) from None


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, whatever they were measured with.

    Raises:
        ValueError: if it is no file of rows.
    """
    return _whole_lines(path)[1]


def _read(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The rows of whole lines, and how many bytes these lines have."""
    found, rows, end = _whole_lines(path)
    changes = differences(found, settings) if end else {}
    if changes:
        shown = [text for text in list(changes.values())[:MOST_NAMED] if text]
        raise ValueError(
            f"{path} holds rows measured with other settings ({_named(list(changes))})"
            f"{': ' if shown else ''}{', '.join(shown)}; take another output folder, or remove this file to start over"
        )
    return rows, end


def _whole_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Settings, rows, and the bytes of these lines; a torn last line does not count."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return {}, [], 0
    try:
        header, *rows = [json.loads(line) for line in whole.splitlines()]
        return header["settings"], rows, len(whole)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of measured rows: take another folder, or remove it") from None


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """What differs, in the order of names: ``outer.inner`` to "... was 3 and is now 4", empty for long values."""
    found: dict[str, str] = {}
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{prefix}{name}.")
            continue
        values = ["absent" if value is ABSENT else json.dumps(value) for value in (old, new)]
        is_short = max(map(len, values)) <= SHORT
        found[f"{prefix}{name}"] = f"{prefix}{name} was {values[0]} and is now {values[1]}" if is_short else ""
    return found
