"""Checkpoints that are complete or absent, with checksums, on the disk before they get their name."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlkv.utils.atomic import write_bytes, write_json
from rlkv.utils.jsonl import read_json

_NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"  # where a checkpoint is written until it is complete
CHECKSUMS = "checksums.json"  # SHA-256 of all other files of a checkpoint


@contextmanager
def new_checkpoint(
    output_dir: Path, step: int, keep: int | None, is_main: bool = True, wait: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """A path to write the checkpoint of ``step`` to; it becomes ``checkpoint-STEP`` when the block ends without error.

    Then damaged checkpoints and all but the ``keep`` newest are deleted (None: all others stay). After an error, such
    as a full disk, the earlier ones are as they were.

    Args:
        is_main: whether this process moves and deletes folders.
        wait: barrier of all processes.
    """
    target, partial = output_dir / f"checkpoint-{step}", output_dir / PARTIAL
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    wait()
    yield partial / target.name
    wait()
    if is_main:
        _seal(partial / target.name)
        if target.exists():  # a damaged one, behind the one that the run resumed from
            shutil.rmtree(target)
        (partial / target.name).rename(target)
        _to_disk(output_dir)
        older = [path for other, path in sorted(_checkpoints(output_dir).items()) if other <= step]
        damaged = [path for path in older if _damaged(path) is not None]
        whole = [path for path in older if path not in damaged]
        for path in [*damaged, *whole[: -keep if keep else 0]]:
            shutil.rmtree(path.rename(partial / path.name))  # renamed first: what is half deleted cannot be resumed
        partial.rmdir()
    wait()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose files are as they were written, with a warning for newer ones; None if none exists.

    Raises:
        ValueError: if there are checkpoints, and all of them are damaged.
    """
    found = _checkpoints(folder)
    for step in sorted(found, reverse=True):
        damaged = _damaged(found[step])
        if damaged is None:
            return found[step]
        warnings.warn(f"{found[step]} is damaged ({damaged}): looking for an earlier checkpoint", stacklevel=2)
    if found:
        raise ValueError(f"all checkpoints in {folder} are damaged: remove them to start again, or restore one")
    return None


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()  # torch reports a full disk as an error of its own, without the file's name
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def load_tensors(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints by their steps; other folders, such as a copy named ``checkpoint-40-best``, are the user's."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(match[1]): path for match, path in found if match}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)


def _to_disk(path: Path) -> None:
    """What was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(folder: Path) -> None:
    """Note the checksums of the files, and have all of them on the disk."""
    files = _files(folder)
    sums = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for path in files:
        _to_disk(path)
    write_json(folder / CHECKSUMS, sums)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _to_disk(path)


def _damaged(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None: nothing, or it has no checksums, as those of trl's own trainers."""
    noted = folder / CHECKSUMS
    if not noted.exists():
        return None
    try:
        sums = read_json(noted).items()
    except (ValueError, AttributeError, OSError):
        return f"{CHECKSUMS} is not readable"
    for name, wanted in sums:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            return f"{name} has changed since it was written"
    return None
