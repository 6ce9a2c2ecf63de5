"""Rows in a JSONL file that outlive a kill: the one resumable format of every job.

Resuming: repeat the command, and it goes on where it stopped.  ``NAME.settings.json`` next to the
rows says what they depend on, and is compared, and what they come from (such as the commit), which
is only recorded, of every process that added rows.  It is written before the first row: a file
that holds something without it is somebody else's, and nothing is changed there.  Other settings
are refused, and named.  One process writes at a time, and the next start cuts off the line that a
kill has torn.  A row is appended whole or not at all, and is known by its key: what is there is not
computed again.

Folders follow the same rules: that of a run is locked (:func:`hold_folder`), and results replace
only those of the same command (:func:`check_results`).
"""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlkv.utils.files import (
    append_whole,
    check_file,
    check_folder,
    make_folder,
    parse_json,
    read_json,
    write_json,
)

Row = dict[str, Any]
MOST_NAMED = 8  # differences that a refusal lists
ABSENT = object()
ROW_BEGIN = b'{"'
LOCK = ".lock"  # in the folder of a run
_LOCKS: dict[Path, int] = {}  # folders that this process holds, and the descriptors of their locks


class StoreInUseError(ValueError):
    """Another process is writing the file."""


class ResultStore:
    """The rows of a file, and a way to add more; made by :func:`open_store`.

    Attributes:
        rows: what the file holds.
        done: the keys of all rows, one value or a tuple each.
        origin: what is to be recorded of this process before its first row; None: nothing more.
    """

    def __init__(
        self,
        path: Path,
        key: Sequence[str],
        descriptor: int,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.key = tuple(key)
        self.origin = origin
        self.rows: list[Row] = []
        self.done: set[Hashable] = set()
        self._descriptor = descriptor
        for row in iter_rows(path, key):
            self._add(row)

    def append(self, *rows: Row) -> None:
        """Add rows, on the disk when this returns.

        Raises:
            ValueError: if the key of one is there already; nothing is written.
            OSError: if the disk is full; the file holds what it held before.
        """
        keys = [key_of(row, self.key) for row in rows]
        if len(set(keys)) < len(keys) or self.done & set(keys):
            raise ValueError(f"{self.path} has a row for {', '.join(map(str, keys))} already")
        if self.origin is not None:
            self._record(self.origin)
            self.origin = None
        append_whole(self._descriptor, b"".join(map(_line, rows)), self.path)
        for row in rows:
            self._add(row)

    def _record(self, origin: dict[str, Any]) -> None:
        """Note that rows of another machine or commit follow, unless it has some there already."""
        if origin not in recorded_of(self.path):
            noted = read_json(settings_path(self.path))
            noted["continued"] = [*noted.get("continued", []), origin]
            write_json(settings_path(self.path), noted)

    def _add(self, row: Row) -> None:
        self.done.add(key_of(row, self.key))
        self.rows.append(row)


def key_of(row: Row, key: Sequence[str]) -> Hashable:
    """Return the value that makes ``row`` unique: of one field, or a tuple of several."""
    return row[key[0]] if len(key) == 1 else tuple(row[name] for name in key)


def settings_path(path: Path) -> Path:
    """Return where the settings of the rows in ``path`` are kept."""
    return path.with_name(path.name + ".settings.json")


def recorded_of(path: Path) -> list[dict[str, Any]]:
    """Return what is recorded of the processes that wrote the rows in ``path``, each once."""
    noted = read_json(settings_path(path))
    return [noted["recorded"], *noted.get("continued", [])]


@contextmanager
def open_store(
    path: Path,
    settings: dict[str, Any],
    key: Sequence[str],
    recorded: dict[str, Any] | None = None,
) -> Iterator[ResultStore]:
    """Start or resume the file, for this process alone.

    What is refused is left as it was, and a file that has no row when an error ends the block is
    removed again.

    Args:
        settings: what the rows depend on, JSON-able.
        key: fields that make a row unique.
        recorded: written next to the settings, never compared; of a later process, if it differs,
            when that adds its first row.

    Raises:
        ValueError: if the file was not written by a job like this one, the rows were made with
            other settings, a line is damaged or a row appears twice.
        StoreInUseError: if another process is writing the file.
        OSError: if the disk refuses; names the file.
    """
    check_output(path)
    make_folder(path.parent)
    descriptor = _open_locked(path)
    is_new = not os.fstat(descriptor).st_size and not settings_path(path).exists()
    try:
        holds_rows = os.fstat(descriptor).st_size > 0
        if holds_rows:
            check_settings(path, settings)
        origin = recorded if holds_rows else None
        store = ResultStore(path, key, descriptor, origin)
        if holds_rows:
            _cut_torn_line(path, descriptor)
        else:
            write_json(settings_path(path), {"settings": settings, "recorded": recorded or {}})
        yield store
    except BaseException:
        if is_new and not os.fstat(descriptor).st_size:
            settings_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def check_output(path: Path) -> None:
    """Raise ValueError if ``path`` cannot be a store, whatever the settings.

    A command calls this before it loads a model; :func:`open_store` does so too.
    """
    check_folder(path.parent)
    check_file(path)
    noted = settings_path(path)
    if noted.exists() and not _is_noted(noted):
        raise ValueError(
            f"{noted} exists and is damaged or somebody else's: take another file for the output"
        )
    if path.exists() and path.stat().st_size and not noted.exists():
        raise ValueError(
            f"{path} exists, but {noted.name}, which says how its rows were made, does not: it is "
            "left as it is; take another file or folder for the output, or remove it to start over"
        )


def iter_rows(path: Path, key: Sequence[str]) -> Iterator[Row]:
    """Yield the rows one by one; a torn last line is left out.

    Raises:
        ValueError: if another line is damaged, or a row appears twice (names file and line).
    """
    seen: set[Hashable] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line)
                found = key_of(row, key)
                hash(found)
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number} is damaged: remove that line to have its row again"
                ) from None
            if found in seen:
                raise ValueError(
                    f"{path}, line {number} repeats {found}: remove one of the two lines"
                )
            seen.add(found)
            yield row


def shard_file(folder: Path, name: str, shard: int, count: int) -> Path:
    """Return the file of shard ``shard`` (from 0) of ``count``."""
    return folder / f"{name}-{shard}-of-{count}.jsonl"


def iter_shards(
    folder: Path, name: str, key: Sequence[str], settings: dict[str, Any] | None = None
) -> Iterator[Row]:
    """Yield the rows of all shards once each, one in memory at a time.

    Rows do not depend on the shard, so that a job resumes with another number of shards.  Other
    processes may be writing, and two of them may have made the same row.

    Raises:
        ValueError: if a shard is damaged, or was written with other settings than ``settings``.
    """
    seen: set[Hashable] = set()
    for path in sorted(folder.glob(f"{name}-*-of-*.jsonl")):
        if settings is not None and path.stat().st_size:
            check_settings(path, settings)
        for row in iter_rows(path, key):
            if key_of(row, key) not in seen:
                seen.add(key_of(row, key))
                yield row


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError, which names what differs, if the rows were made with other settings."""
    check_output(path)
    before = read_json(settings_path(path))["settings"]
    changes = _differences(before, json.loads(json.dumps(settings)))
    if not changes:
        return
    names = ", ".join(list(changes)[:MOST_NAMED])
    if len(changes) > MOST_NAMED:
        names += f" and {len(changes) - MOST_NAMED} more"
    values = ", ".join(list(changes.values())[:MOST_NAMED])
    raise ValueError(
        f"{path} holds rows made with other settings ({names}): {values}; use the old ones, take "
        "another output folder, or remove this file to start over"
    )


def _differences(before: Row, now: Row, prefix: str = "") -> dict[str, str]:
    """Map the names that differ, such as "outer.inner", to "outer.inner was 3 and is now 4"."""
    found: dict[str, str] = {}
    for key in sorted(before.keys() | now.keys()):
        name = f"{prefix}{key}"
        old = before.get(key, ABSENT)
        new = now.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= _differences(old, new, f"{name}.")
        elif old != new:
            shown = ["absent" if value is ABSENT else reprlib.repr(value) for value in (old, new)]
            found[name] = f"{name} was {shown[0]} and is now {shown[1]}"
    return found


def _is_noted(path: Path) -> bool:
    """Return whether the file holds settings as :func:`open_store` writes them."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.keys() - {"continued"} == {"settings", "recorded"}


def _line(row: Row) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 has only as an escape
        return json.dumps(row).encode() + b"\n"


def _open_locked(path: Path) -> int:
    """Open the file, which is made if it is absent, locked for this process."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed since it was opened


def _lock(descriptor: int, path: Path, kind: int) -> None:
    """Lock without waiting; the kernel frees it however the process ends."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreInUseError(
            f"{path} is being written by another process: wait for it, or take another output "
            "folder"
        ) from None
    except OSError as error:  # a network disk without locks
        raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from error


def _cut_torn_line(path: Path, descriptor: int) -> None:
    last = b""
    with path.open("rb") as lines:
        for line in lines:
            last = line
    if last.endswith(b"\n"):
        return
    begin = last[: len(ROW_BEGIN)].rstrip(b"\0")  # a machine that lost its power leaves zeros
    if not ROW_BEGIN.startswith(begin):
        raise ValueError(
            f"{path} ends with something that is no row: remove its last line to go on"
        )
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(last))


# --- folders


def check_results(folder: Path, main: str, others: Collection[str], keys: Collection[str]) -> None:
    """Raise ValueError if results would replace files of somebody else.

    Called before anything is measured.

    Args:
        main: the JSON file that a run writes before ``others``, with where it comes from
            (:func:`rlkv.utils.runtime.provenance`), and by which they are known.
        keys: what it holds besides, by which one command's results are told from another's.
    """
    check_folder(folder)
    found = [name for name in (main, *others) if (folder / name).exists()]
    if not found:
        return
    try:
        content = read_json(folder / main)
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or not content.keys() >= {"command", "versions", *keys}:
        raise ValueError(
            f"{folder} holds {', '.join(found)}, and no {main} that an earlier run of this command "
            "wrote: take another output folder, or move them away"
        )


def check_free(folder: Path) -> None:
    """Raise :class:`StoreInUseError` if another process holds the folder (:func:`hold_folder`)."""
    if folder.resolve() in _LOCKS or not (folder / LOCK).is_file():
        return
    with (folder / LOCK).open("rb") as file:
        _lock(file.fileno(), folder, fcntl.LOCK_SH)


def hold_folder(folder: Path) -> None:
    """Keep other processes out of the folder of a run until :func:`free_folder` or this one ends.

    Raises:
        StoreInUseError: if another process holds it.
    """
    make_folder(folder)
    place = folder.resolve()
    if place in _LOCKS:
        return
    descriptor = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, folder, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    _LOCKS[place] = descriptor


def free_folder(folder: Path) -> None:
    """Let other processes into a folder that :func:`hold_folder` may hold."""
    descriptor = _LOCKS.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)
