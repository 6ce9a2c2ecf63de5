"""Files that are either the old one or the complete new one, whenever the process dies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary file next to ``path`` to write to; it is renamed to ``path`` when the block ends without error.

    Missing folders are made. After an error in the block an earlier ``path`` is as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())  # the rename must not reach the disk before the content
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any) -> None:
    """Write an indented JSON file atomically; what JSON does not know (paths, dtypes) as ``str``."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")
