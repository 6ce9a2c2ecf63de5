"""Append-only shard files: what was written before a kill is there after it, once and whole.

The first line of a file is its settings, every further line one record with a unique ``index``.  A batch of
lines is on the disk (fsync) before the next one is begun; a line torn by a kill is cut off when the file is
opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


def shard_path(folder: Path, shard: int, num_shards: int) -> Path:
    """Where shard ``shard`` (counted from 0) of ``num_shards`` lies."""
    return folder / "shards" / f"shard-{shard}-of-{num_shards}.jsonl"


def parse_shard(text: str) -> tuple[int, int]:
    """``(shard, number of shards)`` of ``i/n``; shards count from 0.

    Raises:
        ValueError: if the text is of another form or i is not below n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not int(match.group(1)) < int(match.group(2)):
        raise ValueError(f"shard {text!r} is not of the form i/n with i from 0 to n-1, for instance 0/4, 1/4, 2/4, 3/4")
    return int(match.group(1)), int(match.group(2))


def check_settings(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a shard that was written with other settings.

    Raises:
        ValueError: names the file and every difference.
    """
    changed = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
    if changed:
        listed = "; ".join(f"{k} was {found.get(k)!r}, is now {expected.get(k)!r}" for k in changed)
        raise ValueError(
            f"{path} was written with other settings ({listed}): resume with the old ones, or take another --output-dir"
        )


def read_shard(path: Path) -> Iterator[dict[str, Any]]:
    """The settings line, then the records; a torn last line is left out.

    Raises:
        ValueError: if a line before the last is broken, or a problem appears twice (names file and line).
    """
    seen: set[int | None] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                key = None if number == 1 else row["index"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path} line {number} is damaged: remove that line to decode its problem again"
                ) from None
            if key in seen:
                raise ValueError(f"{path} line {number} repeats problem {key}: remove one of the two lines")
            seen.add(key)
            yield row


class ShardWriter:
    """One shard, opened for appending by one process at a time; ``done`` are the indices that it holds."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open, or go on with, the shard at ``path``.

        Raises:
            ValueError: if it was written with other settings (it is left as it is), is damaged, or is being
                written by another process.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            self._lock()
            self._cut_torn_line()
            self.done = self._resume(json.loads(json.dumps(settings)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write ``records`` and return when they are on the disk."""
        self._write(records)
        self.done.update(r["index"] for r in records)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it however the process ends
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is being written by another process: give every process its own --shard"
            ) from None

    def _cut_torn_line(self) -> None:
        size = end = self.path.stat().st_size
        with self.path.open("rb") as file:
            while end > 0:  # from the back: only the last batch can be torn
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
        if end < size:
            self._file.truncate(end)

    def _resume(self, settings: dict[str, Any]) -> set[int]:
        rows = read_shard(self.path)
        found = next(rows, None)
        if found is None:
            self._write([{"settings": settings}])
            return set()
        check_settings(self.path, found.get("settings", {}), settings)
        return {row["index"] for row in rows}
