"""Rows in a JSONL file that outlive a kill: the one resumable format of every job that measures or decodes.

``NAME.settings.json`` next to it says what the rows depend on (compared when a job resumes) and what they come from
(recorded only, such as the commit).  A line torn by a kill is cut off by the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlkv.utils.atomic import write_json

Row = dict[str, Any]
BLOCK_BYTES = 1 << 20
MOST_NAMED = 8  # differences that a refusal lists
SHORT = 48  # characters up to which it shows values
ABSENT = object()


class StoreInUseError(ValueError):
    """Another process is writing the file."""


class ResultStore:
    """The rows of a file, and a way to add more; made by :func:`open_store`.

    Attributes:
        rows: what the file holds; left empty if it was opened with ``keep_rows=False``.
        done: the keys of all rows, one value or a tuple each.
    """

    def __init__(self, path: Path, key: Sequence[str], keep_rows: bool, out: Any) -> None:
        self.path, self.key, self._keep_rows, self._out = path, tuple(key), keep_rows, out
        self.rows: list[Row] = []
        self.done: set[Hashable] = set()
        for row in iter_rows(path, key):
            self._add(row)

    def append(self, *rows: Row) -> None:
        """Add rows, on the disk when this returns; ``ValueError``, and nothing written, if the key of one is there."""
        keys = [key_of(row, self.key) for row in rows]
        if len(set(keys)) < len(keys) or self.done & set(keys):
            raise ValueError(f"{self.path} has a row for {', '.join(map(str, keys))} already")
        self._out.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        self._out.flush()
        os.fsync(self._out.fileno())
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        self.done.add(key_of(row, self.key))
        if self._keep_rows:
            self.rows.append(row)


def key_of(row: Row, key: Sequence[str]) -> Hashable:
    """The value that makes ``row`` unique: of one field, or a tuple of several."""
    return row[key[0]] if len(key) == 1 else tuple(row[name] for name in key)


def settings_path(path: Path) -> Path:
    """Where the settings of the rows in ``path`` are kept."""
    return path.with_name(path.name + ".settings.json")


@contextmanager
def open_store(
    path: Path,
    settings: dict[str, Any],
    key: Sequence[str],
    recorded: dict[str, Any] | None = None,
    keep_rows: bool = True,
) -> Iterator[ResultStore]:
    """Start or resume the file, for this process alone.

    Args:
        settings: what the rows depend on, JSON-able.
        key: fields that make a row unique.
        recorded: written next to the settings by the first run, never compared.
        keep_rows: False for rows too large to hold in memory: read them with :func:`iter_rows`.

    Raises:
        ValueError: if the rows were made with other or unknown settings, a line is damaged or a row appears twice.
        StoreInUseError: if another process is writing the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as out:
        _lock(out, path, fcntl.LOCK_EX)
        _cut_torn_line(path)
        if path.stat().st_size:
            check_settings(path, settings)
        else:
            write_json(settings_path(path), {"settings": settings, "recorded": recorded or {}})
        yield ResultStore(path, key, keep_rows, out)


def read_store(path: Path, key: Sequence[str], settings: dict[str, Any] | None = None) -> list[Row]:
    """The rows of a file that is not written to, made with ``settings`` if given; errors as in :func:`open_store`."""
    with path.open("rb") as file:
        _lock(file, path, fcntl.LOCK_SH)
        rows = list(iter_rows(path, key))
        if settings is not None and rows:
            check_settings(path, settings)
        return rows


def iter_rows(path: Path, key: Sequence[str]) -> Iterator[Row]:
    """The rows one by one; a torn last line is left out.

    Raises:
        ValueError: if another line is damaged, or a row appears twice (names file and line).
    """
    seen: set[Hashable] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                found = key_of(row, key)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number} is damaged: remove that line to have its row again") from None
            if found in seen:
                raise ValueError(f"{path}, line {number} repeats {found}: remove one of the two lines")
            seen.add(found)
            yield row


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise ``ValueError`` if the rows of ``path`` were made with other settings; the differences are named."""
    try:
        before = json.loads(settings_path(path).read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} exists, but {settings_path(path).name}, which says how its rows were made, does not or is "
            "damaged: take another output folder, or remove both files to start over"
        ) from None
    changes = differences(before, json.loads(json.dumps(settings)))
    if changes:
        more = f" and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
        shown = ", ".join(text for text in list(changes.values())[:MOST_NAMED] if text)
        raise ValueError(
            f"{path} holds rows made with other settings ({', '.join(list(changes)[:MOST_NAMED])}{more})"
            f"{': ' if shown else ''}{shown}; use the old ones, take another output folder, or remove this file "
            "to start over"
        )


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


def _lock(file: Any, path: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)  # the kernel frees it however the process ends
    except BlockingIOError:
        raise StoreInUseError(
            f"{path} is being written by another process: wait for it, or take another output folder"
        ) from None


def _cut_torn_line(path: Path) -> None:
    size = end = path.stat().st_size
    with path.open("rb") as file:
        newline = -1
        while end > 0 and newline < 0:  # from the back: only the last lines can be torn
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
        file.seek(0)
        if file.read(1) not in (b"", b"{") and not settings_path(path).exists():
            raise ValueError(f"{path} does not begin with a row: take another file for the output")
    if end < size:
        os.truncate(path, end)
